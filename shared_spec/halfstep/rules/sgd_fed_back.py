"""SGD that rounds its weights itself and feeds the errors back into the momentum (contract A23, P9)."""

import dataclasses

from halfstep.hyperparameters import Arguments, Scalar, check_bound
from halfstep.rule import Rule, moment, number
from halfstep.rules.fed_back import MOST, check_fed_back, check_kept, emitted, share_of_errors
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import Rounding


class SGDFedBack(Rule):
    """The whole step of SGD with momentum, which rounds weights stochastically and feeds errors back.

    With lr the learning rate, and p the weight:

        t = g + (decay trace)
        w = p - (lr t);  with `nesterov` p - (lr (g + (decay t)))
        p <- q = round(w);  e = w - q
        trace <- round(t - (back e))
        back = min(1 / max(s, decay / (1 - decay) peak_lr / 32), |t| (16 / ulp(p)))
        s = sum over k >= 1 of decay^k lr(t + k);  with `nesterov` decay times this sum

    In float32, each operation rounded once. Later steps apply an amount in `trace` s times over, so they add
    e once, and errors do not accumulate. The rule has no second moment as a unit. Instead, an error of one
    gap moves the trace by at most 16 |t|. The bound is needed if the rate was near 0 and rises, and it reads
    t before w is rounded, so that the error fed back has no bias. Rates and `peak_lr` are as in
    `AdamWFedBack`.

    Float32 weights are not rounded, and their step is SGD's.
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
        """Return the factor for errors that are below the bound."""
        return {"back": share_of_errors(h.decay, h, t, op, self.nesterov)}

    def update(self, g, p, n, m, op):
        """Return q - p, which is w - p if rounding is exact and -0.0 if q is p."""
        t = g + n.decay * m.trace.value
        down = n.learning_rate * (g + n.decay * t if self.nesterov else t)
        w = p - down
        q = m.param.round(w)
        back = op.minimum(n.back, op.abs(t) * m.param.bound(2.0**127, MOST))
        m.trace.round(t - back * (w - q))
        return emitted(p, down, w, q, op)


def sgd_fed_back(caller: str, arguments: Arguments) -> SGDFedBack:
    """Return the rule for an alias of SGD, from the alias's arguments.

    Raises:
        ValueError: without a momentum, which carries the errors, and for a momentum with error feedback.
    """
    check_fed_back(caller, arguments, "rounding")
    momentum = arguments["momentum"]
    if momentum is None or isinstance(momentum, (int, float)):
        check_kept(caller, "momentum", momentum, momentum or 0.0)
    fields = {field.name for field in dataclasses.fields(SGDFedBack)} & arguments.keys()
    return SGDFedBack(decay=arguments["momentum"], **{name: arguments[name] for name in fields - {"decay"}})
