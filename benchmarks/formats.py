"""What each format can hold: the table and the diagrams of docs/concepts/formats.md.

    python benchmarks/formats.py [--check]

Writes a diagram of each format, and prints the table. Every number is read from the reference: a format
rounds magnitudes that lie close together and returns the numbers that it has. With `--check` nothing is
written: the exit status is 1 where the diagrams or the table on the page differ.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import re
import sys

import numpy as np

from halfstep_spec.storage.codes import CODEBOOK_CODES, PLAIN_CODES, SCALED_CODES
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.relative import relative
from halfstep_spec.storage.relative_codes import FINE_CODES, FIXED_CODES
from halfstep_spec.storage.state_dtypes import codebook, scaled
from halfstep_spec.storage.unsigned_floats import E5M3

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "concepts" / "formats.md"
DIAGRAMS = ROOT / "docs" / "images" / "formats"
# What a diagram shows: powers of two of magnitudes, with a scale and without, and of errors.
SCALED_AXIS, PLAIN_AXIS, ERROR_AXIS = (-40, 0), (-56, 20), (-12, 0)
STEPS_PER_BINADE = 4096
BIT = 24  # the width of a bit: "sign" and "exponent 3" fit under theirs
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
FLOATS = {"bfloat16": (8, 7), "float16": (5, 10), "float8_e4m3fn": (4, 3)}
FLOATS |= {"float8_e3m4": (3, 4)}
# Of the eighth root, of the fourth root, of a number itself and of a logarithm.
ROOTS = {"uroot8": {"root": 8}, "uroot4_e4m4": {"exponent": 4, "mantissa": 4}}
ROOTS |= {"ufloat16_e7m9": {"exponent": 7, "mantissa": 9}, "mulaw8": {"sign": 1, "logarithm": 7}}
REASONS = {
    '"bfloat16"': "the default of bfloat16 weights",
    '"float16"': "states of other libraries in float16",
    '"ufloat16_e7m9"': "`sixteen_bit`",
    '"uroot4_e4m4"': "`one_pass`",
    'relative("float8_e3m4")': "`eight_bit`",
    'relative("mulaw8")': "`one_pass`",
    'relative("int8", 32)': "any rates, where `eight_bit` has no bound",
    'relative("int4", 32)': "`four_bit`",
    'scaled("float16")': "momentum of Muon",
    'scaled("float8_e4m3fn")': "LAMB16; Lion and SGD under `eight_bit`",
    'scaled("int8")': '8-bit weights and schedule-free runs, by `scale="fine"`',
    'scaled("ufloat8_e5m3")': "LAMB16",
    'scaled("uroot8")': "`eight_bit`, `four_bit`",
    'codebook("dynamic8")': "comparison with bitsandbytes and torchao",
    'codebook("udynamic8")': "comparison with bitsandbytes and torchao",
}
"""The use of each format, which is the reason that it is kept."""
COLOURS = {"sign": "#d55e00", "exponent": "#0072b2", "mantissa": "#009e73", "integer": "#009e73"}
COLOURS |= {"index": "#cc79a7", "root": "#cc79a7", "logarithm": "#cc79a7", "scale": "#999999"}


@dataclasses.dataclass(frozen=True)
class Diagram:
    """A format, and how its bits are divided.

    Attributes:
        call: how a user asks for it.
        format: the reference's.
    """

    call: str
    format: Format

    @property
    def file(self) -> str:
        """The name of its picture."""
        return "-".join(re.findall(r"\w+", self.call)) + ".svg"

    @property
    def fields(self) -> dict[str, int]:
        """The width in bits of each field of a code."""
        name = self.format.dtype
        if name in CODEBOOK_CODES:
            return {"index": 8}
        if name in ROOTS:
            return ROOTS[name]
        if name.startswith("int"):
            return {"sign": 1, "integer": int(name[3:]) - 1}
        if name == E5M3.name:
            return {"exponent": E5M3.exponent_bits, "mantissa": E5M3.mantissa_bits}
        return {"sign": 1} | dict(zip(("exponent", "mantissa"), FLOATS[name], strict=True))

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """The positive numbers that it has; with a scale, in a block whose largest magnitude is 1."""
        low, high = SCALED_AXIS if self.format.scaled else PLAIN_AXIS
        powers = np.arange(low * STEPS_PER_BINADE, high * STEPS_PER_BINADE + 1) / STEPS_PER_BINADE
        x = np.exp2(powers).astype(np.float32)
        x = np.stack([np.ones_like(x), x], axis=1) if self.format.scaled else x[None]
        values = self.format.decode(self.format.encode(x, None, keep_nonzero="always"))
        values = values[:, 1] if self.format.scaled else values[0]
        return np.unique(values[np.isfinite(values) & (values > 0)]).astype(np.float64)

    @property
    def binades(self) -> str:
        """How many binades its numbers cover, counted from the largest."""
        low = (SCALED_AXIS if self.format.scaled else PLAIN_AXIS)[0]
        covered = math.log2(self.numbers[-1] / self.numbers[0])
        return f"over {covered:.0f}" if self.numbers[0] < 2.0 ** (low + 0.01) else f"{covered:.1f}"

    def row(self) -> tuple[str, ...]:
        """Return its row of the table."""
        bits = sum(self.fields.values())
        scale = "a byte per block" if self.format.scaled else "-"
        kept = "both" if self.format.codes.for_second_moments and self.format.codes.signed else "`nu`"
        kept = kept if self.format.codes.for_second_moments else "`mu`"
        return (
            f"`{self.call}`",
            str(bits),
            scale,
            self.binades,
            f"{100 * self.format.codes.half_gap:.2g} %",
            kept,
            REASONS[self.call],
        )

    def svg(self) -> str:
        """Return its picture: the fields of a code, and the error of rounding over the magnitude."""
        return "\n".join([*HEAD, *self._fields(), *self._curve(), "</svg>", ""])

    def _fields(self) -> list[str]:
        """Return the fields as boxes, one square per bit."""
        boxes, x = [], 20
        fields = [*self.fields.items(), *([("scale", 8)] if self.format.scaled else [])]
        for name, width in fields:
            x += 16 * (name == "scale")
            for bit in range(width):
                square = f'x="{x + BIT * bit}" y="14" width="{BIT}" height="20"'
                boxes.append(f'<rect {square} fill="{COLOURS[name]}" stroke="white"/>')
            label = "scale, once per block" if name == "scale" else f"{name} {width}" if width > 2 else name
            boxes.append(f'<text x="{x + BIT * width // 2}" y="50" text-anchor="middle">{label}</text>')
            x += BIT * width
        return boxes

    def _curve(self) -> list[str]:
        """Return the axes, and half the gap between neighbours relative to the larger, over the larger."""
        low, high = SCALED_AXIS if self.format.scaled else PLAIN_AXIS

        def point(magnitude: float, error: float) -> str:
            x = 60 + 560 * (math.log2(magnitude) - low) / (high - low)
            y = 210 - 130 * (max(math.log2(error), ERROR_AXIS[0]) - ERROR_AXIS[0]) / (
                ERROR_AXIS[1] - ERROR_AXIS[0]
            )
            return f"{x:.1f},{y:.1f}"

        small, large = self.numbers[:-1], self.numbers[1:]
        errors = (large - small) / 2 / large
        # Of each binade the largest error: the picture has no room for more.
        bins = np.floor(np.log2(large))
        tops = [
            (float(large[bins == b][np.argmax(errors[bins == b])]), float(errors[bins == b].max()))
            for b in np.unique(bins)
        ]
        points = [point(*top) for top in tops]
        lines = [f'<polyline points="{" ".join(points)}" fill="none" stroke="#0072b2" stroke-width="2"/>']
        if self.numbers[0] > 2.0 ** (low + 0.01):
            left, right = point(2.0**low, 1).split(",")[0], point(self.numbers[0], 1).split(",")[0]
            width = float(right) - float(left)
            lines.append(
                f'<rect x="{left}" y="80" width="{width:.1f}" height="130" fill="#d55e00" opacity="0.15"/>'
            )
        for power in range(-12, 1, 4):
            y = point(1, 2.0**power).split(",")[1]
            percent = f"{100 * 2.0**power:.2g}" if power else "100"
            lines += [
                f'<line x1="60" x2="620" y1="{y}" y2="{y}" stroke="#dddddd"/>',
                f'<text x="54" y="{float(y) + 4:.1f}" text-anchor="end">{percent} %</text>',
            ]
        for power in range(low, high + 1, 8):
            x = point(2.0**power, 1).split(",")[0]
            exponent = str(power).translate(SUPERSCRIPTS)
            lines.append(f'<text x="{x}" y="228" text-anchor="middle">2{exponent}</text>')
        unit = "of the largest magnitude of the block" if self.format.scaled else "magnitude"
        unit = (
            "magnitude, in units of the root of nu"
            if self.format.relative and not self.format.scaled
            else unit
        )
        return [*lines[::-1], f'<text x="340" y="244" text-anchor="middle">{unit}</text>']


HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 250" font-family="sans-serif" font-size="12">',
    '<rect width="640" height="250" rx="6" fill="white"/>',
    '<text x="20" y="69">largest error of rounding to nearest, relative to the number</text>',
)


def diagrams() -> list[Diagram]:
    """Return every format that a user can ask for; float32, which rounds nothing, is left out."""
    rows = [Diagram(f'"{name}"', Format(name)) for name in PLAIN_CODES if name != "float32"]
    rows += [Diagram(f'relative("{name}")', relative(name)) for name in FIXED_CODES]
    rows += [Diagram(f'relative("{name}", 32)', relative(name, 2)) for name in FINE_CODES]
    rows += [Diagram(f'scaled("{name}")', scaled(name, 2)) for name in SCALED_CODES]
    return rows + [Diagram(f'codebook("{name}")', codebook(name, 2)) for name in CODEBOOK_CODES]


def table() -> str:
    """Return the table of the page, in Markdown."""
    head = ("format", "bits", "scale", "binades", "error near the top", "for", "used by")
    rows = [
        head,
        ("---", "--:", "---", "--:", "--:", "---", "---"),
        *(diagram.row() for diagram in diagrams()),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def stale() -> list[str]:
    """Return what the page or its pictures have that is not what the reference gives."""
    files = {diagram.file: diagram for diagram in diagrams()}
    wrong = [] if table() in PAGE.read_text() else [str(PAGE)]
    wrong += sorted(files.keys() ^ {path.name for path in DIAGRAMS.glob("*.svg")})
    same = files.keys() - set(wrong)
    return wrong + [name for name in sorted(same) if (DIAGRAMS / name).read_text() != files[name].svg()]


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Print the table of formats, and draw them.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is stale")
    if parser.parse_args().check:
        wrong = stale()
        print("\n".join(wrong))
        return int(bool(wrong))
    DIAGRAMS.mkdir(parents=True, exist_ok=True)
    for diagram in diagrams():
        (DIAGRAMS / diagram.file).write_text(diagram.svg())
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
