"""The tables that records hold: what a step costs, how near choices stay to float32, fine-tuning.

python benchmarks/record_tables.py           # says which tables are not those of the newest records
python benchmarks/record_tables.py --write   # writes them into the pages, between their markers

A table is between `<!-- NAME: make tables -->` and `<!-- /NAME -->`; the rest of a page is written by hand.
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
Table = tuple[str, Iterable[Iterable[str]]]
_IN_TORCH = {
    "AdamW, bfloat16 (default)": "AdamW",
    "bfloat16, nearest": "AdamW, nearest",
    "one_pass (mulaw8, uroot4_e4m4)": "AdamW, one_pass",
    "eight_bit (relative e3m4, uroot8)": "AdamW, eight_bit",
    "Lion, bfloat16": "Lion",
    "momentum, bfloat16": "SGD, momentum",
}
"""The names of the settings in the record of torch's programs."""
_RECIPES = ("one_pass", "eight_bit", "four_bit")
_DELETED = ("ufloat8_e4m4", "ufloat8_e6m2", "e5m2", "scaled e3m4", "4-bit tables", "4-bit codebooks")
"""Formats of records that the packages no longer have."""
_KINDS = (
    *("healthy", "healthy, sizes alike", "spike 1e4x", "1e-8", "1e4", "elements 1 step in 300"),
    *("heavy tails", "lognormal, sigma 3", "steady", "row reborn", "alternating sign", "idle"),
)
"""The kinds of made-up gradients that the page shows."""


def newest(name: str) -> pathlib.Path:
    """Return the newest record of a name."""
    return max((ROOT / "benchmarks" / "results").glob(f"????-??-??-{name}.json"))


def rows(name: str, key: str = "rows") -> Any:
    """Return the rows of the newest record of a name, without rows of formats that were deleted since."""
    found = json.loads(newest(name).read_text())[key]
    if isinstance(found, dict):
        return found
    return [row for row in found if not any(fmt in str(row) for fmt in _DELETED)]


def by_first_two(records: list[dict], first: str, second: str) -> dict[str, dict[str, dict]]:
    """Return rows by two of their entries."""
    found: dict[str, dict[str, dict]] = {}
    for row in records:
        found.setdefault(row[first], {})[row[second]] = row
    return found


def text_of(table: Table) -> str:
    """Return a table in Markdown: numbers are to the right, and recipes are code."""
    head, lines = table
    named = [[re.sub(r"\b(one_pass|\w+_bit)\b", r"`\1`", name), *cells] for name, *cells in lines]
    rule = ["---"] + ["--:"] * head.count("|")
    return "\n".join(f"| {' | '.join(line)} |" for line in [head.split(" | "), rule, *named])


def bytes_moved() -> Table:
    """Return the bytes of compiled steps, in JAX."""
    lines = []
    settings = by_first_two(rows("compiled-tpu") + rows("compiled-h100"), "setting", "target")
    for name, by_target in settings.items():
        shape = by_target["h100"]["shape"]
        moved = ["{moved:.2f} ({x:.2f}x)".format_map(by_target[target]) for target in ("v5e", "v6e", "h100")]
        row = name if shape == [32768, 8192] else f"{name}, {' x '.join(map(str, shape))}"
        cells = [f"{by_target['v5e']['floor']:.2f}", *moved, f"{by_target['h100']['temporaries']:.2f}"]
        lines.append([row, *cells])
    return "bytes per parameter | floor | TPU v5e | TPU v6e | H100 | temporaries on H100", lines


def instructions() -> Table:
    """Return the machine instructions of steps that are one kernel, and those that torch has a name for."""
    in_torch = {row["step"]: row["instructions"]["sm_90"] for row in rows("compiled_torch-h100")}
    lines = []
    for row in rows("compiled-h100"):
        name, cells = row["setting"], ["-", ""]
        if "machine" in row:
            cells[0] = f"{row['machine']:.0f} ({row['integer']:.0f})"
        if name in _IN_TORCH:
            cells[1] = "{machine:.0f} ({integer:.0f})".format_map(in_torch[_IN_TORCH[name]])
        if cells != ["-", ""]:
            lines.append([name, *cells])
    return "machine instructions per parameter (of them integer) | JAX | torch", lines


