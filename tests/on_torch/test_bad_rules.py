"""Rules of users that cannot be stepped: refused by name when the optimizer is built."""

import numpy as np
import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.links.link import Link

FP8 = hs.scaled("float8_e4m3fn", 16, 0, 0)


def rule_of(update=None, base=hs.Rule, **attributes):
    """Return a rule of one average, with what the caller puts in its place."""
    members = {
        "__annotations__": {"b1": float},
        "b1": hs.decay_rate(0.9),
        "average": hs.moment(rate="b1"),
        "update": update or (lambda self, g, p, n, m, op: m.average.round(g)),
        **attributes,
    }
    return type("Mine", (base,), members)()


def rounding(compute):
    """Return an update that rounds what a function of (g, n, op) computes."""
    return lambda self, g, p, n, m, op: m.average.round(compute(g, n, op))


BAD_DECLARATIONS = {
    "scope of JAX": ({"scope": "all", "average": None}, 'mine: scope="all" is JAX\'s alone.'),
    "rounding": (
        {"average": hs.moment(rounding="seed")},
        "mine: the moment 'average' has rounding='seed', which is no field of the rule.",
    ),
    "no shape": (
        {"average": hs.moment(shape=lambda shape: None), "scope": "parameter"},
        "mine: the shape of average for weights of (2, 3) is None. Return a tuple of integers",
    ),
}


BAD_UPDATES = {
    "dtype": (
        rounding(lambda g, n, op: op.apply(lambda x: x.to(torch.bfloat16), g)),
        TypeError,
        "mine: <lambda> returns bfloat16 to op.apply. Return float32, or truth values.",
    ),
    "a number of self": (
        lambda self, g, p, n, m, op: m.average.round(self.b1 * g),
        TypeError,
        "mine: update computes with a bare NoneType. Use numbers of the step, or op.apply(function, x).",
    ),
    "neighbours": (
        rounding(lambda g, n, op: g - op.apply(torch.mean, g)),
        ValueError,
        "mine: the update of an element depends on those beside it, and the rule is elementwise.",
    ),
    "a function of torch": (
        rounding(lambda g, n, op: torch.tanh(g)),
        TypeError,
        "mine: update calls a function of a framework on a number of the step. Use op.<name>, such as",
    ),
    "a constant above": (
        rounding(lambda g, n, op: 0.3 / g),
        TypeError,
        "mine: update has the constant 0.3 in a quotient, which eager torch does not round correctly. Return",
    ),
    "a constant below": (
        rounding(lambda g, n, op: g / np.float32(3)),
        TypeError,
        "mine: update has the constant 3.0 in a quotient, which eager torch does not round correctly. Return",
    ),
    "an array of its own": (
        rounding(lambda g, n, op: op.wrap(2.0 * g.value)),
        ValueError,
        "mine: update fails on an update of shape (6,) (AttributeError: 'TorchOp' object has no attribute",
    ),
    "another result": (
        rounding(lambda g, n, op: g if isinstance(g, torch.Tensor) else 2.0 * g),
        ValueError,
        "mine: update gives another result on the bare tensors of a step. Use operators and op alone",
    ),
}


def build_mine(rule):
    p = torch.nn.Parameter(torch.ones(2, 3))
    return hs.Optimizer([p], hs.chain(rule, hs.scale_by_learning_rate(0.1)))


@pytest.mark.parametrize(("attributes", "message"), BAD_DECLARATIONS.values(), ids=BAD_DECLARATIONS)
def test_a_bad_declaration_is_refused_when_the_optimizer_is_built(attributes, message):
    with pytest.raises(ValueError, match="mine: ") as raised:
        build_mine(rule_of(**attributes))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(("update", "error", "message"), BAD_UPDATES.values(), ids=BAD_UPDATES)
@pytest.mark.parametrize("base", [hs.Rule, Link])
def test_a_bad_update_is_refused_when_the_optimizer_is_built(base, update, error, message):
    with pytest.raises(error) as raised:
        build_mine(rule_of(update, base))
    assert str(raised.value).startswith(message)


def test_a_rule_inside_store_state_is_tried_too():
    rule = rule_of(BAD_UPDATES["a function of torch"][0])
    with pytest.raises(TypeError, match="mine: update calls a function of a framework"):
        build_mine(hs.store_state(rule, "bfloat16"))


def test_two_rules_cannot_keep_one_array():
    with pytest.raises(ValueError, match="both own the state array 'exp_avg'"):
        hs.chain(hs.scale_by_adam(), rule_of(average=hs.moment(torch="exp_avg")))


def test_a_format_of_blocks_is_not_stored_in_another():
    inner = hs.scale_by_adam(mu_dtype=hs.scaled("float16", 4, 0, 0))
    with pytest.raises(ValueError, match="'mu' has block scales of its own"):
        hs.Optimizer([torch.nn.Parameter(torch.ones(4, 4))], hs.store_state(inner, FP8))
