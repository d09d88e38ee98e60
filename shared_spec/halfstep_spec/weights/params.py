"""How a weight is stored: what an update becomes before it is applied, and applying it.

Contract: section P. Vectors: params, adam.
"""

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


def landing(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the update that takes the weight p to q: q - p in float32, and -0.0 where they are equal.

    -0.0 is the one number that moves no weight, neither an infinity nor a zero of either sign.

    Args:
        p: float32 values of the weights.
        q: float32 values that the weights' dtype represents.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(q == p, np.float32(-0.0), q - p)


@dataclasses.dataclass(frozen=True)
class ParamStorage:
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

    def land(self, p: np.ndarray, u: np.ndarray, extra: Any, words: np.ndarray) -> tuple[np.ndarray, Any]:
        """Return the update that lands where the weight is to be stored, and the new `extra`.

        Args:
            p: patterns of `dtype`.
            u: float32 update.
            extra: the array beside the weight.
            words: uint32, one per element (role PARAM).
        """
        raise NotImplementedError


class RoundToNearest(ParamStorage):
    """Leave rounding to `apply_updates`, and with it the loss of updates below half a unit in the last place.

    float32 weights are stored so whatever is asked (contract P6).
    """

    def land(self, p, u, extra, words):
        """Return u."""
        return u, None


class RoundStochastically(ParamStorage):
    """Round stochastically (contract P2)."""

    def land(self, p, u, extra, words):
        """Return the update that lands on p + u, rounded to float32 and then stochastically to the dtype."""
        p32 = decode(p, self.dtype)
        return landing(p32, decode(round_to(p32 + u, self.dtype, words), self.dtype)), None


class Compensate(ParamStorage):
    """Keep what rounding has lost, in bfloat16, and add it to the next update (contract P4).

    Source: W. Kahan, "Further remarks on reducing truncation errors", CACM 8(1), 1965; for bfloat16 weights
    P. Zamirai et al., "Revisiting BFloat16 training", arXiv:2010.06192, section 4.
    """

    @property
    def extra_dtype(self) -> str:
        """Of the compensation."""
        return "bfloat16"

    def init(self, p) -> np.ndarray:
        """Return zeros: nothing has been lost."""
        return np.zeros(p.shape, np.uint16)

    def join(self, p, extra) -> np.ndarray:
        """Return p + c."""
        return decode(p, self.dtype) + decode(extra, "bfloat16")

    def seen(self, p, extra) -> np.ndarray:
        """Return p: the link stands last and shows its compensation to nobody."""
        return decode(p, self.dtype)

    def land(self, p, u, extra, words):
        """Return the update that lands on n = nearest(p + s), s = u + c, and the new c.

        c <- nearest(s - (n - p)) in bfloat16.
        """
        p32 = decode(p, self.dtype)
        s = u + decode(extra, "bfloat16")
        n = decode(round_to(p32 + s, self.dtype), self.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            lost = s - (n - p32)
        return landing(p32, n), round_to(lost, "bfloat16", saturate=True)
