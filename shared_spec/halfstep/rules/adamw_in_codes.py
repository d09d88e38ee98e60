"""AdamW with weights kept only in 8-bit codes (contract A20, P8)."""

import dataclasses

from halfstep.hyperparameters import Arguments, Scalar, check_bound
from halfstep.rule import Rule, decay_rate, moment, number
from halfstep.rules.fed_back import AHEAD, check_kept, check_whole, share_of_errors
from halfstep.rules.trust_ratio import without_feedback
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import INT8, Rounding

LARGEST = 2.0**20
"""Bound on `mu`, below the largest integer under a fine scale (contract F14)."""


class AdamWInCodes(Rule):
    """AdamW's whole step, which rounds weights to codes and feeds the rounding errors back into mu.

    With t the step count, r_i = 1 / (1 - b_i^t), lr the learning rate, and p the weight:

        nu <- round((b2 nu) + ((1 - b2) (g g)))
        v = (b1 mu) + ((1 - b1) g);  root = sqrt((nu r2) + eps_root) + eps
        w = p - (((v (r1 lr)) / root) + ((lr weight_decay) p))
        param <- q = round(w);  e = w - q
        mu <- round(clamp(v - (root (back e)), -2^20, 2^20)),  back as in `AdamWFedBack`, without its gap

    In float32, each operation rounded once. Later steps add `mu` times their learning rates, and so add e
    once. An error is divided by the coming rates, which are often below an 8-bit gap, so `mu` may be large.
    The clamp is reached at rates below about 1e-9. A bound on e would cause a bias, because the stochastic
    error in w is small in one direction and large in the other direction.

    The update leads from p to q, so that the model's float32 weights equal the decoded codes.
    """

    name = "adamw_in_codes"
    reads_params = "the link steps the params and stores them in 8 bits"

    learning_rate: Scalar = number(schedule=True, torch="lr")
    b1: Scalar = decay_rate(0.9, check=check_kept, torch="betas[0]")
    b2: Scalar = decay_rate(0.999, torch="betas[1]")
    eps: Scalar = number(1e-8)
    eps_root: Scalar = number(0.0)
    weight_decay: Scalar = number(0.0, schedule=True)
    peak_lr: Scalar = number(None, check=check_bound, none=0.0, torch="peak_lr", owned=False)
    mu_dtype: DType = None
    nu_dtype: DType = None
    param_dtype: DType = INT8
    mu_rounding: Rounding = "auto"
    nu_rounding: Rounding = "stochastic"
    param_rounding: Rounding = "stochastic"
    seed: Seed = 0
    mu = moment(rate="b1", unit="nu", torch="exp_avg", of_any_size=True)
    nu = moment(rate="b2", signed=False, torch="exp_avg_sq")
    param = moment(copies_weights=True)

    def __post_init__(self) -> None:
        """Raise an error for a rounding to nearest, because its errors are not noise."""
        if self.param_rounding in ("nearest", "nearest_unchecked", "auto"):
            raise ValueError(
                f"{self.name}: param_rounding={self.param_rounding!r} loses small updates (distance 0.24 "
                'on digits, where stochastic rounding has 0.055). Use "stochastic".'
            )

    def numbers(self, h, t, op):
        """Return the bias correction for nu, the rates for averages and decay, and the factor for errors."""
        r1, r2, later = op.unbias((h.b1, t), (h.b2, t), (h.b1, t + 1), steps=AHEAD)
        return {
            "r2": r2,
            "ahead": r1 * h.learning_rate,
            "decayed": h.learning_rate * h.weight_decay,
            "back": share_of_errors(h.b1, h, t, op, False, later),
        }

    def update(self, g, p, n, m, op):
        """Return q - p, which is w - p if rounding is exact and -0.0 if q is p."""
        root = op.sqrt(m.nu.round(op.ema(m.nu.value, g * g, n.b2)) * n.r2 + n.eps_root) + n.eps
        v = op.ema(m.mu.value, g, n.b1)
        down = (v * n.ahead) / root + n.decayed * p
        w = p - down
        q = m.param.round(w)
        m.mu.round(op.clamp(v - root * (n.back * (w - q)), -LARGEST, LARGEST))
        return op.where(q == w, -down, op.where(q == p, -0.0, q - p))


def in_codes(caller: str, arguments: Arguments) -> AdamWInCodes:
    """Return the rule for an alias of AdamW, from the alias's arguments.

    Raises:
        ValueError: for a decay mask, a cautious decay, or Nesterov's momentum, none of which the rule has.
    """
    check_whole(caller, "int8", ("mask", "nesterov", "cautious"), arguments)
    fields = {field.name for field in dataclasses.fields(AdamWInCodes)} & arguments.keys()
    chosen = {name: arguments[name] for name in fields}
    chosen["mu_rounding"] = without_feedback(arguments["mu_rounding"])
    return AdamWInCodes(**chosen)
