"""The storage of one moment: its format, its rounding and its random words.

Contract: F1 to F3. It connects the moments of update rules with the codes of formats.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.rounding import round_value
from halfstep_torch.storage.formats import Encoded, Format
from halfstep_torch.storage.state_array import Shape, StateArray, WordSource

Arrays = Mapping[str, Tensor]
State = dict[str, Tensor]
"""State of a parameter, with the count, "step", and the arrays by key."""
Words = Callable[[Shape], Tensor]
"""Function from the shape of an array to int32 words, one per element."""


@dataclasses.dataclass(frozen=True)
class StoredMoment:
    """The decoding and encoding of a rule's moment, with all choices made. It is hashable.

    Attributes:
        name: the name of the moment in its rule.
        key: the key of its codes in the state.
        format: the format of the codes.
        source: the source of the words that round it, or None for rounding to nearest.
        keep_nonzero: the elements in which nonzero numbers are not stored as zero, as in `Format.encode`.
        shape_of: a function from the parameter's shape to the moment's, or None if they are the same.
        unit: the name of the second moment, if its root is the unit of this moment, else "".
        feeds_back: whether the storage error is fed back.
        second: the name of the second moment, if its root bounds fed-back errors, else "".
        copies_weights: whether it is the weight and starts as a copy.
        again: the storage of its array of codes between steps, under the same key (contract S2), or None. The
            rule continues with its own values, and the error of the second storage is not fed back.
    """

    name: str
    key: str
    format: Format
    source: WordSource | None
    keep_nonzero: str
    shape_of: Callable[[Shape], Shape] | None = None
    unit: str = ""
    feeds_back: bool = False
    second: str = ""
    copies_weights: bool = False
    again: "StoredMoment | None" = None

    @property
    def rounding(self) -> str:
        """The rounding: "feedback", "stochastic" or "nearest"."""
        return "feedback" if self.feeds_back else "nearest" if self.source is None else "stochastic"

    @functools.cached_property
    def arrays(self) -> Mapping[str, StateArray]:
        """The codes, and the scales if there are any."""
        codes_of = self.format if self.format.in_codes else None
        copied_as = self.format if self.copies_weights else None
        codes = StateArray(
            self.format.torch_dtype, codes_of=codes_of, copied_as=copied_as, shape_of=self.shape_of
        )
        arrays = {self.key: codes}
        if self.format.scaled:
            scale = StateArray(torch.uint8, self.format, copied_as=copied_as, shape_of=self.shape_of)
            arrays[scale_key(self.key)] = scale
        return arrays if self.again is None else {**arrays, **self.again.arrays}

    @functools.cached_property
    def sources(self) -> tuple[WordSource, ...]:
        """The words that `encode` reads, with the words of `store_state` last."""
        return self._sources if self.again is None else self._sources + self.again.sources

    @functools.cached_property
    def _sources(self) -> tuple[WordSource, ...]:
        """The words of one storage, if any, and for dithered codes also the stored codes' words."""
        if self.source is None:
            return ()
        if not self.format.dithered:
            return (self.source,)
        unmixed = self.source._replace(mixed=False)
        return unmixed, unmixed._replace(before=True)

    def decode(self, state: Arrays, words: Sequence[Words]) -> Tensor:
        """Return the exact float32 values of codes and scales, given `words` for each of the `sources`."""
        if self.again is not None:
            count = len(self._sources)
            codes = _as_kept(self.again.decode(state, words[count:]), self.format.torch_dtype)
            state, words = {**state, self.key: codes}, words[:count]
        codes, scale = state[self.key], state[scale_key(self.key)] if self.format.scaled else None
        drawn = words[1](self.format.decoded_shape(codes)) if len(words) > 1 else None
        return self.format.decode(Encoded(codes, scale), drawn)

    def encode(self, x: Tensor, words: Sequence[Words]) -> tuple[dict[str, Tensor], Tensor]:
        """Round `x` to the format, once. Return codes, scales and their values.

        Args:
            x: the moment to store.
            words: the words for each of the `sources`.
        """
        count = len(self._sources)
        chosen, kept = words[0](tuple(x.shape)) if count else None, self.keep_nonzero
        (codes, scale), values = self.format.round_trip(x, chosen, keep_nonzero=kept)
        arrays = {self.key: codes} if scale is None else {self.key: codes, scale_key(self.key): scale}
        if self.again is not None:
            codes = codes.to(torch.float32)
            stored, _ = self.again.encode(codes if self.again.format.signed else codes.abs(), words[count:])
            arrays |= stored
        return arrays, values

    def encode_with_inverse_root(self, x: Tensor, words: Sequence[Words]) -> tuple[Tensor, Tensor]:
        """Return the codes of `x` in int32, and about 1/sqrt(x), in a format with inverse roots."""
        return self.format.arithmetic.with_inverse_root(x, words[0](tuple(x.shape)) if words else None)


def scale_key(key: str) -> str:
    """Return the key of the scales of a moment in the state."""
    return f"{key}_scale"


def _as_kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values rounded to nearest in the dtype of the wrapped rule."""
    if dtype == torch.float32:
        return x
    return round_value(x, dtype_name(dtype), None, saturate=True).to(dtype)