def _timed(layouts: tuple[str, ...], figures: tuple[str, ...]) -> list[list[str]]:
    """Return the figures of a name in some layouts, one line for each name."""
    lines: dict[str, list[str]] = {}
    for layout in layouts:
        for row in rows("step-cpu"):
            if row["layout"] == layout:
                lines.setdefault(row["name"], []).extend(f"{row[figure]:.2f}" for figure in figures)
    return [[name, *cells] for name, cells in lines.items()]


def times() -> Table:
    """Return the time of a step of one large array."""
    head = (
        "AdamW, one array of 16 million | ns per parameter | time relative to a plain copy of the same bytes"
    )
    return head, _timed(("1 x 16M",), ("ns", "x"))


def times_by_storage() -> Table:
    """Return the time of a step by storage, relative to bfloat16."""
    what = "AdamW by storage, one array of 4 million"
    head = f"{what}; processor time relative to the bfloat16 step of the same package | JAX | torch"
    return head, _timed(("JAX storages", "torch storages"), ("x",))


def times_of_many() -> Table:
    """Return the time of a step of many arrays, relative to torch's `foreach`."""
    lines: dict[str, list[str]] = {}
    layouts = ("300 x 1k to 50k", "300 x 64 to 4k")
    for layout in layouts:
        of_layout = [row for row in rows("step-cpu") if row["layout"] == layout]
        peer = next(row for row in of_layout if "foreach" in row["name"])
        for row in of_layout:
            lines.setdefault(row["name"], []).append(f"{row['cpu'] / peer['cpu']:.2f}")
    del lines["copy of 14 bytes"]
    sizes = " | ".join(layout.removeprefix("300 x ") for layout in layouts)
    head = f"AdamW in torch, bfloat16, 300 arrays; processor time relative to `foreach` | {sizes} elements"
    return head, [[name, *cells] for name, cells in lines.items()]


def host() -> Table:
    """Return what a step costs the host."""
    lines = []
    for case, by_row in by_first_two(rows("host_time-cpu"), "case", "row").items():
        calls = [f"{by_row[name]['calls']:,}" for name in ("compiled", "torch foreach")]
        timed = [by_row.get(name) for name in ("eager", "compiled", "one_pass", "torch fused")]
        lines.append([case, *calls, *(f"{row['of foreach']:.2f}" if row else "-" for row in timed)])
    head = "weights | calls, compiled | calls, `foreach` | time, eager | compiled | `one_pass` | fused"
    return head, lines


def compile_time() -> Table:
    """Return what it takes to compile a step of 10 and of 100 leaves."""
    lines = []
    for row in rows("compile_time-cpu"):
        if row["leaves"] == 100 or (row["leaves"] == 10 and row["step"] in ("optax.adamw", "adamw")):
            seconds = [f"{row[key]:.2f}" for key in ("trace", "lower", "compile", "total")]
            name = re.sub(r"^(?=adamw|lamb)", "halfstep_jax.", row["step"])
            lines.append([name, str(row["leaves"]), *seconds, f"{row['equations per leaf']:.0f}"])
    return "step | leaves | trace | lower | compile | total | equations per leaf", lines


def made_up_gradients() -> Table:
    """Return how far runs of made-up gradients end from float32, by what keeps the moments."""
    of = rows("scenarios-cpu", "results")
    peers = [name for name in of if " " in name and not name.startswith("bfloat16 weights")]
    formats = [name for name in of if name in _RECIPES] + peers
    lines = [
        [kind, *(f"{of[name][kind][0]:.{2 if kind == 'idle' else 3}f}" for name in formats)]
        for kind in _KINDS
    ]
    return " | ".join(["gradients", *(f"`{x}`" if x in _RECIPES else x for x in formats)]), lines


def fed_back(rule: str, head: str) -> Table:
    """Return the distances of a rule without and with weights fed back; a column is a recipe."""
    found = [row for row in rows("fed_back-cpu", "digits") if row["rule"] == rule]
    lines: dict[str, list[str]] = {}
    columns: dict[str, float] = {}
    for without, with_it in zip(found[::2], found[1::2], strict=True):
        assert (without["storage"], with_it["storage"]) == ("stochastic", "feedback")
        rate = with_it["rate"].removesuffix("s").replace("restart", "restarted")
        lines.setdefault(rate, []).append(f"{without['dist']:.4f} to **{with_it['dist']:.4f}**")
        columns[with_it["recipe"].replace("eight_bit", "`eight_bit`")] = with_it["bytes"]
    names = (f"{recipe}, {size:.2f} bytes" for recipe, size in columns.items())
    return " | ".join([head, *names]), [[rate, *cells] for rate, cells in lines.items()]


