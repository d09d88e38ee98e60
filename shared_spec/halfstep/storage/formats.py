"""The format of a state array: its codes, its scales, and its limits.

Contract: section F. A `Format` is all that a rule knows of storage, and it knows nothing of rules. Each
package has one that encodes and decodes its own arrays.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from halfstep.arrays import Array
from halfstep.hyperparameters import Scalar
from halfstep.makers import published
from halfstep.storage.blocks import BlockSize, packed_shape, scale_shape
from halfstep.storage.codes import CODEBOOK_CODES, CODES, NAN_SCALE, Codes
from halfstep.storage.floats import PlainCodes
from halfstep.storage.labels import Label, label_text

DType: TypeAlias = Any
"""How an array is to be stored: a name, a dtype of a framework, a `Format`, or None for the default."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to store an array of float32. `scaled`, `codebook` and `relative` make others than plain dtypes.

    Attributes:
        dtype: the name of the codes: a plain dtype of states, or one that these functions take.
        scaled: whether blocks have a scale.
        block_size: elements of a block, "row" or None.
        min_size: smaller arrays are kept in float32.
        min_ndim: so are arrays of fewer axes.
        scale: "power_of_two", or "fine": of three significant bits.
        relative: whether stored values are in units of the root of a second moment, which is not known here.
    """

    dtype: str
    scaled: bool = False
    block_size: BlockSize = 128
    min_size: int = 4096
    min_ndim: int = 2
    scale: str = "power_of_two"
    relative: bool = False

    @classmethod
    def of(cls: "type[_Format]", fmt: "Format") -> "_Format":
        """Return the same format as this class, which encodes and decodes arrays of a framework."""
        if isinstance(fmt, cls):
            return fmt
        return cls(**{field.name: getattr(fmt, field.name) for field in dataclasses.fields(Format)})

    def replace(self: "_Format", **changes: object) -> "_Format":
        """Return the format with other attributes."""
        return dataclasses.replace(self, **changes)

    def for_shape(self: "_Format", shape: tuple[int, ...]) -> "_Format":
        """Return the format of an array of this shape: float32 if it is too small for a scale."""
        return type(self)("float32") if self.too_small(shape) else self

    def too_small(self, shape: tuple[int, ...]) -> str:
        """Return why an array of this shape is too small for the format's scales; "" where it is not.

        Example:
            >>> Format("int8", scaled=True).too_small((10, 10))
            '100 elements are fewer than min_size=4096'
        """
        count, axes = math.prod(shape), len(shape)
        if self.scaled and count < self.min_size:
            return f"{count} elements are fewer than min_size={self.min_size}"
        if self.scaled and axes < self.min_ndim:
            return f"{axes} {'axis is' if axes == 1 else 'axes are'} fewer than min_ndim={self.min_ndim}"
        return ""

    def __getstate__(self) -> dict[str, object]:
        # Without attributes that follow from the fields.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def family(self) -> str:
        """Which codes the format takes: "plain", "scaled", "fixed" or "fine"."""
        if self.scaled:
            return "fine" if self.scale == "fine" else "scaled"
        return "fixed" if self.relative else "plain"

    @functools.cached_property
    def codes(self) -> Codes:
        """The codes of the format."""
        return CODES[self.family][self.dtype]

    @property
    def in_codes(self) -> bool:
        """Whether arrays hold codes, which no cast makes numbers of."""
        return not isinstance(self.codes, PlainCodes)

    @property
    def code_dtype(self) -> str:
        """The dtype of the arrays of codes."""
        return self.codes.dtype

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the codes of an array: its own, unless they are packed."""
        return packed_shape(shape, self.block_size) if self.packed else tuple(shape)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of an array."""
        return scale_shape(shape, self.block_size)

    @property
    def packed(self) -> bool:
        """Whether codes are two to a byte."""
        return self.codes.packed

    @property
    def signed(self) -> bool:
        """Whether negative values can be stored."""
        return self.codes.signed

    @property
    def for_second_moments(self) -> bool:
        """Whether small positive numbers are held well enough beside large numbers."""
        return self.codes.for_second_moments

    @property
    def dithered(self) -> bool:
        """Whether one word serves a block, and is asked for again by `decode`."""
        return self.codes.dithered

    @property
    def has_inverse_root(self) -> bool:
        """Whether rounding a second moment also makes the reciprocal of its root (contract F17)."""
        return self.codes.has_inverse_root

    @property
    def power_unit(self) -> bool:
        """Whether the unit is a power of two, which a second moment with an inverse root gives (F18)."""
        return self.codes.power_unit

    @property
    def rounds(self) -> bool:
        """Whether encoding rounds at all: in float32 no word is used."""
        return self.codes.half_gap > 0

    @property
    def half_gap(self) -> str:
        """Half the relative gap between codes, as people write it: "2^-8"."""
        exponent = math.log2(self.codes.half_gap)
        return f"2^{exponent:.0f}" if exponent.is_integer() else f"1/{1 / self.codes.half_gap:.4g}"

    def falls_short(self, b: Scalar) -> bool:
        """Whether an EMA of rate `b`, stored to nearest, can end a thousandth before its mean (contract F3).

        Example:
            >>> Format("bfloat16").falls_short(0.9), Format("float32").falls_short(0.9)
            (True, False)
        """
        moved = np.float32(1e-3) * (np.float32(1) - np.float32(b))
        return not np.float32(self.codes.half_gap) < moved

    def freezes(self, b: Scalar) -> bool:
        """Whether an EMA of rate `b`, stored to nearest, stops short of its mean: 1 - b < half the gap.

        The gap is 2^-p for p explicit mantissa bits, and 1/127 for int8 (that below its largest code). In
        float32; that format itself is taken as never freezing (contract F3).

        Example:
            >>> Format("bfloat16").freezes(0.999), Format("bfloat16").freezes(0.9)
            (True, False)
        """
        return bool(np.float32(1) - np.float32(b) < np.float32(self.codes.half_gap))

    def problem_of_scale(self, scale: np.ndarray) -> str | None:
        """Return the fault of scale bytes, or None."""
        lowest, highest = self.codes.scale_range
        wrong = (scale < lowest) | (scale > highest)
        if self.codes.nan_in_scale:
            wrong &= scale != NAN_SCALE
        return f"holds {scale[wrong][0]}, outside [{lowest}, {highest}]" if wrong.any() else None

    def encode(self, x: Array, words: Array | None, *, keep_nonzero: str = "never") -> Array:
        """Round the float32 `x` to codes.

        Finite values saturate, infinity becomes NaN (contract R6). With a scale, x / 2^s is rounded, an
        exact quotient, with s from the largest magnitude of the block.

        Args:
            x: float32; in torch, with a scale, whole runs of the array, in row-major order.
            words: 32-bit words for stochastic rounding, or None for nearest; where codes are dithered, they
                are alike throughout a block.
            keep_nonzero: when a nonzero number must not be stored as zero. "always" (a second moment),
                "never", or "where_nonnegative": in blocks without a negative number (contract S4).
        """
        raise NotImplementedError

    def decode(self, encoded: Array, words: Array | None = None) -> Array:
        """Return the float32 values of codes and scales: exact.

        Args:
            encoded: the result of `encode`.
            words: of `encode`, if codes are dithered; ignored otherwise.
        """
        raise NotImplementedError

    @property
    def label(self) -> Label:
        """The format as a state file names it."""
        label: Label = {"dtype": self.dtype}
        if self.scaled:
            label["block_size"] = self.block_size
        if self.scale != "power_of_two":
            label["scale"] = self.scale
        return label | ({"relative": True} if self.relative else {})

    @property
    def description(self) -> str | Label:
        """Plain types that say all of the format, for state dicts; `from_description` takes them back."""
        if self.family == "plain":
            return self.dtype
        sizes = (self.block_size, self.min_size, self.min_ndim) if self.scaled else (None, 0, 0)
        named = dict(zip(("block_size", "min_size", "min_ndim"), sizes, strict=True))
        if self.relative:
            return {"relative": self.dtype, **named}
        key = "table" if self.dtype in CODEBOOK_CODES else "dtype"
        return {key: self.dtype, **named, **({"scale": "fine"} if self.scale == "fine" else {})}

    @property
    def text(self) -> str:
        """The format in words.

        Example:
            >>> Format("int8", scaled=True).text
            'int8, blocks of 128'
        """
        return label_text(self.label)


_Format = TypeVar("_Format", bound=Format)
_P = ParamSpec("_P")


def returning(kind: type[_Format], function: Callable[_P, Format]) -> Callable[_P, _Format]:
    """Return a function that makes formats, such as `scaled`, as a framework's class."""

    @functools.wraps(function)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> _Format:
        return kind.of(function(*args, **kwargs))

    return published(make, function.__name__, function.__doc__)
