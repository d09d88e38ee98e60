"""LAMB's trust ratio, and the one of LAMB16 (contract L2, L4)."""

import math
from typing import Any

from halfstep.hyperparameters import check_bound
from halfstep.numbers import Number, Numbers
from halfstep.op import Op
from halfstep.rule import Rule, number

TEMPERED_COEFFICIENT = 1e-3
TEMPERED_MAX_RATIO = 2.0


def without_feedback(rounding: str) -> str:
    """Return the rounding of mu in front of a trust ratio: "stochastic" for "feedback" (contract F19).

    Feedback makes updates longer, of four bits by two fifths, and a ratio takes the norm of all.
    """
    return "stochastic" if rounding == "feedback" else rounding


class TrustRatio(Rule):
    """Base of both ratios: n has `trust_coefficient`, `eps` and the bounds; `exact` adds integers."""

    scope = "parameter"
    needs = "norms"
    reads_params = "the link compares the norms of params and updates"
    exact = False

    def update(self, g, p, n, m, op):
        """Return the update times the ratio of the norms."""
        p_norm, (u_norm, scale) = op.norm(p, self.exact), op.norm_in_range(g, self.exact)
        return op.scaled(g, self.ratio(p_norm, u_norm, scale, n, op), scale)

    def ratio(self, p_norm: Number, u_norm: Number, scale: Number, n: Numbers, op: Op) -> Number:
        """Return the ratio, given both norms, the second one of the update times a scale: 1 or 2^-64."""
        up = 1.0 / scale
        p_norm = op.clamp(p_norm, n.min_norm, n.max_norm)
        u_norm = op.maximum(u_norm, scale * n.min_norm)
        quotient = (n.trust_coefficient * p_norm) / (u_norm + scale * n.eps)
        ratio = self.tempered(quotient, up, n, op)
        # Where a norm is 0 the quotient would freeze the leaf for ever.
        ratio = op.where((p_norm == 0) | (u_norm == 0), up, ratio)
        return op.clamp(ratio, up * n.min_ratio, up * n.max_ratio)

    def tempered(self, quotient: Number, up: Number, n: Numbers, op: Op) -> Number:
        """Return the quotient of the norms as it is."""
        return quotient


class ScaleByTrustRatio(TrustRatio):
    """The rule of `scale_by_trust_ratio`. By default bounds bound nothing."""

    min_norm: Any = number(0.0, check=check_bound, none=0.0)
    trust_coefficient: Any = number(1.0)
    eps: Any = number(0.0, torch=None)  # the entry `eps` is another rule's
    max_norm: Any = number(None, check=check_bound, none=math.inf)
    min_ratio: Any = number(None, check=check_bound, none=0.0)
    max_ratio: Any = number(None, check=check_bound, none=math.inf)
    exact: bool = False


def check_power(caller: str, name: str, value: Any, number: float) -> None:
    """Refuse a power of the ratio outside (0, 1)."""
    if 0 < number < 1:
        return
    problem = "cancels the learning rate: a schedule would do nothing" if number == 1 else "is outside (0, 1)"
    raise ValueError(
        f"{caller}: {name}={value} {problem}. "
        "Use a number in (0, 1) such as 0.382, or None for LAMB's own ratio."
    )


class ScaleByTemperedTrustRatio(TrustRatio):
    """The rule of LAMB16: a power of the ratio, relative to the learning rate."""

    name = "lamb16"

    trust_power: Any = number(check=check_power)
    learning_rate: Any = number(schedule=True, torch="lr", owned=False)
    max_norm: Any = number(None, check=check_bound, none=math.inf)
    exact: bool = False

    def numbers(self, h, t, op):
        """Return the coefficient 1e-3 / learning_rate, and the bounds."""
        lower = dict.fromkeys(("min_norm", "eps", "min_ratio"), 0.0)
        coefficient = TEMPERED_COEFFICIENT / h.learning_rate
        return lower | {"trust_coefficient": coefficient, "max_ratio": TEMPERED_MAX_RATIO}

    def tempered(self, quotient: Number, up: Number, n: Numbers, op: Op) -> Number:
        """Return (quotient / up)^trust_power up, in factors that are float32 numbers."""
        return op.power(quotient, n.trust_power) * (up / op.power(up, n.trust_power))
