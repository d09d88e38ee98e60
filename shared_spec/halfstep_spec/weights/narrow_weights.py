"""Weights that are rounded stochastically, or to nearest with compensation. Contract: P2, P4.

Vectors: params, weights.
"""

import numpy as np

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS
from halfstep_spec.numbers.rounding import decode, round_to
from halfstep_spec.weights.weight_rule import WeightRule, update_between


class RoundStochastically(WeightRule):
    """Round stochastically (contract P2)."""

    def emit(self, p, u, extra, words):
        """Return the update that leads to p + u, rounded to float32 and then stochastically to the dtype."""
        p32 = decode(p, self.dtype)
        return update_between(p32, decode(round_to(p32 + u, self.dtype, words), self.dtype)), None


class Compensate(WeightRule):
    """Keep the rounding error in bfloat16, and add it to the next update (contract P4).

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
        """Return p + c, c as far as it is of p."""
        p32 = decode(p, self.dtype)
        return p32 + self._of(p32, decode(extra, "bfloat16"))

    def seen(self, p, extra) -> np.ndarray:
        """Return p: the link stands last and shows its compensation to nobody."""
        return decode(p, self.dtype)

    def emit(self, p, u, extra, words):
        """Return the update that leads to n = nearest(p + s), s = u + c, and the new c.

        c, as far as it is of the lesser of p and 2 (p + u), becomes nearest(s - (n - p)) in bfloat16.
        """
        p32 = decode(p, self.dtype)
        s = u + self._of(np.minimum(np.abs(p32), 2 * np.abs(p32 + u)), decode(extra, "bfloat16"))
        n = decode(round_to(p32 + s, self.dtype), self.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            lost = s - (n - p32)
        return update_between(p32, n), round_to(lost, "bfloat16", saturate=True)

    def _of(self, p32, c) -> np.ndarray:
        """Return c, or 0 where |c| is above half a unit in the last place of p (contract P7)."""
        fmt, field = FLOAT_FORMATS[self.dtype], p32.view(np.uint32) >> 23 & 0xFF
        exponent = np.maximum(field.astype(np.int64) - 127, 1 - fmt.bias)
        half = np.where(field == 255, np.inf, np.ldexp(0.5, exponent - fmt.mantissa_bits))
        return np.where(np.abs(c) <= half, c, np.float32(0))
