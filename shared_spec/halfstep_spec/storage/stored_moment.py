"""How an update rule stores one of its moments: in which format, rounded how, with whose words.

Contract: F1 to F3. It stands between the rules, which know moments, and the formats, which know codes.
"""

import dataclasses

import numpy as np

from halfstep_spec.numbers.random_words import Role, random_words
from halfstep_spec.storage.formats import Encoded, Format, as_format


@dataclasses.dataclass(frozen=True)
class StoredMoment:
    """The storage of one moment.

    Attributes:
        dtype: a format, or the name of a plain one.
        rounding: "nearest" or "stochastic". ("auto" is resolved before: contract F3.)
        role: of its random words.
        positive: a second moment: what is not zero is not stored as zero; None where that is not known.
    """

    dtype: str | Format
    rounding: str
    role: Role
    positive: bool | None = False

    def format(self, shape) -> Format:
        """Return how the moment of an array of this shape is stored."""
        return as_format(self.dtype).for_shape(shape)

    def zeros(self, shape) -> Encoded:
        """Return what a rule starts from."""
        return self.format(shape).zeros(shape)

    def decode(self, stored: Encoded) -> np.ndarray:
        """Return the float32 values of what is stored: exact."""
        shape = stored.codes.shape if stored.shape is None else stored.shape
        return self.format(shape).decode(stored)

    def encode(self, moment: np.ndarray, seed: int, step: int, leaf: str) -> Encoded:
        """Round a float32 moment to its format, once.

        Args:
            moment: float32.
            seed: of the random words.
            step: the count after its increment.
            leaf: the leaf's name.
        """
        words = None
        if self.rounding == "stochastic":
            words = random_words(seed, step, leaf, self.role, moment.shape)
        return self.format(moment.shape).encode(moment, words, positive=self.positive)
