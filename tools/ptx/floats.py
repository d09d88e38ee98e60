"""Instructions on floats, and comparisons of floats and integers."""

import numpy as np

from ptx.kernel import Operand, bits
from ptx.launch import FLOATS, Launch
from ptx.operations import FLOAT, operation

_FTZ = r"(?P<ftz>\.ftz)?"
_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_TINY = np.finfo(np.float32).tiny


def flushed(x: np.ndarray) -> np.ndarray:
    """Return float32 numbers, zeros of their sign in place of subnormal ones."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def read_floats(launch: Launch, kind: str, ftz: str | None, *operands: Operand) -> list[np.ndarray]:
    """Return operands of a float type, flushed where the instruction says so."""
    if ftz and kind != "f32":
        raise NotImplementedError(f".ftz of {kind}")
    values = [launch.read(x, kind) for x in operands]
    return [flushed(x) for x in values] if ftz else values


def write_float(launch: Launch, d: Operand, value: np.ndarray, kind: str, ftz: str | None) -> None:
    """Write a result of a float type, flushed where the instruction says so."""
    launch.write_float(d, flushed(value) if ftz else value, kind)


@operation(rf"(?P<name>add|sub|mul)(?:\.rn)?{_FTZ}\.{FLOAT}")
def arithmetic(
    launch: Launch, d: Operand, a: Operand, b: Operand, name: str, kind: str, ftz: str | None
) -> None:
    """Round once: in NumPy 16-bit operations pass float32, which has enough bits to round twice safely."""
    x, y = read_floats(launch, kind, ftz, a, b)
    write_float(launch, d, _ARITHMETIC[name](x, y), kind, ftz)


@operation(rf"fma\.rn{_FTZ}\.(?P<kind>f32)")
def fused(launch: Launch, d: Operand, a: Operand, b: Operand, c: Operand, kind: str, ftz: str | None) -> None:
    x, y, z = (v.astype(np.float64) for v in read_floats(launch, kind, ftz, a, b, c))
    # The product is exact, the sum is rounded to odd; rounding that to float32 is then rounding once.
    write_float(launch, d, sum_to_odd(x * y, z).astype(np.float32), kind, ftz)


def sum_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the float64 sum of float64 numbers, rounded to odd: inexact, its last bit is 1."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)  # exact, by Knuth's two-sum
    pattern = total.view(np.uint64)
    even = (error != 0) & np.isfinite(total) & (pattern & np.uint64(1) == 0)
    # An even pattern rounded up in magnitude has its odd neighbour below it.
    past = (error < 0) == (total > 0)
    odd = np.where(past, pattern - np.uint64(1), pattern + np.uint64(1))
    return np.where(even, odd, pattern).view(np.float64)


@operation(rf"(?P<name>min|max){_FTZ}(?P<nan>\.NaN)?\.(?P<kind>f16|bf16|f32)")
def extreme(
    launch: Launch, d: Operand, a: Operand, b: Operand, name: str, kind: str, ftz: str | None, nan: str | None
) -> None:
    """Choose; -0 is below 0, and a NaN loses unless the instruction says otherwise."""
    x, y = read_floats(launch, kind, ftz, a, b)
    choose = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}[name][bool(nan)]
    join = np.logical_or if name == "min" else np.logical_and
    zero = np.copysign(FLOATS[kind](0), np.where(join(np.signbit(x), np.signbit(y)), -1, 1).astype(x.dtype))
    value = np.where((x == 0) & (y == 0), zero, choose(x, y))
    launch.write_float(d, value, kind)


@operation(r"(?P<name>neg|abs)\.(?P<kind>f16|bf16|f32|f64)")
def sign(launch: Launch, d: Operand, a: Operand, name: str, kind: str) -> None:
    """Change the sign. Which NaN one becomes is not said: except "exact", approximations take NVIDIA's."""
    pattern = launch.read(a, f"b{bits(kind)}")
    top = pattern.dtype.type(1 << bits(kind) - 1)
    pattern = pattern ^ top if name == "neg" else pattern & ~top
    if launch.approximations.how == "exact":
        launch.write(d, pattern)
    else:
        launch.write_float(d, pattern.view(FLOATS[kind]), kind)


