"""Instructions on integers and on patterns."""

import numpy as np

from ptx.kernel import Operand, bits
from ptx.launch import SIGNED, Launch
from ptx.memory import UNSIGNED
from ptx.operations import INTEGER, PATTERN, operation

_BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


@operation(rf"(?P<name>add|sub|mul\.lo|min|max)\.{INTEGER}")
def binary(launch: Launch, d: Operand, a: Operand, b: Operand, name: str, kind: str) -> None:
    launch.write(d, _BINARY[name](launch.read(a, kind), launch.read(b, kind)))


@operation(r"(?P<name>add|sub|min|max)\.(?P<kind>[us]16)x2")
def binary_of_halves(launch: Launch, d: Operand, a: Operand, b: Operand, name: str, kind: str) -> None:
    """Compute the halves of a register apart: no carry goes from one to the other."""
    x, y = launch.read(a, "u32"), launch.read(b, "u32")
    low, high = (_BINARY[name](_half(x, at, kind), _half(y, at, kind)) for at in (0, 16))
    launch.write(d, low.view(np.uint16) | (high.view(np.uint16).astype(np.uint32) << 16))


def _half(x: np.ndarray, at: int, kind: str) -> np.ndarray:
    """Return the 16 bits of patterns from a bit on."""
    return (x >> at).astype(np.uint16).view((SIGNED if kind[0] == "s" else UNSIGNED)[16])


@operation(r"mul\.(?P<part>wide|hi)\.(?P<kind>[us](?:16|32))")
def product(launch: Launch, d: Operand, a: Operand, b: Operand, part: str, kind: str) -> None:
    launch.write(d, _product(launch, a, b, part, kind))


@operation(r"mad\.(?P<part>lo|wide|hi)\.(?P<kind>[us](?:16|32)|(?<=lo\.)[us]64)")
def product_and_sum(
    launch: Launch, d: Operand, a: Operand, b: Operand, c: Operand, part: str, kind: str
) -> None:
    x = _product(launch, a, b, part, kind)
    launch.write(d, x + launch.read(c, f"{kind[0]}{8 * x.itemsize}"))


def _product(launch: Launch, a: Operand, b: Operand, part: str, kind: str) -> np.ndarray:
    x, y = launch.read(a, kind), launch.read(b, kind)
    if part == "lo":
        return x * y
    wide = (SIGNED if kind[0] == "s" else UNSIGNED)[2 * bits(kind)]
    whole = x.astype(wide) * y.astype(wide)
    return whole if part == "wide" else (whole >> wide(bits(kind))).astype(x.dtype)


@operation(r"(?P<name>div|rem)\.(?P<kind>[us](?:16|32)|s64)")
def quotient(launch: Launch, d: Operand, a: Operand, b: Operand, name: str, kind: str) -> None:
    """Divide, rounding toward zero; a remainder has the sign of the dividend."""
    x, y = (launch.read(v, kind).astype(np.int64) for v in (a, b))
    if (launch.everywhere(y)[launch.executing()] == 0).any():
        raise ZeroDivisionError("PTX does not say what a division by zero gives")
    rest = np.fmod(x, y)
    value = rest if name == "rem" else (x - rest) // y
    launch.write(d, value.astype((SIGNED if kind[0] == "s" else UNSIGNED)[bits(kind)]))


@operation(r"(?P<name>neg|abs)\.(?P<kind>s(?:16|32|64))")
def signed(launch: Launch, d: Operand, a: Operand, name: str, kind: str) -> None:
    launch.write(d, (np.negative if name == "neg" else np.abs)(launch.read(a, kind)))


@operation(r"(?P<name>and|or|xor)\.(?P<kind>pred|b16|b32|b64)")
def logical(launch: Launch, d: Operand, a: Operand, b: Operand, name: str, kind: str) -> None:
    join = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name]
    launch.write(d, join(launch.read(a, kind), launch.read(b, kind)))


@operation(r"not\.(?P<kind>pred|b16|b32|b64)")
def inverse(launch: Launch, d: Operand, a: Operand, kind: str) -> None:
    launch.write(d, ~launch.read(a, kind))


@operation(rf"shl\.{PATTERN}")
def shift_left(launch: Launch, d: Operand, a: Operand, b: Operand, kind: str) -> None:
    """Shift; past the width nothing is left."""
    x, by = launch.read(a, kind), launch.read(b, "u32")
    inside = np.minimum(by, bits(kind) - 1).astype(x.dtype)
    launch.write(d, np.where(by < bits(kind), x << inside, x.dtype.type(0)))


