"""SGD that rounds its weights itself, and feeds what this leaves out into the momentum (contract A23, P9)."""

import dataclasses

from halfstep.hyperparameters import Arguments, Scalar, check_bound
from halfstep.rule import Rule, moment, number
from halfstep.rules.fed_back import MOST, check_fed_back, check_kept, emitted, share_of_errors
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import Rounding


class SGDFedBack(Rule):
    """The whole step of SGD with momentum, which rounds weights stochastically, with errors fed back.

    With lr the learning rate, and p the weight:

        t = g + (decay trace)
        w = p - (lr t);  with `nesterov` p - (lr (g + (decay t)))
        p <- q = round(w);  e = w - q
        trace <- round(t - (back e))
        back = min(1 / max(s, decay / (1 - decay) peak_lr / 32), |t| (16 / ulp(p)))
        s = sum over k >= 1 of decay^k lr(t + k);  with `nesterov` decay times that

    In float32, each operation rounded once. Later steps add s times what `trace` has: here e, once. So errors
    do not add up. The sum has no second moment for a unit. So an error of one gap moves it by at most 16
    times itself, which a rate that was near 0 and rises needs. That bound reads t before w is rounded: what
    is fed back is right on average. Rates and `peak_lr` are as in `AdamWFedBack`.

    Float32 weights are not rounded: their step is that of SGD.
    """

    name = "sgd_fed_back"
    reads_params = "the link rounds params + update"
    rounds_weights = True

    learning_rate: Scalar = number(schedule=True, torch="lr")
    decay: Scalar = number(torch="momentum", check=check_kept)
    peak_lr: Scalar = number(None, check=check_bound, none=0.0, torch="peak_lr", owned=False)
    nesterov: bool = False
    accumulator_dtype: DType = None
    rounding: Rounding = "auto"
    seed: Seed = 0
    trace = moment(rate="decay", dtype="accumulator_dtype", rounding="rounding", torch="momentum_buffer")

    def numbers(self, h, t, op):
        """Return what errors are multiplied by, where the bound does not decide."""
        return {"back": share_of_errors(h.decay, h, t, op, self.nesterov)}

    def update(self, g, p, n, m, op):
        """Return q - p; w - p where rounding is exact, and -0.0 where q is p."""
        t = g + n.decay * m.trace.value
        down = n.learning_rate * (g + n.decay * t if self.nesterov else t)
        w = p - down
        q = m.param.round(w)
        back = op.minimum(n.back, op.abs(t) * m.param.bound(2.0**127, MOST))
        m.trace.round(t - back * (w - q))
        return emitted(p, down, w, q, op)


def sgd_fed_back(caller: str, arguments: Arguments) -> SGDFedBack:
    """Return the rule of an alias of SGD, from the arguments of the alias.

    Raises:
        ValueError: without a momentum, which would carry errors on; for a momentum with error feedback.
    """
    check_fed_back(caller, arguments, "rounding")
    momentum = arguments["momentum"]
    if momentum is None or isinstance(momentum, (int, float)):
        check_kept(caller, "momentum", momentum, momentum or 0.0)
    fields = {field.name for field in dataclasses.fields(SGDFedBack)} & arguments.keys()
    return SGDFedBack(decay=arguments["momentum"], **{name: arguments[name] for name in fields - {"decay"}})
