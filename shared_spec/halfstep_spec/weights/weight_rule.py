"""The interface of weight storages, applying an update, and weights rounded to nearest. Contract: P1, P6."""

import dataclasses
from typing import Any

import numpy as np

from halfstep_spec.numbers.rounding import decode, round_to


def apply_updates(p: np.ndarray, u: np.ndarray, dtype: str) -> np.ndarray:
    """Return the patterns of nearest(p + u): the weight as it is stored, in every backend.

    Args:
        p: patterns of `dtype`.
        u: float32 update.
        dtype: "float32", "bfloat16" or "float16". Values beyond the largest finite become infinity.
    """
    return round_to(decode(p, dtype) + u, dtype)


def update_between(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the update that takes the weight p to q: q - p in float32, and -0.0 where they are equal.

    -0.0 is the one number that moves no weight, neither an infinity nor a zero of either sign.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(q == p, np.float32(-0.0), q - p)


@dataclasses.dataclass(frozen=True)
class WeightRule:
    """A way to store a weight, and perhaps an array beside it, its `extra`.

    Attributes:
        dtype: of the weight.
    """

    dtype: str

    @property
    def extra_dtype(self) -> str | None:
        """The label of `extra` in golden vectors; None where nothing is kept."""
        return None

    def init(self, p: np.ndarray) -> Any:
        """Return the first `extra` of weights with the patterns `p`."""
        return None

    def join(self, p: np.ndarray, extra: Any) -> np.ndarray:
        """Return the weights in float32, as precisely as they are known."""
        return decode(p, self.dtype)

    def seen(self, p: np.ndarray, extra: Any) -> np.ndarray:
        """Return the weights in float32, as the links of a step see them."""
        return self.join(p, extra)

    def emit(self, p: np.ndarray, u: np.ndarray, extra: Any, words: np.ndarray) -> tuple[np.ndarray, Any]:
        """Return the update that leads to where the weight is to be stored, and the new `extra`.

        Args:
            p: patterns of `dtype`.
            u: float32 update.
            extra: the array beside the weight.
            words: uint32, one per element (role PARAM).
        """
        raise NotImplementedError


class NearestWeights(WeightRule):
    """Leave rounding to `apply_updates`, and with it the loss of updates below half a unit in the last place.

    float32 weights are stored so whatever is asked (contract P6).
    """

    def emit(self, p, u, extra, words):
        """Return u."""
        return u, None
