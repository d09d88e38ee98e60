"""How an update rule stores one of its moments: in which format, rounded how, with whose words.

Contract: F1 to F3. It stands between the rules, which know moments, and the formats, which know codes.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from halfstep_spec.numbers.random_words import random_words
from halfstep_spec.storage.formats import Encoded, Format, as_format


class Rounded(NamedTuple):
    """A moment that was rounded.

    Attributes:
        stored: for the state.
        values: what the rule goes on with, float32.
    """

    stored: Encoded
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class StoredMoment:
    """The storage of one moment.

    Attributes:
        dtype: a format, or the name of a plain one.
        rounding: "nearest", "stochastic", or "auto": nearest, unless that freezes an average of rate `b`.
        role: of its random words.
        keep_nonzero: whether what is not zero may not be stored as zero: see `Format.encode`.
        seed: of its random words.
        b: the decay rate; None where it is no average, and nothing freezes.
        shape: of the moment, from that of the weights.
    """

    dtype: str | Format
    rounding: str
    role: int
    keep_nonzero: str = "never"
    seed: int = 0
    b: float | None = None
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple

    def format(self, shape) -> Format:
        """Return how the moment of an array of this shape is stored."""
        return as_format(self.dtype).for_shape(shape)

    def zeros(self, shape) -> Encoded:
        """Return what a rule starts from."""
        return self.format(shape).zeros(shape)

    def decode(self, stored: Encoded) -> np.ndarray:
        """Return the float32 values of what is stored: exact."""
        return self.format(shape_of(stored)).decode(stored)

    def round(self, moment: np.ndarray, step: int, leaf: str) -> Rounded:
        """Round a float32 moment to its format, once.

        Args:
            moment: float32.
            step: the count after its increment.
            leaf: the leaf's name.
        """
        fmt, words = self.format(moment.shape), None
        if self.rounds_stochastically(fmt):
            words = random_words(self.seed, step, leaf, self.role, moment.shape)
        stored = fmt.encode(moment, words, keep_nonzero=self.keep_nonzero)
        return Rounded(stored, fmt.decode(stored))

    def rounds_stochastically(self, fmt: Format) -> bool:
        """Whether words are used: contract F3, where `rounding` is "auto"."""
        freezes = self.b is not None and fmt.freezes(self.b)
        return {"nearest": False, "stochastic": True, "auto": freezes}[self.rounding]


def shape_of(stored: Encoded) -> tuple[int, ...]:
    """Return the shape of the array that was stored."""
    return stored.codes.shape if stored.shape is None else stored.shape
