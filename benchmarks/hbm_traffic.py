"""How many bytes a compiled XLA program moves to and from memory, read from its text.

`compiled.cost_analysis()` does not tell a TPU's on-chip memory from HBM, and counts what is prefetched into
it twice. Here every operation of the entry computation reads its operands and writes its results once;
arrays in on-chip memory (`S(1)` in their layout) are free, and so is what moves nothing.
"""

import math
import re

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "f8e4m3fn": 8, "f8e5m2": 8}
_BITS |= {f"{kind}{bits}": bits for kind in "su" for bits in (4, 8, 16, 32, 64)}
_ARRAY = re.compile(rf"\b({'|'.join(sorted(_BITS, key=len, reverse=True))})\[([\d,]*)\](?:\{{([^}}]*)\}})?")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ON_CHIP = "S("
_MOVES_NOTHING = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("copy-done", "slice-done", "dynamic-slice-done"),  # counted where they start
}


def hbm_traffic(text: str) -> float:
    """Return the bytes that one run of a program moves.

    Args:
        text: of the optimised program, `compiled.as_text()`.
    """
    arrays, total = {}, 0.0
    for line in _entry_computation(text):
        if not (match := _OPERATION.match(line)):
            continue
        name, results, operation, rest = match.groups()
        arrays[name] = _arrays(results)
        if operation in _MOVES_NOTHING:
            continue
        if operation.endswith("-start"):
            total += _asynchronous(operation, arrays[name])
            continue
        operands = [arrays.get(operand, []) for operand in re.findall(r"%([\w.\-]+)", _arguments(rest))]
        total += sum(size for group in (arrays[name], *operands) for size, on_chip in group if not on_chip)
    return total


def _entry_computation(text: str) -> list[str]:
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("ENTRY"))
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("}"))
    return lines[start + 1 : end]


def _arrays(results: str) -> list[tuple[float, bool]]:
    """Return the size in bytes of every array of a type, and whether it is in on-chip memory."""
    return [
        (math.prod(int(n) for n in shape.split(",") if n) * _BITS[dtype] / 8, _ON_CHIP in layout)
        for dtype, shape, layout in _ARRAY.findall(results)
    ]


def _asynchronous(operation: str, arrays: list[tuple[float, bool]]) -> float:
    """Return what a copy between memories moves: as much as it writes, on each side that is HBM."""
    written, read = arrays[:2] if operation == "copy-start" else (arrays[1], arrays[0])
    return written[0] * ((not written[1]) + (not read[1]))


def _arguments(rest: str) -> str:
    """Return what stands before the parenthesis that closes the operands."""
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:i]
    return rest
