"""Rules of users that cannot be stepped: refused by name when the transform is built."""

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
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


BAD = [
    (lambda: rule(first(lambda g, n, op: op.apply(lambda x: x.astype(jnp.bfloat16), g))), TypeError,
     "own: <lambda> returns bfloat16 to op.apply. Return float32, or truth values."),
    (lambda: rule(first(lambda g, n, op: None)), TypeError,
     "own: update returns a NoneType. Return a number of the step."),
    (lambda: rule(kept, scope="parameter", mu=hs.moment(rate="b1", shape=lambda shape: 3)), ValueError,
     "own: the shape of mu for weights of (8, 16) is 3. Return a tuple of integers."),
    (lambda: rule(kept, scope="all"), ValueError,
     'own: a rule of scope "all" keeps no moments. Use scope = "parameter".'),
    (lambda: rule(kept, mu_dtype="ufloat16_e7m9"), ValueError,
     "own: mu_dtype=ufloat16_e7m9 has no sign. Use it for nu, and a signed format for mu."),
    (lambda: rule(kept, b1=hs.decay_rate(1.5)), ValueError,
     "own: b1=1.5 is outside [0, 1). Use a decay rate such as 0.9."),
    (lambda: rule(lambda self, g, p, n, m, op: m.mu.round(self.b1 * g)), TypeError,
     "own: update reads self.b1. Use n.b1."),
    (lambda: rule(lambda self, g, p, n, m, op: m.mu.round(g - self.b1)), TypeError,
     "own: update reads self.b1. Use n.b1."),
    (
        lambda: rule(lambda self, g, p, n, m, op: m.mu.round(g if self.b2 else -g), b2=hs.option(True)),
        TypeError,
        "own: update reads self.b2. Use what `numbers` makes of it.",
    ),
    (lambda: rule(first(lambda g, n, op: jnp.concatenate([g, g]))), TypeError, FUNCTION),
    (lambda: rule(first(lambda g, n, op: jax.lax.exp(g))), TypeError, FUNCTION),
]  # fmt: skip


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
