"""How a state array is stored: encode float32 to codes and scales, decode them to float32.

Contract: section F. Vectors: formats. A `Format` is all that an update rule knows of storage, and it knows
nothing of update rules.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.blocks import Blocks, blocks_of, scale_shape
from halfstep_torch.float_formats import FLOAT_FORMATS, FloatFormat, dtype_name
from halfstep_torch.rounding import round_value, rounded
from halfstep_torch.unsigned_floats import NAN_CODE, UNSIGNED_FLOATS, decode_unsigned, encode_unsigned

MARKED = 255
"""The scale byte of a block that holds a NaN which its codes cannot."""

_PLAIN_STATE_DTYPES = ("float32", "bfloat16", "float16", "ufloat8_e6m2")
# The integers are a float format whose every number is subnormal, with quantum 1: one rounding serves all.
_INT8 = FloatFormat(torch.int8, 7, 7, 127.0, math.nan)


class _Scaling(NamedTuple):
    """The constants of F5.

    Attributes:
        exponent: of the largest code.
        carry: what brings the pattern of a maximum past the largest code to the next exponent.
        lowest: the byte under which the smallest code would decode to a subnormal float32.
    """

    exponent: int
    carry: int
    lowest: int


_SCALINGS = {
    "float16": _Scaling(15, 0x1FFF, 40),
    "float8_e4m3fn": _Scaling(8, 0x1FFFFF, 18),
    "float8_e5m2": _Scaling(15, 0x1FFFFF, 32),
    "int8": _Scaling(6, 0x1FFFF, 7),
}


class Encoded(NamedTuple):
    """A stored array, or a stretch of one.

    Attributes:
        codes: in the shape of the array.
        scale: uint8, one per block, in one row; None in a format without.
    """

    codes: Tensor
    scale: Tensor | None


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to store an array of float32. Made by `scaled`, or from the name of a plain dtype.

    Attributes:
        name: of the codes: a plain state dtype, or with a scale one that `scaled` takes.
        scaled: whether blocks have a scale.
        block_size: elements of a block, "row" or None.
        min_size: smaller arrays are kept in float32.
        min_ndim: so are arrays of fewer axes.
        blocks: the cut of the arrays at hand, once `for_shape` has said of what shape they are.
    """

    name: str
    scaled: bool = False
    block_size: int | str | None = None
    min_size: int = 0
    min_ndim: int = 0
    blocks: Blocks | None = None

    def for_shape(self, shape: tuple[int, ...]) -> "Format":
        """Return the format that an array of this shape gets: float32 where it is too small for a scale.

        Formats that encode and decode alike are equal, so that shapes share compiled kernels.
        """
        if not self.scaled:
            return self
        if math.prod(shape) < self.min_size or len(shape) < self.min_ndim:
            return Format("float32")
        return Format(self.name, True, self.block_size, blocks=blocks_of(tuple(shape), self.block_size))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return torch.uint8 if self.unsigned else getattr(torch, self.name)

    @property
    def unsigned(self) -> bool:
        """Whether it has no sign: for second moments alone."""
        return self.name in UNSIGNED_FLOATS

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of an array."""
        return scale_shape(tuple(shape), self.block_size)

    @property
    def scale_bytes(self) -> tuple[int, int]:
        """The lowest and the highest byte that a scale may have; `MARKED` apart."""
        if self.unsigned:
            return 2 ** UNSIGNED_FLOATS[self.name].exponent_bits - 1, 253
        return _SCALINGS[self.name].lowest, 254

    @property
    def marks(self) -> bool:
        """Whether a block with a NaN is marked in its scale, since codes have none."""
        return self.scaled and (self.unsigned or self.name == "int8")

    def encode(self, x: Tensor, words: Tensor | None, *, positive: bool = False) -> Encoded:
        """Round the float32 `x` to codes.

        Finite values saturate, infinity becomes NaN (contract R6). With a scale: y = x / 2^s, exact, s from
        the largest magnitude of the block, then y is rounded.

        Args:
            x: float32; with a scale, whole runs of the array, in row-major order.
            words: int32 words for stochastic rounding, or None for nearest.
            positive: a second moment: what is not zero is not stored as zero.
        """
        if self.scaled:
            return self._encode_blocks(x, words, positive)
        if not self.unsigned:
            return Encoded(round_value(x, self.name, words, saturate=True), None)
        codes = encode_unsigned(x, words, UNSIGNED_FLOATS[self.name], self._base(None))
        return Encoded(torch.where(x < math.inf, codes, NAN_CODE).to(torch.uint8), None)

    def decode(self, stored: Encoded) -> Tensor:
        """Return the float32 values of codes and scales: exact."""
        codes, scale = stored
        if scale is None:
            if not self.unsigned:
                return codes.to(torch.float32)
            wide = codes.to(torch.int32)
            values = decode_unsigned(wide, UNSIGNED_FLOATS[self.name], self._base(None))
            return torch.where(wide == NAN_CODE, math.nan, values)
        assert self.blocks is not None
        # Widened before it is cut: padding knows no 8-bit floats.
        wide = self.blocks.cut(codes.to(torch.int32 if self.unsigned else torch.float32))
        byte = scale.to(torch.int32)[:, None]
        if self.unsigned:
            values = decode_unsigned(wide, UNSIGNED_FLOATS[self.name], self._base(byte))
            values = torch.where(byte == MARKED, math.nan, values)
        else:
            unit = ((byte - _SCALINGS[self.name].exponent) << 23).view(torch.float32)
            values = wide * torch.where(byte == MARKED, math.nan, unit)
        return self.blocks.join(values, codes.shape)

    def freezes(self, b: float) -> bool:
        """Whether an EMA of rate `b`, stored to nearest, stops short: 1 - b < half the relative gap.

        The gap is 2^-p for p explicit mantissa bits, and 1/127 for int8 (that below its largest code).
        float32 is taken as never freezing (contract F3).

        Args:
            b: decay rate, a float32 value.

        Example:
            >>> Format("bfloat16").freezes(0.999), Format("bfloat16").freezes(0.9)
            (True, False)
        """
        half_gap = 1 / 254 if self.name == "int8" else 2.0 ** -(self._mantissa_bits + 1)
        return self.rounds and bool(np.float32(1) - np.float32(b) < np.float32(half_gap))

    @property
    def rounds(self) -> bool:
        """Whether encoding rounds at all: in float32 no word is used."""
        return self.name != "float32"

    @property
    def half_gap(self) -> str:
        """Half the largest relative gap between codes, for messages."""
        return "1/254" if self.name == "int8" else f"2^-{self._mantissa_bits + 1}"

    @property
    def description(self) -> str | dict[str, Any]:
        """Plain types that say the same, for state dicts; `as_format` takes them back."""
        if not self.scaled:
            return self.name
        names = ("block_size", "min_size", "min_ndim")
        return {"dtype": self.name, **{name: getattr(self, name) for name in names}}

    @property
    def _mantissa_bits(self) -> int:
        if self.unsigned:
            return UNSIGNED_FLOATS[self.name].mantissa_bits
        return FLOAT_FORMATS[self.name].mantissa_bits if self.name in FLOAT_FORMATS else 23

    def _base(self, byte: Tensor | None):
        """Return the base of codes without a sign, of every block where there is a scale."""
        fmt = UNSIGNED_FLOATS[self.name]
        if byte is not None:
            return fmt.base(byte)
        assert fmt.fixed is not None
        return fmt.fixed << fmt.mantissa_bits

    def _encode_blocks(self, x: Tensor, words: Tensor | None, positive: bool) -> Encoded:
        assert self.blocks is not None
        y, cut_words = self.blocks.cut(x), None if words is None else self.blocks.cut(words)
        # What is not finite does not count for the maximum, or marks its block.
        magnitude = torch.where(y.abs() < math.inf, y.abs(), math.inf if self.marks else 0.0)
        top = magnitude.amax(1, keepdim=True)
        codes, byte = (self._unsigned_codes if self.unsigned else self._signed_codes)(y, top, cut_words, positive)
        if self.marks:
            finite = top < math.inf
            codes, byte = torch.where(finite, codes, 0), torch.where(finite, byte, MARKED)
        return Encoded(self.blocks.join(codes.to(self.dtype), x.shape), byte.to(torch.uint8).view(-1))

    def _unsigned_codes(self, y: Tensor, top: Tensor, words: Tensor | None, positive: bool):
        byte = (top.view(torch.int32) >> 23).clamp(*self.scale_bytes)
        return encode_unsigned(y, words, UNSIGNED_FLOATS[self.name], self._base(byte)), byte

    def _signed_codes(self, y: Tensor, top: Tensor, words: Tensor | None, positive: bool):
        fmt = FLOAT_FORMATS.get(self.name, _INT8)
        exponent, carry, _ = _SCALINGS[self.name]
        byte = (top.view(torch.int32) + carry >> 23).clamp(*self.scale_bytes)
        # Powers of two within the normal numbers of float32, both ways: the product is exact.
        codes = rounded(y * ((254 + exponent - byte) << 23).view(torch.float32), fmt, words, saturate=True)
        if positive:
            smallest = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
            codes = torch.where((y > 0) & (codes == 0), smallest, codes)
        return codes, byte


def scaled(
    dtype: Any, block_size: int | str | None = 128, min_size: int = 4096, min_ndim: int = 2
) -> Format:
    """Return the format of codes of `dtype` with one power-of-two scale per block.

    A block's scale is the smallest power of two under which its largest finite magnitude fits, kept as one
    byte; dividing by it is exact, so values are rounded once, to the codes. Blocks run along the shortest
    run of trailing axes whose product reaches `block_size`; the last one of a run may be short.

    State of 8 bits saves memory, not time: encoding costs more than it saves in bytes moved.

    Args:
        dtype: of the codes: "float16", "float8_e4m3fn", "float8_e5m2", "int8", a torch dtype of these, or,
            for a second moment alone, "ufloat8_e5m3" (the best `nu` in one byte) or "ufloat8_e4m4".
        block_size: elements of a block, "row" (one block per last-axis row) or None (one block in all).
        min_size: arrays of fewer elements are kept in float32.
        min_ndim: so are arrays of fewer axes.

    Returns:
        A format, for `mu_dtype` and `nu_dtype`.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if there is no such format, or a size is out of range.

    Example:
        >>> scaled("float8_e4m3fn").scale_shape((64, 256))
        (64, 2)

    Source: ours. Contract F4 to F7.
    """
    name = dtype_name(dtype)
    if name not in _SCALINGS and (name not in UNSIGNED_FLOATS or UNSIGNED_FLOATS[name].fixed is not None):
        raise ValueError(
            f'scaled: dtype={name} has no scaled format. Use "float16", "float8_e4m3fn", "float8_e5m2", '
            '"int8", "ufloat8_e5m3" or "ufloat8_e4m4".'
        )
    if block_size is not None and block_size != "row":
        fault = f"scaled: block_size={block_size!r} is not a block size. "
        way_out = 'Use a positive integer, "row" or None.'
        if isinstance(block_size, bool) or not isinstance(block_size, (int, str)):
            raise TypeError(fault + way_out)
        if isinstance(block_size, str) or block_size < 1:
            raise ValueError(fault + way_out)
    for argument, value in (("min_size", min_size), ("min_ndim", min_ndim)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"scaled: {argument}={value!r} is not an integer. Use a number >= 0.")
        if value < 0:
            raise ValueError(f"scaled: {argument}={value} is negative. Use a number >= 0.")
    return Format(name, True, block_size, min_size, min_ndim)


def as_format(function: str, argument: str, dtype: Any, *, signed: bool = False) -> Format | None:
    """Return the `Format` that an argument asks for, or None.

    Args:
        function: whose argument it is, for the message.
        argument: which one.
        dtype: a `Format`, "bfloat16", torch.bfloat16, ..., a `Format.description`, or None.
        signed: whether what is stored has a sign.

    Raises:
        ValueError: if no moment can be stored so.
    """
    if isinstance(dtype, dict):
        dtype = scaled(**dtype)
    if dtype is None:
        return None
    fmt = dtype if isinstance(dtype, Format) else None
    name = fmt.name if fmt else dtype_name(dtype)
    if signed and name in UNSIGNED_FLOATS:
        argument_of_nu = argument.replace("mu", "nu")
        raise ValueError(
            f"{function}: {argument}={name} has no sign. "
            f"Use it for {argument_of_nu.removesuffix('_dtype')}, and a signed format for "
            f"{argument.removesuffix('_dtype')}."
        )
    if fmt or name in _PLAIN_STATE_DTYPES:
        return fmt or Format(name)
    use = 'Use "bfloat16", "float16" or "float32".'
    if name in (*_SCALINGS, *UNSIGNED_FLOATS):
        raise ValueError(f"{function}: {argument}={name} cannot hold a moment without a block scale. {use}")
    raise ValueError(f"{function}: {argument}={name} is not a state dtype. {use}")


def default_format(param_dtype: torch.dtype) -> Format:
    """Return the format of a moment where none is asked for: bfloat16 for bfloat16 params, else float32 (F1)."""
    return Format("bfloat16" if param_dtype == torch.bfloat16 else "float32")
