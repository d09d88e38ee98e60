"""Conversions between integers and floats, and of pairs."""

import ml_dtypes
import numpy as np

from ptx.floats import flushed, write_float
from ptx.kernel import Operand, bits
from ptx.launch import FLOATS, NAN, SIGNED, Launch
from ptx.memory import UNSIGNED
from ptx.operations import operation

_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
_FP8_NAN = 0x7F
_FTZ = r"(?P<ftz>\.ftz)?"


def _integer(kind: str) -> type:
    return (SIGNED if kind[0] == "s" else UNSIGNED)[bits(kind)]


@operation(r"cvt\.(?P<to>[us](?:8|16|32|64))\.(?P<of>[us](?:8|16|32|64))")
def between_integers(launch: Launch, d: Operand, a: Operand, to: str, of: str) -> None:
    """Extend by the sign of the source, or cut off."""
    launch.write(d, launch.read(a, of, relaxed=True).astype(_integer(to)), relaxed=True)


@operation(rf"cvt\.(?P<how>r[nzmp]i){_FTZ}\.(?P<to>[us](?:8|16|32))\.(?P<of>f16|bf16|f32)")
def to_integer(launch: Launch, d: Operand, a: Operand, how: str, ftz: str | None, to: str, of: str) -> None:
    """Round to a whole number and saturate; NaN becomes zero."""
    x = _WHOLE[how](_read(launch, a, of, ftz).astype(np.float64))
    limits = np.iinfo(_integer(to))
    value = np.clip(np.where(np.isnan(x), 0, x), limits.min, limits.max)
    launch.write(d, value.astype(_integer(to)), relaxed=True)


@operation(r"cvt\.rn\.(?P<to>f32|f64)\.(?P<of>[us](?:8|16|32|64))")
def of_integer(launch: Launch, d: Operand, a: Operand, to: str, of: str) -> None:
    launch.write_float(d, launch.read(a, of, relaxed=True).astype(FLOATS[to]), to)


@operation(r"cvt\.rn\.(?P<to>f16|bf16)\.(?P<of>[us](?:8|16))")
def of_short_integer(launch: Launch, d: Operand, a: Operand, to: str, of: str) -> None:
    exact = launch.read(a, of, relaxed=True).astype(np.float32)
    launch.write_float(d, exact.astype(FLOATS[to]), to)


@operation(rf"cvt\.(?P<how>r[nzmp]i){_FTZ}\.(?P<to>f32)\.(?P<of>f32)")
def to_whole(launch: Launch, d: Operand, a: Operand, how: str, ftz: str | None, to: str, of: str) -> None:
    write_float(launch, d, _WHOLE[how](_read(launch, a, of, ftz)), to, ftz)


@operation(rf"cvt{_FTZ}\.(?P<to>f32)\.(?P<of>f16|bf16)|cvt\.(?P<to64>f64)\.(?P<of32>f32)")
def to_wider(
    launch: Launch, d: Operand, a: Operand, ftz: str | None,
    to: str | None, of: str | None, to64: str | None, of32: str | None,
) -> None:  # fmt: skip
    wide, narrow = to or to64, of or of32
    assert wide
    assert narrow
    write_float(launch, d, launch.read(a, narrow).astype(FLOATS[wide]), wide, ftz)


@operation(r"cvt\.rn\.(?P<to>f16|bf16)\.(?P<of>f32)|cvt\.rn\.(?P<to32>f32)\.(?P<of64>f64)")
def to_narrower(
    launch: Launch, d: Operand, a: Operand,
    to: str | None, of: str | None, to32: str | None, of64: str | None,
) -> None:  # fmt: skip
    wide, narrow = of or of64, to or to32
    assert wide
    assert narrow
    launch.write_float(d, launch.read(a, wide).astype(FLOATS[narrow]), narrow)


@operation(r"cvt\.rn(?P<sat>\.satfinite)?\.(?P<to>f16|bf16|e4m3|e5m2)x2\.f32")
def to_pair(launch: Launch, d: Operand, a: Operand, b: Operand, sat: str | None, to: str) -> None:
    """Convert two numbers, the first of which is the upper half."""
    if bool(sat) != (to in _FP8):
        raise NotImplementedError("saturation is for codes of 8 bits")
    launch.write(d, _pair(launch.read(a, "f32"), launch.read(b, "f32"), to))


@operation(r"cvt\.rn\.f16x2\.(?P<of>e4m3|e5m2)x2")
def of_codes(launch: Launch, d: Operand, a: Operand, of: str) -> None:
    codes = launch.read(a, "b16")
    upper, lower = (
        (codes >> np.uint16(by) & np.uint16(255)).astype(np.uint8).view(_FP8[of]).astype(np.float32)
        for by in (8, 0)
    )
    launch.write(d, _pair(upper, lower, "f16"))


def _pair(upper: np.ndarray, lower: np.ndarray, kind: str) -> np.ndarray:
    """Return float32 numbers as two halves of one pattern."""
    dtype = _FP8.get(kind) or FLOATS[kind]
    width = 8 * np.dtype(dtype).itemsize

    def half(x: np.ndarray) -> np.ndarray:
        if kind in _FP8:
            top = np.float32(ml_dtypes.finfo(dtype).max)
            x = np.clip(x, -top, top)
        pattern = x.astype(dtype).view(UNSIGNED[width])
        return np.where(np.isnan(x), _FP8_NAN if kind in _FP8 else NAN[kind], pattern)

    whole = UNSIGNED[2 * width]
    return half(upper).astype(whole) << whole(width) | half(lower).astype(whole)


def _read(launch: Launch, a: Operand, kind: str, ftz: str | None) -> np.ndarray:
    x = launch.read(a, kind)
    return flushed(x) if ftz else x