_SHOWN = (
    *("float32, another batch order", "float32; mu bf16, nu scaled fp16", "float32; bf16"),
    "float32; bf16 nearest",
    *(f"float32; mu relative e3m4, nu {nu}" for nu in ("uroot8", "ufloat8_e5m3")),
    *("float32; fp8: mu e4m3fn, nu ufloat8_e5m3", "float32; 8-bit tables: dynamic8, udynamic8"),
    *("bf16 split8; bf16", "bf16 compensated; bf16", "bf16 nearest; bf16 nearest"),
)
"""The rows of quality.py that the page shows."""


def of_digits() -> dict[str, dict]:
    """Return the rows of quality.py by name, each of the newest record that has it."""
    of: dict[str, dict] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*-quality*-cpu.json")):
        of |= {row["name"]: row for row in json.loads(path.read_text())["digits"]}
    return of


def other_formats() -> Table:
    """Return dist of further formats of moments under float32 weights, on digits and on the transformer."""
    of, of_model = (
        of_digits(),
        {row["name"]: row for row in rows("transformer-cpu", "transformer")},
    )
    lines = []
    for name in (
        "mu relative e3m4, nu ufloat8_e5m3",
        "fp8: mu e4m3fn, nu ufloat8_e5m3",
    ):
        row, model = of[f"float32; {name}"], of_model.get(name.replace("mu ", "").replace("nu ", ""))
        cells = [f"{row['dist']:.4f} ± {row['spread']:.4f}"]
        cells.append(f"{model['dist']:.4f} ± {model['spread']:.4f}" if model else "")
        lines.append([name, *cells])
    return "moments | dist, digits | dist, transformer", lines


def quality() -> Table:
    """Return what digits say of formats and storages."""
    of = of_digits()
    lines = [
        [name, *(f"{of[name]['bytes']:.2f}", f"{of[name]['dist']:.4f}", f"{of[name]['proj']:.4f}")]
        for name in _SHOWN
    ]
    return "weights; moments | bytes per parameter | dist | proj", lines


def rules() -> Table:
    """Return what state and weights of rules do whose formats are not those of a first and second moment."""
    lines = []
    for row in rows("rules-cpu", "digits"):
        if row["dist"] > 5e-5 and not row["rule"].startswith("scale_by_"):
            named = f"`{row['rule'].replace(', momentum', '`, momentum 0.9')}"
            name = row["name"] if row["name"].startswith(("float32", "bf16")) else f"float32; {row['name']}"
            figures = f"{row['dist']:.4f} ± {row['spread']:.4f}", f"{row['proj']:.4f}"
            lines.append(
                [f"{named}{'' if 'momentum' in named else '`'}: {name}", f"{row['bytes']:.2f}", *figures]
            )
    return "rule: weights; state | bytes | dist, digits | proj", lines


_FORMATS = (
    "float32, another batch order",
    "scaled float16",
    "bfloat16",
    "int8, 32, fine",
    "e4m3fn",
)


def rules_by_format(task: str, *records: str) -> Table:
    """Return dist and proj of rules on a task by the format of moments with a sign."""
    found: dict[str, dict[str, str]] = {}
    for record in records:
        for row in ({"rule": "scale_by_muon", **row} for row in rows(record, task)):
            name = re.sub(r"^(lead|momentum|float8_(?=e4m3fn, 128)) ?|(; nu .*|, 128)$", "", row["name"])
            name = {"bf16": "bfloat16", "int8 in 32, fine": "int8, 32, fine"}.get(name, name)
            found.setdefault(row["rule"], {})[name] = f"{row['dist']:.3f}, {row['proj']:.3f}"
    lines = [
        [f"`{rule}`".replace(", momentum`", "`, momentum 0.9"), *(cells.get(name, "") for name in _FORMATS)]
        for rule, cells in found.items()
        if cells.keys() & set(_FORMATS[2:]) and "optax" not in rule
    ]
    return " | ".join(["rule", *(name.removeprefix("float32, ") for name in _FORMATS)]), lines


