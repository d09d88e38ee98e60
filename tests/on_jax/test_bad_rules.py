"""Rules of users that cannot be stepped: refused by name when the transform is built."""

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep_jax as hs


def rule(update, *, name="Own", **members):
    """Return an instance of a rule with one moment, mu."""
    fields = {"b1": hs.decay_rate(0.9), "mu": hs.moment(rate="b1"), "update": update} | members
    fields["__annotations__"] = {key: Any for key in ("b1", "b2", "mu_dtype") if key in fields}
    return type(name, (hs.Rule,), fields)()


def kept(self, g, p, n, m, op):
    return m.mu.round(g)


def first(function):
    """Return the `update` that rounds mu and returns a function of (g, n, op)."""

    def update(self, g, p, n, m, op):
        m.mu.round(g)
        return function(g, n, op)

    return update


FUNCTION = (
    "own: update calls a function of a framework on a number of the step. "
    "Use op.<name>, such as op.sqrt(x), or op.apply(function, x)."
)


def mu_before_nu(self, g, p, n, m, op):
    return m.mu.round(g) + m.nu.round(g * g)


UNITS = {
    "b2": hs.decay_rate(0.99),
    "mu_dtype": hs.relative("int8"),
    "mu": hs.moment(rate="b1", unit="nu"),
    "nu": hs.moment(rate="b2", signed=False),
}


