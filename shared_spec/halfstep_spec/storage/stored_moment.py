"""How an update rule stores one of its moments: in which format, with which rounding and words.

Contract: F1 to F3, F15. It stands between the rules, which know moments, and the formats, which know codes.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from halfstep_spec.numbers.random_words import random_words, unmixed_words
from halfstep_spec.storage.formats import Encoded, Format
from halfstep_spec.storage.state_dtypes import as_format


@dataclasses.dataclass(frozen=True)
class StoredMoment:
    """The storage of one moment.

    Attributes:
        dtype: a format, or the name of a plain one.
        rounding: "nearest", "stochastic", "feedback", which is stochastic too, or "auto": nearest, unless an
            average of rate `b` then falls short.
        role: of its random words.
        keep_nonzero: whether other numbers may not be stored as zero: see `Format.encode`.
        seed: of its random words.
        b: the decay rate; None where it is no average, and nothing falls short.
        shape: of the moment, from that of the weights.
        amplified: whether "auto" asks if the average freezes, instead of whether it falls short.
    """

    dtype: str | Format
    rounding: str
    role: int
    keep_nonzero: str = "never"
    seed: int = 0
    b: float | None = None
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple
    amplified: bool = False

    def __post_init__(self):
        fmt = as_format(self.dtype)
        if self.keep_nonzero == "always" and not fmt.codes.for_second_moments:
            raise ValueError(
                f"StoredMoment: dtype={fmt.dtype} cannot hold a second moment: it loses or lifts small ones. "
                'Use scaled("float16"), scaled("ufloat8_e5m3") or codebook("udynamic8").'
            )

    def format(self, shape) -> Format:
        """Return how the moment of an array of this shape is stored."""
        return as_format(self.dtype).for_shape(shape)

    def zeros(self, shape) -> Encoded:
        """Return the state before the first step."""
        return self.format(shape).zeros(shape)

    def decode(self, stored: Encoded, step: int, leaf: str) -> np.ndarray:
        """Return the float32 values of stored arrays: exact.

        Args:
            stored: codes and scales.
            step: at which they were stored.
            leaf: the leaf's name.
        """
        fmt = self.format(stored.array_shape)
        return fmt.decode(
            stored, self._words(fmt, stored.array_shape, step, leaf) if fmt.codes.dithered else None
        )

    def round(self, moment: np.ndarray, step: int, leaf: str) -> tuple[Encoded, np.ndarray]:
        """Round a float32 moment to its format, once; return the stored arrays and their float32 values.

        Args:
            moment: float32.
            step: the count after its increment.
            leaf: the leaf's name.
        """
        fmt = self.format(moment.shape)
        words = self._words(fmt, moment.shape, step, leaf)
        stored = fmt.encode(moment, words, keep_nonzero=self.keep_nonzero)
        return stored, fmt.decode(stored, words)

    def rounds_stochastically(self, fmt: Format) -> bool:
        """Whether words are used: contract F3 and F20, where `rounding` is "auto"."""
        if self.rounding == "auto":
            stops = fmt.freezes if self.amplified else fmt.falls_short
            return self.b is not None and stops(self.b)
        return {"nearest": False, "stochastic": True, "feedback": True}[self.rounding]

    def _words(self, fmt: Format, shape, step: int, leaf: str) -> np.ndarray | None:
        """Return one word per element, of dithered codes one per block (F15); to nearest None."""
        if not self.rounds_stochastically(fmt):
            return None
        if fmt.codes.dithered:
            return fmt.of_first_elements(unmixed_words(self.seed, step, leaf, self.role, shape))
        return random_words(self.seed, step, leaf, self.role, shape)