def low_weights() -> Table:
    """Return how weights in 8 bits end, by rate and model."""
    of_digits = by_first_two(rows("low_weights-cpu", "digits"), "name", "rate")
    of_model = {row["name"]: row for row in rows("low_weights-cpu", "transformer")}
    lines = []
    for name, by_rate in of_digits.items():
        if name == "float32":
            continue
        usual = by_rate["1e-03"]
        cells = [str({"float32": 4, "bfloat16": 2}.get(name.split(",")[0], 1))]
        cells.append(f"{usual['dist']:.4f} ± {usual['spread']:.4f}")
        cells += [f"{by_rate[rate]['dist']:.4f}" if rate in by_rate else "" for rate in ("1e-05", "restarts")]
        model = of_model.get(name)
        cells += [f"{model['dist']:.4f}", f"{model['over']:+.4f}"] if model else ["", ""]
        lines.append([name, *cells])
    head = "weights, moments in float32 | bytes | dist, digits, rate 1e-3 | rate 1e-5 | restarts"
    return f"{head} | dist, transformer | loss over float32", lines


def fine_tuning() -> Table:
    """Return what fine-tuning keeps, by weights."""
    lines = [
        [
            f"{row['rate']}: {row['name']}",
            *(f"{row['loss']:+.4f}", f"{1000 * row['KL']:.3f}", f"{row['moved']:.0%}"),
            *(f"{row['dist']:.2f}", f"{row['proj']:.2f}"),
        ]
        for row in rows("fine_tuning-cpu")
        if row["name"] != "float32"
    ]
    return "learning rate: weights | loss over float32 | KL, 1/1000 | moved | dist | proj", lines


def language_model() -> Table:
    """Return the loss of a language model that is fine-tuned, and its movement, by weights and state."""
    lines = []
    for row in rows("language_model-cpu"):
        name = re.sub(r"^(?=default|feedback|eight_bit|one_pass)", "halfstep, ", row["name"])
        shares = (row["projection"], row["projection, embedding"])
        figures = (f"{row['losses'][-1]:.3f}", f"{row['unchanged']:.0%}", *(f"{x:.3f}" for x in shares))
        lines.append([name, *figures])
    return "weights and state | held-out loss | unchanged weights | movement | of the embedding", lines


TABLES: dict[str, dict[str, Callable[[], Table]]] = {
    "docs/benchmarks/cost.md": {
        "bytes": bytes_moved,
        "instructions": instructions,
        "times": times,
        "times by storage": times_by_storage,
        "times of many": times_of_many,
        "host": host,
        "compile time": compile_time,
    },
    "docs/benchmarks/fidelity.md": {
        "other formats": other_formats,
        "made-up gradients": made_up_gradients,
        "quality": quality,
        "rules": rules,
        "rules by format": lambda: rules_by_format("digits", "rules-cpu", "muon-cpu"),
        "rules on the transformer": lambda: rules_by_format("transformer", "rules-transformer-cpu"),
        "weights in 8 bits": low_weights,
    },
    "docs/how-to/feedback.md": {
        "adamw": lambda: fed_back("adamw", "learning rate"),
        "sgd": lambda: fed_back("sgd", "learning rate of SGD"),
    },
    "docs/how-to/lost-updates.md": {"fine-tuning": fine_tuning},
    "README.md": {"language model": language_model},
}
"""The tables of each page, by the names of their markers."""


def placed(page: str, text: str) -> str:
    """Return the text of a page with its tables as the newest records have them."""
    for name, table in TABLES[page].items():
        begin, end = f"<!-- {name}: make tables -->", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n\n{text_of(table())}\n\n{end}{after}"
    return text


def main() -> int:
    """Write the tables, or name the pages that have others; return the exit status."""
    parser = argparse.ArgumentParser(description="Make tables of the newest records.")
    parser.add_argument("--write", action="store_true", help="write them into the pages")
    write, stale = parser.parse_args().write, []
    for page in TABLES:
        path = ROOT / page
        text = path.read_text()
        due = placed(page, text)
        if write:
            path.write_text(due)
        elif due != text:
            stale.append(page)
    print("\n".join(stale), file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