BAD = [
    (
        lambda: rule(mu_before_nu, **UNITS),
        ValueError,
        "own: mu is kept in units of the root of nu. Round nu first.",
    ),
    (
        lambda: rule(first(lambda g, n, op: op.apply(lambda x: x[:1], g))),
        ValueError,
        "own: the update that the rule returns is float32[1, 16], due is float32[8, 16]. "
        "Return float32 of the shape that came in.",
    ),
    (
        lambda: rule(first(lambda g, n, op: op.apply(lambda x: x.astype(jnp.bfloat16), g))),
        TypeError,
        "own: <lambda> returns bfloat16 to op.apply. Return float32, or truth values.",
    ),
    (
        lambda: rule(first(lambda g, n, op: None)),
        TypeError,
        "own: update returns a NoneType. Return a number of the step.",
    ),
    (
        lambda: rule(lambda self, g, p, n, m, op: m.mu.round(op.apply(lambda x: x[0], g))),
        ValueError,
        "own: what is stored as mu is float32[16], due is float32[8, 16]. "
        "Return float32 of the shape that came in.",
    ),
    (
        lambda: rule(lambda self, g, p, n, m, op: m.nu.round(g)),
        AttributeError,
        "own: update reads the moment nu, which the rule does not declare. "
        'Declare it: nu = moment(rate="...").',
    ),
    (
        lambda: rule(first(lambda g, n, op: n.b2 * g)),
        AttributeError,
        "own: update reads n.b2, which is no number of the rule. "
        "Declare it: b2 = number(...) or decay_rate(...), or return it from `numbers`.",
    ),
    (
        lambda: rule(lambda self, g, p, n, m, op: g),
        ValueError,
        "own: update never rounds mu, so it would stay zero. "
        "Call m.mu.round(...) once, or do not declare it.",
    ),
    (
        lambda: rule(lambda self, g, p, n, m, op: m.mu.round(m.mu.round(g))),
        ValueError,
        "own: mu is rounded twice in a step. Round it once.",
    ),
    (
        lambda: rule(kept, mu=hs.moment(rate="b2")),
        ValueError,
        "own: the moment 'mu' has rate='b2', which is no field of the rule. Declare b2, or leave rate out.",
    ),
    (
        lambda: rule(kept, scope="parameter", mu=hs.moment(rate="b1", shape=lambda shape: 3)),
        ValueError,
        "own: the shape of mu for weights of (8, 16) is 3. Return a tuple of integers.",
    ),
    (
        lambda: rule(kept, mu=hs.moment(rate="b1", shape=lambda shape: shape[:1])),
        ValueError,
        "own: the moment 'mu' has a shape of its own, and the rule is elementwise. "
        'Give it scope = "parameter".',
    ),
    (
        lambda: rule(kept, scope="parameter", mu=hs.moment(rate="b1", shape="rows")),
        ValueError,
        "own: the moment 'mu' has shape='rows', which is no property of the rule. Define it, or pass a "
        "function of the shape of the weight.",
    ),
    (
        lambda: rule(kept, mu_scale=hs.moment(rate="b1")),
        ValueError,
        "own: the moments 'mu' and 'mu_scale' both use the key 'mu_scale' of the state. "
        'Rename one, or give it torch="...".',
    ),
    (
        lambda: rule(kept, b2=hs.decay_rate(0.9, torch="b1")),
        ValueError,
        "own: the fields 'b1' and 'b2' both own torch's group entry 'b1'. Give one of them another torch=...",
    ),
    (
        lambda: rule(kept, b2=hs.decay_rate(0.9, torch="b1[0]")),
        ValueError,
        "own: the fields 'b1' and 'b2' both own torch's group entry 'b1[0]'. "
        "Give one of them another torch=...",
    ),
    (
        lambda: rule(kept, trace=hs.moment(rate="b1")),
        ValueError,
        "own: mu and trace would share their random words. Rename one.",
    ),
    (
        lambda: rule(kept, scope="all"),
        ValueError,
        'own: a rule of scope "all" keeps no moments. Use scope = "parameter".',
    ),
    (
        lambda: rule(kept, scope="leaf"),
        ValueError,
        'own: scope=\'leaf\' is not a scope. Use "elementwise", "parameter" or "all".',
    ),
    (
        lambda: rule(kept, mu_dtype="ufloat8_e6m2"),
        ValueError,
        "own: mu_dtype=ufloat8_e6m2 has no sign. Use it for nu, and a signed format for mu.",
    ),
    (
        lambda: rule(kept, b1=hs.decay_rate(1.5)),
        ValueError,
        "own: b1=1.5 is outside [0, 1). Use a decay rate such as 0.9.",
    ),
    (
        lambda: rule(lambda self, g, p, n, m, op: m.mu.round(self.b1 * g)),
        TypeError,
        "own: update reads self.b1. Use n.b1.",
    ),
    (
        lambda: rule(lambda self, g, p, n, m, op: m.mu.round(g - self.b1)),
        TypeError,
        "own: update reads self.b1. Use n.b1.",
    ),
    (
        lambda: rule(lambda self, g, p, n, m, op: m.mu.round(g if self.b2 else -g), b2=hs.option(True)),
        TypeError,
        "own: update reads self.b2. Use what `numbers` makes of it.",
    ),
    (lambda: rule(first(lambda g, n, op: jnp.tanh(g))), TypeError, FUNCTION),
    (lambda: rule(first(lambda g, n, op: jnp.add(g, g * g))), TypeError, FUNCTION),
    (lambda: rule(first(lambda g, n, op: jnp.where(g > 0, 1.0, 2.0))), TypeError, FUNCTION),
    (lambda: rule(first(lambda g, n, op: jnp.concatenate([g, g]))), TypeError, FUNCTION),
    (lambda: rule(first(lambda g, n, op: jax.lax.exp(g))), TypeError, FUNCTION),
    (lambda: rule(first(lambda g, n, op: np.asarray(g))), TypeError, FUNCTION),
    (lambda: rule(first(lambda g, n, op: np.tanh(g))), TypeError, FUNCTION),
    (
        lambda: rule(first(lambda g, n, op: g * np.ones(16, np.float32))),
        TypeError,
        "own: update computes with a bare ndarray. Use numbers of the step, or op.apply(function, x).",
    ),
    (
        lambda: rule(first(lambda g, n, op: g * (g > 0))),
        TypeError,
        "own: update computes with a comparison. Use op.where(mask, x, y).",
    ),
    (
        lambda: rule(first(lambda g, n, op: op.where(True, g, g))),
        TypeError,
        "own: op.where gets a bool as its mask. Use a comparison of numbers of the step, such as x > 0.",
    ),
    (
        lambda: rule(first(lambda g, n, op: g if g > 0 else -g)),
        TypeError,
        "own: update branches on a comparison. Use op.where(mask, x, y).",
    ),
    (
        lambda: rule(first(lambda g, n, op: g**2)),
        TypeError,
        "own: update uses **. Use x * x, op.sqrt(x) or op.power(x, y).",
    ),
    (
        lambda: rule(first(lambda g, n, op: g * (n.b1 * n.b1))),
        TypeError,
        "own: update computes the product of two numbers of the step. "
        "Compute it in `numbers`, which runs once a step.",
    ),
    (
        lambda: rule(first(lambda g, n, op: g.clip(0, 1))),
        AttributeError,
        "own: update uses .clip of a number of the step. Use op.apply(function, x).",
    ),
    (
        lambda: rule(first(lambda g, n, op: g.abs())),
        AttributeError,
        "own: update uses .abs of a number of the step. Use op.abs(x).",
    ),
    (
        lambda: rule(first(lambda g, n, op: op.tanh(g))),
        AttributeError,
        "own: op has no tanh. Use op.apply(function, x).",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_rule_is_refused_when_it_is_built(make, error, message):
    with pytest.raises(error) as caught:
        hs.as_transform(make())
    assert str(caught.value) == message


def test_a_rule_without_a_count_may_not_read_it():
    class Fading(hs.Rule):
        rate: float = hs.number(0.5)

        def numbers(self, h, t, op):
            return {"later": op.float32(t > 1)}

        def update(self, g, p, n, m, op):
            return n.later * g

    with pytest.raises(ValueError, match="fading: numbers reads the count of steps, and the rule keeps none"):
        hs.as_transform(Fading())
