"""Rules of users that cannot be stepped: refused by name when they are built, by both packages alike."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import halfstep_jax
import halfstep_torch
from halfstep import relative
from halfstep.rule import Rule, decay_rate, moment


def rule(update=None, **members):
    """Return a rule of one moment, with what the caller puts in its place."""
    update = update or (lambda self, g, p, n, m, op: m.mu.round(g))
    fields = {"b1": decay_rate(0.9), "mu": moment(rate="b1"), "update": update} | members
    fields["__annotations__"] = {key: Any for key in ("b1", "b2", "mu_dtype") if key in fields}
    return type("Own", (Rule,), fields)()


def of(function):
    """Return the update that rounds what a function of (g, n, op) computes."""
    return lambda self, g, p, n, m, op: m.mu.round(function(g, n, op))


def build(package, made):
    """Build what steps by a rule."""
    if package is halfstep_jax:
        return halfstep_jax.as_transform(made)
    weight = torch.nn.Parameter(torch.ones(8, 16))
    chain = halfstep_torch.chain(made, halfstep_torch.scale_by_learning_rate(0.1))
    return halfstep_torch.Optimizer([weight], chain)


FUNCTION = (
    "update calls a function of a framework on a number of the step. "
    "Use op.<name>, such as op.sqrt(x), or op.apply(function, x)."
)
PRODUCT = "Compute it in `numbers`, which runs once a step."
BOTH = "Rename one, or give it torch="
ENTRY = "Give one of them another torch="

UPDATES = [
    (lambda self, g, p, n, m, op: g, ValueError,
     "update never rounds mu, so it would stay zero. Call m.mu.round(...)"),
    (lambda self, g, p, n, m, op: m.mu.round(m.mu.round(g)), ValueError,
     "mu is rounded twice in a step. Round it once."),
    (lambda self, g, p, n, m, op: m.nu.round(g), AttributeError,
     "update reads the moment nu, which the rule does not declare. Declare it: nu = moment("),
    (lambda self, g, p, n, m, op: m.mu.round(g) and None, TypeError,
     "update branches on a number of the step. Use op.where("),
    (lambda self, g, p, n, m, op: [m.mu.round(g)][1:], TypeError,
     "update returns a list. Return a number of the step."),
    (lambda self, g, p, n, m, op: op.apply(lambda x: x[:1], m.mu.round(g)), ValueError,
     "the update that the rule returns is float32[1"),
    (of(lambda g, n, op: op.apply(lambda x: x[:2], g)), ValueError, "what is stored as mu is float32[2"),
    (of(lambda g, n, op: n.b2 * g), AttributeError,
     "update reads n.b2, which is no number of the rule. Declare it: b2 = number(...) or"),
    (of(lambda g, n, op: g * (n.b1 * n.b1)), TypeError,
     f"update computes the product of two numbers of the step. {PRODUCT}"),
    (of(lambda g, n, op: g**2), TypeError, "update uses **. Use x * x, op.sqrt(x) or op.power(x, y)."),
    (of(lambda g, n, op: g.clip(0, 1)), AttributeError,
     "update uses .clip of a number of the step. Use op.apply(function, x)."),
    (of(lambda g, n, op: g.abs()), AttributeError,
     "update uses .abs of a number of the step. Use op.abs(x)."),
    (of(lambda g, n, op: op.tanh(g)), AttributeError, "op has no tanh. Use op.apply(function, x)."),
    (of(lambda g, n, op: np.tanh(g)), TypeError, FUNCTION),
    (of(lambda g, n, op: np.asarray(g)), TypeError, FUNCTION),
    (of(lambda g, n, op: jnp.tanh(g)), TypeError, FUNCTION),
    (of(lambda g, n, op: jnp.where(g > 0, 1.0, 2.0)), TypeError, FUNCTION),
    (of(lambda g, n, op: torch.tanh(g)), TypeError, FUNCTION),
    (of(lambda g, n, op: torch.stack([g, g])), TypeError, FUNCTION),
    (of(lambda g, n, op: g * np.ones(16, np.float32)), TypeError,
     "update computes with a bare ndarray. Use numbers of the step, or op.apply(function, x)."),
    (of(lambda g, n, op: torch.ones(16) * g), TypeError,
     "update computes with a bare Tensor. Use numbers of the step"),
    (of(lambda g, n, op: g * (g > 0)), TypeError,
     "update computes with a comparison. Use op.where(mask, x, y)."),
    (of(lambda g, n, op: g if g > 0 else -g), TypeError,
     "update branches on a comparison. Use op.where(mask, x, y)."),
    (of(lambda g, n, op: op.where(True, g, g)), TypeError,
     "op.where gets a bool as its mask. Use a comparison of numbers of the step, such as x > 0."),
]  # fmt: skip

DECLARATIONS = [
    ({"scope": "leaf"}, "scope='leaf' is not a scope."),
    ({"mu": moment(rate="b2")},
     "the moment 'mu' has rate='b2', which is no field of the rule. Declare b2, or leave"),
    ({"mu": moment(rate="b1", shape=lambda shape: shape[:1])},
     "the moment 'mu' has a shape of its own, and the rule is elementwise. Give it scope = \"parameter\"."),
    ({"scope": "parameter", "mu": moment(rate="b1", shape="rows")},
     "the moment 'mu' has shape='rows', which is no property of the rule. Define it, or pass"),
    ({"mu_scale": moment(rate="b1")},
     f"the moments 'mu' and 'mu_scale' both use the key 'mu_scale' of the state. {BOTH}"),
    ({"other": moment(torch="mu")},
     f"the moments 'mu' and 'other' both use the key 'mu' of the state. {BOTH}"),
    ({"mu": moment(torch="step")},
     f"the moments 'step' and 'mu' both use the key 'step' of the state. {BOTH}"),
    ({"b2": decay_rate(0.9, torch="b1")},
     f"the fields 'b1' and 'b2' both own torch's group entry 'b1'. {ENTRY}"),
    ({"b2": decay_rate(0.9, torch="b1[0]")},
     f"the fields 'b1' and 'b2' both own torch's group entry 'b1[0]'. {ENTRY}"),
    ({"trace": moment(rate="b1")}, "mu and trace would share their random words. Rename one."),
]  # fmt: skip
PACKAGES = pytest.mark.parametrize("package", [halfstep_jax, halfstep_torch])


@PACKAGES
@pytest.mark.parametrize(("update", "error", "message"), UPDATES, ids=[row[2][:40] for row in UPDATES])
def test_a_bad_update_is_refused_when_it_is_built(package, update, error, message):
    with pytest.raises(error) as caught:
        build(package, rule(update))
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"own: {message}")


@PACKAGES
@pytest.mark.parametrize(("members", "message"), DECLARATIONS, ids=[row[1][:40] for row in DECLARATIONS])
def test_a_bad_declaration_is_refused_when_it_is_built(package, members, message):
    with pytest.raises(ValueError, match="own: ") as caught:
        build(package, rule(**members))
    assert str(caught.value).startswith(f"own: {message}")


@PACKAGES
def test_a_moment_in_units_of_another_is_rounded_after_it(package):
    units = {
        "b2": decay_rate(0.99),
        "mu_dtype": relative("float8_e3m4"),
        "mu": moment(rate="b1", unit="nu"),
        "nu": moment(rate="b2", signed=False),
    }
    build(package, rule(lambda self, g, p, n, m, op: m.nu.round(g * g) + m.mu.round(g), **units))
    with pytest.raises(ValueError, match=r"own: mu is kept in units of the root of nu\. Round nu first\."):
        build(package, rule(lambda self, g, p, n, m, op: m.mu.round(g) + m.nu.round(g * g), **units))
