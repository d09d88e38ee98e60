"""The text of XLA's programs: what they consist of, in the order in which it is launched."""

import math
import re
from typing import NamedTuple

import ml_dtypes
import numpy as np

_DTYPES = {
    **{
        f"{sign}{8 * size}": np.dtype(f"{kind}{size}") for sign, kind in ("si", "uu") for size in (1, 2, 4, 8)
    },
    **{"pred": np.dtype("u1"), "f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")},
    "c64": np.dtype("c8"),
    # Half a byte each, of which nothing here depends: no part of them is copied.
    **dict.fromkeys(("s4", "u4"), np.dtype("u1")),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "f8e3m4": np.dtype(ml_dtypes.float8_e3m4),
}
_COMMENT = re.compile(r"/\*.*?\*/")


class Op(NamedTuple):
    """One line of a computation.

    Attributes:
        name: of its result.
        is_root: whether that is the result of the computation.
        shape: as text.
        kind: what it is, such as `fusion`.
        operands: names.
        inside: what stands in the parentheses, as text.
        attributes: what stands behind them.
    """

    name: str
    is_root: bool
    shape: str
    kind: str
    operands: tuple[str, ...]
    inside: str
    attributes: str

    def attribute(self, name: str) -> str:
        """Return a name or a number among the attributes."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        if match is None:
            raise LookupError(f"{self.name} has no {name}")
        return match[1]


class Module(NamedTuple):
    """A program.

    Attributes:
        computations: by name, each as it is scheduled.
        entry: the name of the one that is run.
    """

    computations: dict[str, list[Op]]
    entry: str


def parse(text: str) -> Module:
    """Return the program of a dump of scheduled HLO."""
    blocks = re.findall(r"^(ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)\n\}", text, re.MULTILINE | re.DOTALL)
    computations = {name: [_op(line) for line in body.splitlines()] for _, name, body in blocks}
    (entry,) = (name for is_entry, name, _ in blocks if is_entry)
    return Module(computations, entry)


def _op(line: str) -> Op:
    match = re.match(r"\s*(ROOT )?%([\w.\-]+) = (.*)", _COMMENT.sub("", line))
    assert match, line
    is_root, name, rest = match.groups()
    # The shape of a tuple stands in parentheses, and has spaces.
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    kind = rest[: rest.index("(")]
    close = _closing(rest)
    inside = rest[len(kind) + 1 : close]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Op(name, bool(is_root), shape, kind, operands, inside, rest[close + 1 :])


def _closing(text: str) -> int:
    """Return where the first parenthesis of a text is closed."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    raise ValueError(text)


def arrays(shape: str) -> list[tuple[np.dtype, tuple[int, ...]]]:
    """Return the dtypes and the shapes of the arrays of a shape, in order."""
    found = re.findall(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]", shape)
    return [(_DTYPES[kind], tuple(map(int, axes.split(","))) if axes else ()) for kind, axes in found]


def size(shape: str) -> int:
    """Return the bytes of all arrays of a shape."""
    if re.search(r"\b[su]4\[", shape):
        raise NotImplementedError(f"the bytes of {shape}")
    return sum(dtype.itemsize * math.prod(axes) for dtype, axes in arrays(shape))


def constant(op: Op) -> np.ndarray:
    """Return the value of a constant."""
    ((dtype, shape),) = arrays(op.shape)
    if "..." in op.inside:
        raise ValueError(f"{op.name} is cut short: dump it with xla_dump_large_constants")
    texts = re.findall(r"true|false|-?(?:inf|nan|[\d.]+(?:e[+-]?\d+)?)", op.inside)
    whole = {"true": 1, "false": 0}
    values = [float(x) if dtype.kind in "fV" else whole[x] if x in whole else int(x) for x in texts]
    return np.array(values).astype(dtype).reshape(shape)