@operation(r"shr\.(?P<kind>[bus](?:16|32|64))")
def shift_right(launch: Launch, d: Operand, a: Operand, b: Operand, kind: str) -> None:
    """Shift; past the width only the sign is left, of a number that has one."""
    x, by = launch.read(a, kind), launch.read(b, "u32")
    shifted = x >> np.minimum(by, bits(kind) - 1).astype(x.dtype)
    launch.write(d, shifted if kind[0] == "s" else np.where(by < bits(kind), shifted, x.dtype.type(0)))


@operation(r"shf\.(?P<direction>[lr])\.(?P<mode>wrap|clamp)\.b32")
def funnel_shift(
    launch: Launch, d: Operand, a: Operand, b: Operand, c: Operand, direction: str, mode: str
) -> None:
    """Shift `a`, the lower half, and `b`; keep the upper half of what is shifted left, else the lower."""
    by = launch.read(c, "u32").astype(np.uint64)
    by = by & np.uint64(31) if mode == "wrap" else np.minimum(by, np.uint64(32))
    both = _joined(launch, a, b)
    value = (both << by) >> np.uint64(32) if direction == "l" else both >> by
    launch.write(d, value.astype(np.uint32))


@operation(r"bfe\.(?P<kind>[us](?:32|64))")
def extract(launch: Launch, d: Operand, a: Operand, b: Operand, c: Operand, kind: str) -> None:
    """Extract a field of `c` bits from bit `b` on; above it and past the width its sign is repeated."""
    width, x = bits(kind), launch.read(a, f"u{bits(kind)}").astype(np.uint64)
    start, length = (launch.read(v, "u32").astype(np.int64) & 255 for v in (b, c))
    end = np.clip(start + length - 1, 0, width - 1)
    count = np.clip(width - start, 0, length).astype(np.uint64)
    is_negative = (x >> end.astype(np.uint64) & np.uint64(1)).astype(bool) & (kind[0] == "s") & (length > 0)
    # NumPy does not define a shift by 64.
    inside = np.where(count < 64, (np.uint64(1) << np.minimum(count, 63)) - np.uint64(1), ~np.uint64(0))
    field = np.where(start < width, x >> np.minimum(start, 63).astype(np.uint64), np.uint64(0)) & inside
    launch.write(d, np.where(is_negative, field | ~inside, field).astype(UNSIGNED[width]))


@operation(r"bfi\.b32")
def insert(launch: Launch, d: Operand, a: Operand, b: Operand, c: Operand, length: Operand) -> None:
    """Insert the lowest bits of `a`, `length` of them, into `b` from bit `c` on."""
    start, count = (launch.read(v, "u32").astype(np.uint64) & np.uint64(255) for v in (c, length))
    start, count = np.minimum(start, np.uint64(32)), np.minimum(count, np.uint64(32))
    x, y = (launch.read(v, "b32").astype(np.uint64) for v in (a, b))
    inside = ((np.uint64(1) << count) - np.uint64(1)) << start
    launch.write(d, ((y & ~inside) | (x << start & inside)).astype(np.uint32))


@operation(r"prmt\.b32")
def permute(launch: Launch, d: Operand, a: Operand, b: Operand, c: Operand) -> None:
    """Choose four bytes of the eight of `a`, the lower ones, and `b`; or eight times the sign of a byte."""
    both, selector, value = _joined(launch, a, b), launch.read(c, "u32").astype(np.uint64), np.uint64(0)
    for n in range(4):
        choice = selector >> np.uint64(4 * n)
        byte = both >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        byte = np.where(choice & np.uint64(8), (byte >> np.uint64(7)) * np.uint64(255), byte)
        value = value | byte << np.uint64(8 * n)
    launch.write(d, value.astype(np.uint32))


@operation(r"lop3\.b32")
def three_inputs(launch: Launch, d: Operand, a: Operand, b: Operand, c: Operand, table: int) -> None:
    """Look up each bit in a table of eight, by the bits of `a`, the highest, `b` and `c`."""
    x, y, z = (launch.read(v, "b32") for v in (a, b, c))
    value = np.uint32(0)
    for n in range(8):
        if table >> n & 1:
            value = value | ((x if n & 4 else ~x) & (y if n & 2 else ~y) & (z if n & 1 else ~z))
    launch.write(d, value)


@operation(r"(?P<name>clz|popc)\.b32")
def count_bits(launch: Launch, d: Operand, a: Operand, name: str) -> None:
    """Count the zeros above the highest bit that is set, or the bits that are set."""
    x = launch.read(a, "b32").astype(np.uint64)
    if name == "clz":  # fill up below the highest
        for by in (1, 2, 4, 8, 16):
            x = x | x >> np.uint64(by)
        x = ~x & np.uint64(0xFFFFFFFF)
    launch.write(d, np.bitwise_count(x).astype(np.uint32))


def _joined(launch: Launch, low: Operand, high: Operand) -> np.ndarray:
    return launch.read(high, "u32").astype(np.uint64) << np.uint64(32) | launch.read(low, "u32")
