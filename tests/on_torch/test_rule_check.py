"""`check_rule`: a rule has NumPy's bits op by op, in eager and in compiled code, or the line is named."""

import re

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.numbers.op import GuardedOp, TorchOp
from halfstep_torch.rules import rule_check

COMPILED = [False, pytest.param(True, marks=pytest.mark.slow)]
# Inductor's modules warn, as they are imported, of what torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class Everything(hs.Rule):
    """All that a rule may declare, and most of what it may compute."""

    a: float = hs.number(0.3)
    b: float = hs.number(0.7)
    b2: float = hs.decay_rate(0.99)
    signs: bool = True
    nu_dtype: object = None
    nu = hs.moment(rate="b2", signed=False)

    def numbers(self, h, t, op):
        return {"c": h.a * h.b, "r": op.unbias((h.b2, t))[0], "w": op.where(t > 2, op.sqrt(h.a), h.b)}

    def update(self, g, p, n, m, op):
        nu = m.nu.round(op.ema(m.nu.value, g * g, n.b2))
        u = op.where((g > p) & op.isfinite(g), g / op.sqrt(nu * n.r), (g * n.a) / n.b)
        u = op.clamp(u + n.c, -1.0, 1.0) * op.sign(p) - op.abs(p) * n.w
        u = op.maximum(n.b2, u) + n.a / (u - n.b2) if self.signs else u
        return op.where(n.b2 > g, 2.0 / u, op.ema(u, g, n.a))


class Whole(hs.Rule):
    """What a rule of whole parameters may compute beside it."""

    scope = "parameter"
    a: float = hs.number(0.3)
    row = hs.moment(shape=lambda shape: shape[-1:])

    def update(self, g, p, n, m, op):
        m.row.round(op.apply(lambda x: x.sum(0), g))
        u = op.matmul(g, op.apply(lambda x: x.T.contiguous(), p))
        u = op.apply(lambda x: x.repeat(1, 2), u) + op.power(op.abs(g), n.a)
        return op.scaled(u, op.norm(p) / (op.norm(u, exact=True) + n.a))


RULES = [
    hs.scale_by_adam(eps_root=1e-6),
    hs.scale_by_adam(nesterov=True, bias_correction=False),
    hs.scale_by_adan(),
    hs.scale_by_lion(),
    hs.trace(0.9, nesterov=True),
    hs.scale_by_trust_ratio(max_norm=10.0, min_ratio=0.1),
    hs.add_decayed_weights(0.1, absolute=True),
    hs.scale_by_learning_rate(0.3),
    Everything(),
    Whole(),
]


@pytest.mark.parametrize("compile", COMPILED)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_have_the_bits_of_numpy(rule, compile):
    hs.check_rule(rule, seed=1, compile=compile)


ROOT = "u = op.where((g > p) & op.isfinite(g), g / op.sqrt(nu * n.r), (g * n.a) / n.b)"


def message(what, found):
    return rf"^everything: {what}: the result differs {found} in \d+ of 2048 numbers, such as np\.float32"


def line(code):
    return rf"test_rule_check\.py, line \d+: {re.escape(code)}"


def test_the_line_that_differs_from_numpy_is_named(monkeypatch):
    monkeypatch.setattr(GuardedOp, "root", staticmethod(lambda x: x * torch.rsqrt(x)))
    with pytest.raises(ValueError, match=message(line(ROOT), "from NumPy's")):
        hs.check_rule(Everything(), compile=False)


ONE_BY_ONE = "from operations taken one by one"


def test_a_step_that_differs_from_its_operations_is_told(monkeypatch):
    monkeypatch.setattr(TorchOp, "sign", staticmethod(lambda x: torch.copysign(torch.ones(()), x)))
    found = message("what update returns or stores", f"on the bare tensors of a step {ONE_BY_ONE}")
    with pytest.raises(ValueError, match=found):
        hs.check_rule(Everything(), compile=False)


def test_without_a_compiler_the_way_out_is_told(monkeypatch):
    monkeypatch.setattr(rule_check, "find_cc", lambda: None)
    with pytest.raises(RuntimeError, match=r"no C compiler is found\. .* or use compile=False"):
        hs.check_rule(Everything())
