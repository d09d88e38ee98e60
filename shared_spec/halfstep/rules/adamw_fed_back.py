"""AdamW that rounds its weights itself and feeds the rounding errors back into mu (contract A21, P9)."""

import dataclasses

from halfstep.hyperparameters import Arguments, Scalar, check_bound
from halfstep.rule import Rule, decay_rate, moment, number
from halfstep.rules.fed_back import (
    AHEAD,
    check_fed_back,
    check_kept,
    check_whole,
    emitted,
    share_of_errors,
)
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import NO_END, Rounding


class AdamWFedBack(Rule):
    """AdamW's whole step, which rounds weights stochastically and feeds the rounding errors back into mu.

    With t the step count, r_i = 1 / (1 - b_i^t), lr the learning rate, and p the weight:

        nu <- round((b2 nu) + ((1 - b2) (g g)))
        v = (b1 mu) + ((1 - b1) g);  root = sqrt((nu r2) + eps_root) + eps
        w = p - (((v (r1 lr)) / root) + ((lr weight_decay) p))
        p <- q = round(w);  e = w - q
        mu <- round(v - (root (back e)))
        back = min(1 / max(s, b1 / (1 - b1) peak_lr / 32), K / ulp(p))
        s = sum over k >= 1 of b1^k lr(t + k) / (1 - b1^(t + k))

    In float32, each operation rounded once. Later steps apply an amount in `mu` s times over, so they add e
    once. Errors do not accumulate: after T steps a weight is about one gap from its exact value, instead of
    sqrt(T / 6) gaps. `mu` is an average of gradients, as in AdamW, and no other array is kept.

    Neither bound on `back` depends on e, so that the error fed back has no bias. K is 16, and so an error of
    one gap moves `mu` by at most 16 times root. If `mu` has 8 bits without a scale, K is 4 sqrt(1 - b2^t),
    and with 4 bits sqrt(1 - b2^t) / 2, because these codes end at a multiple of sqrt(nu) without bias
    correction. A schedule gives the rates in s. Without a schedule, the rates are assumed to rise on a line
    up to `peak_lr`, the largest rate in the run, and peak_lr / 4 replaces peak_lr / 32. With an infinite
    `peak_lr` no error is fed back.

    Float32 weights are not rounded, and their step is AdamW's.
    """

    name = "adamw_fed_back"
    reads_params = "the link rounds params + update"
    rounds_weights = True

    learning_rate: Scalar = number(schedule=True, torch="lr")
    b1: Scalar = decay_rate(0.9, check=check_kept, torch="betas[0]")
    b2: Scalar = decay_rate(0.999, torch="betas[1]")
    eps: Scalar = number(1e-8)
    eps_root: Scalar = number(0.0)
    weight_decay: Scalar = number(0.0, schedule=True)
    peak_lr: Scalar = number(None, check=check_bound, none=0.0, torch="peak_lr", owned=False)
    mu_dtype: DType = None
    nu_dtype: DType = None
    mu_rounding: Rounding = "auto"
    nu_rounding: Rounding = "stochastic"
    nesterov: bool = False
    seed: Seed = 0
    mu = moment(rate="b1", unit="nu", torch="exp_avg")
    nu = moment(rate="b2", signed=False, torch="exp_avg_sq", stored_first=True)

    def numbers(self, h, t, op):
        """Return the bias correction for nu, the rates for averages, gradients and decay, and `back`."""
        then = t + 2 if self.nesterov else t + 1
        r1, r2, r1_next, later = op.unbias((h.b1, t), (h.b2, t), (h.b1, t + 1), (h.b1, then), steps=AHEAD)
        back, more = share_of_errors(h.b1, h, t, op, self.nesterov, later), op.sqrt(r2)
        return {
            "r2": r2,
            "ahead": (r1_next if self.nesterov else r1) * h.learning_rate,
            "now": r1 * h.learning_rate,
            "decayed": h.learning_rate * h.weight_decay,
            "back": back,
            "back_of_unit": back * more,
            "unit": 1 / more,
        }

    def update(self, g, p, n, m, op):
        """Return q - p, which is w - p if rounding is exact and -0.0 if q is p."""
        root = op.sqrt(m.nu.round(op.ema(m.nu.value, g * g, n.b2)) * n.r2 + n.eps_root) + n.eps
        v = op.ema(m.mu.value, g, n.b1)
        step = op.ema(v * n.ahead, g * n.now, n.b1) if self.nesterov else v * n.ahead
        down = step / root + n.decayed * p
        w = p - down
        q = m.param.round(w)
        if m.mu.room < NO_END:
            back = m.param.bound(n.back_of_unit, m.mu.room) * n.unit
        else:
            back = m.param.bound(n.back, m.mu.room)
        m.mu.round(v - root * (back * (w - q)))
        return emitted(p, down, w, q, op)


class AdamFedBack(AdamWFedBack):
    """The same rule without decoupled decay. An L2 decay in front of it reads the param group's decay."""

    name = AdamWFedBack.name
    weight_decay: Scalar = number(0.0, torch=None)


def fed_back(caller: str, arguments: Arguments, kind: type[AdamWFedBack] = AdamWFedBack) -> AdamWFedBack:
    """Return the rule for an alias of Adam or AdamW, from the alias's arguments.

    Raises:
        ValueError: for a decay mask or a cautious decay, which the rule does not have, and as in
            `check_fed_back`.
    """
    check_whole(caller, "feedback", ("mask", "cautious"), arguments)
    check_fed_back(caller, arguments, "mu_rounding")
    fields = {field.name for field in dataclasses.fields(AdamWFedBack)} & arguments.keys()
    if kind is AdamFedBack:  # an L2 decay in front of the rule
        fields.discard("weight_decay")
    return kind(**{name: arguments[name] for name in fields})