@operation(r"copysign\.(?P<kind>f32|f64)")
def copy_sign(launch: Launch, d: Operand, a: Operand, b: Operand, kind: str) -> None:
    """Give `b` the sign of `a`."""
    x, y = (launch.read(v, f"b{bits(kind)}") for v in (a, b))
    top = x.dtype.type(1 << bits(kind) - 1)
    launch.write(d, (x & top) | (y & ~top))


@operation(rf"(?P<name>div|sqrt|rcp)\.rn{_FTZ}\.(?P<kind>f32|f64)")
def rounded(launch: Launch, d: Operand, *operands: Operand, name: str, kind: str, ftz: str | None) -> None:
    x = read_floats(launch, kind, ftz, *operands)
    write_float(launch, d, _right(name, *x), kind, ftz)


@operation(rf"(?P<name>div|sqrt|rcp|ex2|lg2)\.(?:approx|(?<=div\.)full){_FTZ}\.(?P<kind>f32)")
def approximate(
    launch: Launch, d: Operand, *operands: Operand, name: str, kind: str, ftz: str | None
) -> None:
    x = read_floats(launch, kind, ftz, *operands)
    right = np.asarray(_right(name, *x), np.float32)
    write_float(launch, d, launch.approximations(name, right, *x), kind, ftz)


def _right(name: str, *x: np.ndarray) -> np.ndarray:
    if name == "div":
        return x[0] / x[1]
    if name == "rcp":
        return x[0].dtype.type(1) / x[0]
    if name == "sqrt":
        return np.sqrt(x[0])
    # Near enough of what is only bounded.
    function = {"ex2": np.exp2, "lg2": np.log2}[name]
    return function(x[0].astype(np.float64)).astype(np.float32)


_ORDERED = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
_ORDERED |= {"gt": np.greater, "ge": np.greater_equal}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_JOINS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@operation(
    r"setp\.(?P<how>eq|ne|lt|le|gt|ge|lo|ls|hi|hs)(?:\.(?P<join>and|or|xor))?\.(?P<kind>[bus](?:16|32|64))"
)
def compare_integers(
    launch: Launch, d: Operand, a: Operand, b: Operand, *c: Operand, how: str, join: str | None, kind: str
) -> None:
    value = _ORDERED[_UNSIGNED.get(how, how)](launch.read(a, kind), launch.read(b, kind))
    _write_predicates(launch, d, value, join, c)


@operation(
    r"setp\.(?P<how>(?:eq|ne|lt|le|gt|ge)u?|num|nan)(?:\.(?P<join>and|or|xor))?"
    rf"{_FTZ}\.(?P<kind>f16|bf16|f32|f64)"
)
def compare_floats(
    launch: Launch, d: Operand, a: Operand, b: Operand, *c: Operand,
    how: str, join: str | None, kind: str, ftz: str | None,
) -> None:  # fmt: skip
    value = compared(how, *read_floats(launch, kind, ftz, a, b))
    _write_predicates(launch, d, value, join, c)


@operation(r"setp\.(?P<how>(?:eq|ne|lt|le|gt|ge)u?|num|nan)\.(?P<kind>f16|bf16)x2")
def compare_pairs(launch: Launch, d: Operand, a: Operand, b: Operand, how: str, kind: str) -> None:
    """Write a predicate for each half, that of the lower one first."""
    x, y = (launch.read(v, "b32") for v in (a, b))
    for target, shift in zip(str(d).split("|"), (0, 16), strict=True):
        halves = ((v >> np.uint32(shift)).astype(np.uint16).view(FLOATS[kind]) for v in (x, y))
        launch.write(target, compared(how, *halves))


def compared(how: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Compare floats; a `u` at the end says that a NaN makes it true."""
    unordered = np.isnan(x) | np.isnan(y)
    if how in ("num", "nan"):
        return unordered if how == "nan" else ~unordered
    value = _ORDERED[how[:2]](x, y)
    return value | unordered if how.endswith("u") else value & ~unordered


def _write_predicates(
    launch: Launch, d: Operand, value: np.ndarray, join: str | None, c: tuple[Operand, ...]
) -> None:
    """Write a comparison, joined with a predicate, and the inverse comparison, joined alike."""
    if bool(join) != bool(c):
        raise TypeError("a predicate without a way to join it")
    for target, result in zip(str(d).split("|"), (value, ~value), strict=False):
        launch.write(target, _JOINS[join](result, launch.read(c[0], "pred")) if join else result)
