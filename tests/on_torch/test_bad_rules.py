"""Rules of users that cannot be stepped: refused by name when the optimizer is built."""

import numpy as np
import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.link import Link

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
    "scope": ({"scope": "layer"}, "mine: scope='layer' is not a scope."),
    "scope of JAX": ({"scope": "all", "average": None}, 'mine: scope="all" is JAX\'s alone.'),
    "rate": (
        {"average": hs.moment(rate="b2")},
        "mine: the moment 'average' has rate='b2', which is no field of the rule. Declare b2, or",
    ),
    "rounding": (
        {"average": hs.moment(rounding="seed")},
        "mine: the moment 'average' has rounding='seed', which is no field of the rule.",
    ),
    "two of one torch name": (
        {"average": hs.moment(torch="exp_avg"), "other": hs.moment(torch="exp_avg")},
        "mine: the moments 'average' and 'other' both use the key 'exp_avg' of the state. Rename one",
    ),
    "a moment and a scale": (
        {"average_scale": hs.moment()},
        "mine: the moments 'average' and 'average_scale' both use the key 'average_scale' of the state.",
    ),
    "a moment named step": (
        {"average": hs.moment(torch="step")},
        "mine: the moments 'step' and 'average' both use the key 'step' of the state.",
    ),
    "words of another": (
        {"mu": hs.moment(), "trace": hs.moment()},
        "mine: mu and trace would share their random words. Rename one.",
    ),
    "one entry": (
        {"__annotations__": {"b1": float, "b2": float}, "b2": hs.decay_rate(0.9, torch="b1")},
        "mine: the fields 'b1' and 'b2' both own torch's group entry 'b1'. Give one of them another",
    ),
    "shape of an elementwise rule": (
        {"average": hs.moment(shape=lambda shape: shape[:1])},
        "mine: the moment 'average' has a shape of its own, and the rule is elementwise.",
    ),
    "no shape": (
        {"average": hs.moment(shape=lambda shape: None), "scope": "parameter"},
        "mine: the shape of average is None for a parameter of shape (2, 3). Return a tuple of sizes",
    ),
}


BAD_UPDATES = {
    "shape": (
        lambda self, g, p, n, m, op: op.apply(torch.sum, m.average.round(g)),
        ValueError,
        "mine: the update that the rule returns is float32[], due is float32[6]. Return float32 of the shape",
    ),
    "no number": (
        lambda self, g, p, n, m, op: m.average.round(g) and None,
        TypeError,
        "mine: update branches on a number of the step. Use op.where(mask, x, y).",
    ),
    "nothing": (
        lambda self, g, p, n, m, op: [m.average.round(g)][1:],
        TypeError,
        "mine: update returns a list. Return a number of the step.",
    ),
    "dtype": (
        rounding(lambda g, n, op: op.apply(lambda x: x.to(torch.bfloat16), g)),
        TypeError,
        "mine: <lambda> returns bfloat16 to op.apply. Return float32, or truth values.",
    ),
    "stored shape": (
        rounding(lambda g, n, op: op.apply(lambda x: x[:2], g)),
        ValueError,
        "mine: what is stored as average is float32[2], due is float32[6].",
    ),
    "never rounded": (
        lambda self, g, p, n, m, op: g,
        ValueError,
        "mine: update never rounds average, so it would stay zero. Call m.average.round(...) once",
    ),
    "rounded twice": (
        lambda self, g, p, n, m, op: m.average.round(m.average.round(g)),
        ValueError,
        "mine: average is rounded twice in a step. Round it once.",
    ),
    "another moment": (
        lambda self, g, p, n, m, op: m.other.round(g),
        AttributeError,
        "mine: update reads the moment other, which the rule does not declare. Declare it: other",
    ),
    "another number": (
        rounding(lambda g, n, op: n.b2 * g),
        AttributeError,
        "mine: update reads n.b2, which is no number of the rule. Declare it: b2 = number(...) or",
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
    "two numbers": (
        rounding(lambda g, n, op: (n.b1 * n.b1) * g),
        TypeError,
        "mine: update computes the product of two numbers of the step. Compute it in `numbers`",
    ),
    "a power": (
        rounding(lambda g, n, op: g**2),
        TypeError,
        "mine: update uses **. Use x * x, op.sqrt(x) or op.power(x, y).",
    ),
    "a method": (
        rounding(lambda g, n, op: g.clip(0, 1)),
        AttributeError,
        "mine: update uses .clip of a number of the step. Use op.apply(function, x).",
    ),
    "a method that op has": (
        rounding(lambda g, n, op: g.sqrt()),
        AttributeError,
        "mine: update uses .sqrt of a number of the step. Use op.sqrt(x).",
    ),
    "a function of torch": (
        rounding(lambda g, n, op: torch.tanh(g)),
        TypeError,
        "mine: update calls a function of a framework on a number of the step. Use op.<name>, such as",
    ),
    "a function of torch, of a list": (
        rounding(lambda g, n, op: torch.stack([g, g])),
        TypeError,
        "mine: update calls a function of a framework on a number of the step.",
    ),
    "a function of NumPy": (
        rounding(lambda g, n, op: np.sign(g)),
        TypeError,
        "mine: update calls a function of a framework on a number of the step.",
    ),
    "a bare tensor": (
        rounding(lambda g, n, op: torch.ones(6) * g),
        TypeError,
        "mine: update computes with a bare Tensor. Use numbers of the step, or op.apply(function, x).",
    ),
    "a branch": (
        rounding(lambda g, n, op: g if g > 0 else -g),
        TypeError,
        "mine: update branches on a comparison. Use op.where(mask, x, y).",
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
    "an operation that op lacks": (
        rounding(lambda g, n, op: op.tanh(g)),
        AttributeError,
        "mine: op has no tanh. Use op.apply(function, x).",
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


def test_a_moment_in_units_of_another_is_rounded_after_it():
    units = {
        "__annotations__": {"b1": float, "b2": float, "mu_dtype": object},
        "b2": hs.decay_rate(0.99),
        "mu_dtype": hs.relative("int8"),
        "average": None,
        "mu": hs.moment(rate="b1", unit="nu"),
        "nu": hs.moment(rate="b2", signed=False),
    }
    build_mine(rule_of(lambda self, g, p, n, m, op: m.nu.round(g * g) + m.mu.round(g), **units))
    with pytest.raises(ValueError, match="mine: mu is kept in units of the root of nu"):
        build_mine(rule_of(lambda self, g, p, n, m, op: m.mu.round(g) + m.nu.round(g * g), **units))


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
