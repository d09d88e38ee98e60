"""The rule protocol: rules of any kind can be written, and a bad one is named with its way out."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import halfstep_spec as spec
from halfstep_spec.rule import Moment, Rule, moment

G = np.linspace(-2, 3, 24, dtype=np.float32).reshape(4, 6)


@dataclasses.dataclass(frozen=True)
class Averages(Rule):
    """Base of the bad rules below: one average."""

    b1: float = 0.9
    mu_dtype: Any = "float32"
    mu_rounding: str = "auto"
    seed: int = 0
    mu: Moment = moment("b1")

    def update(self, g, p, n, moments):
        return moments.mu.round(spec.ema(moments.mu.value, g, n.b1))


@dataclasses.dataclass(frozen=True)
class Factored(Rule):
    """Adafactor's second moment: averages over rows and over columns."""

    scope = "parameter"

    b2: float = 0.99
    nu_dtype: Any = "bfloat16"
    nu_rounding: str = "stochastic"
    seed: int = 0
    rows: Moment = moment(
        "b2", signed=False, dtype="nu_dtype", rounding="nu_rounding", shape=lambda shape: shape[:1]
    )
    columns: Moment = moment(
        "b2", signed=False, dtype="nu_dtype", rounding="nu_rounding", shape=lambda shape: shape[1:]
    )

    def update(self, g, p, n, moments):
        rows = moments.rows.round(spec.ema(moments.rows.value, (g * g).mean(1), n.b2))
        columns = moments.columns.round(spec.ema(moments.columns.value, (g * g).mean(0), n.b2))
        return g / np.sqrt(rows[:, None] * columns / rows.mean())


@dataclasses.dataclass(frozen=True)
class Orthogonal(Averages):
    """The average's nearest orthogonal matrix, by Newton and Schulz."""

    scope = "parameter"

    def update(self, g, p, n, moments):
        x = super().update(g, p, n, moments)
        x = x / spec.norm(x)
        for _ in range(40):
            x = np.float32(1.5) * x - np.float32(0.5) * (x @ x.T @ x)
        return x


def stepped(rule: Rule, count: int = 1, g: np.ndarray = G):
    state = rule.init(g.shape)
    for _ in range(count):
        u, state = rule.step(g, state, "w", np.ones_like(g))
    return u, state


def test_a_rule_may_keep_moments_of_another_shape():
    u, state = stepped(Factored(), 3)
    assert [stored.codes.shape for stored in state.moments.values()] == [(4,), (6,)]
    assert u.shape == G.shape
    assert state.moments["rows"].codes.dtype == np.uint16


def test_a_rule_may_see_the_whole_parameter():
    g = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    u, _ = stepped(Orthogonal(), g=g)
    np.testing.assert_allclose(u @ u.T, np.eye(4), atol=1e-5)


@pytest.mark.parametrize("name", [name for name, rule in spec.RULES.items() if rule.scope == "elementwise"])
def test_an_elementwise_rule_steps_every_part_of_an_array_as_it_steps_the_whole(name):
    rule = spec.RULES[name]()
    rule = dataclasses.replace(rule, **{d.rounding: "nearest" for d in rule.declared().values()})
    whole, _ = stepped(rule, 3)
    parts = [stepped(rule, 3, G[i : i + 1])[0] for i in range(4)]
    np.testing.assert_array_equal(whole.view(np.uint32), np.concatenate(parts).view(np.uint32))


def test_of_the_rules_with_moments_three_see_whole_arrays():
    assert [name for name, rule in spec.RULES.items() if rule.scope == "parameter"] == [
        "adafactor",
        "muon",
        "normuon",
    ]


@pytest.mark.parametrize("name", spec.RULES)
def test_every_moment_of_a_rule_has_words_of_its_own(name):
    moments = spec.RULES[name]().moments
    roles = [m.role for kept, m in moments.items() if kept != "param"]  # what is the weight has its words
    assert len({*roles, spec.Role.PARAM, spec.Role.STATE}) == len(roles) + 2


def test_a_moment_has_the_role_of_its_name():
    assert [spec.role_of(name) for name in ("param", "mu", "trace", "nu")] == [0, 1, 1, 2]
    # The published FNV-1a hash of "foobar".
    assert spec.role_of("foobar") == 0xBF9CF968
    assert Factored().moments["rows"].role == spec.leaf_id("rows")


def test_numbers_are_float32_and_named():
    n = spec.ScaleByAdam(b1=0.9).numbers(1)
    assert n.b1 == np.float32(0.9)
    assert n.r1 == np.float32(1) / (np.float32(1) - np.float32(0.9))
    assert all(isinstance(number, np.float32) for number in n)


@pytest.mark.parametrize(("b", "stochastic"), [(0.5, False), (0.9, True), (0.999, True)])
def test_auto_is_nearest_only_where_an_average_ends_within_a_thousandth(b, stochastic):
    """Half a gap of float16 is 2^-11: over 1 - b that is under a thousandth at 0.5 alone."""
    g = np.full(4096, 1.001, np.float32)
    words = [stepped(Averages(b1=b, mu_dtype="float16", mu_rounding=r), g=g)[0] for r in ("auto", "nearest")]
    assert (words[0] != words[1]).any() == stochastic


def refuses(rule: Rule, message: str):
    with pytest.raises((ValueError, AttributeError), match=message):
        stepped(rule)


@pytest.mark.parametrize("name", ["ufloat16_e7m9", "ufloat8_e5m3", "uroot8", "udynamic8"])
def test_a_format_without_a_sign_is_refused_for_a_first_moment(name):
    """The generator wrote golden vectors of an optimizer that both packages refuse."""
    fmt = next(
        make(name)
        for make, kinds in (
            (spec.Format, spec.PLAIN_CODES),
            (spec.scaled, spec.SCALED_CODES),
            (spec.codebook, spec.CODEBOOK_CODES),
        )
        if name in kinds
    )
    refuses(Averages(mu_dtype=fmt), f"mu_dtype={name} has no sign, and mu has one. Use it for a second")


class OtherShape(Averages):
    def update(self, g, p, n, moments):
        return super().update(g, p, n, moments)[0]


class OtherDtype(Averages):
    def update(self, g, p, n, moments):
        return super().update(g, p, n, moments).astype(np.float64)


class Twice(Averages):
    def update(self, g, p, n, moments):
        return moments.mu.round(super().update(g, p, n, moments))


class Never(Averages):
    def update(self, g, p, n, moments):
        return g


class OtherMoment(Averages):
    def update(self, g, p, n, moments):
        return moments.nu.round(g)


class OtherMomentShape(Averages):
    def update(self, g, p, n, moments):
        return moments.mu.round(g.sum(1))


@dataclasses.dataclass(frozen=True)
class NoDtype(Rule):
    b1: float = 0.9
    mu: Moment = moment("b1")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (OtherShape(), r"OtherShape.update: returned float32\(6,\). Return float32\(4, 6\)"),
        (OtherDtype(), r"OtherDtype.update: returned float64\(4, 6\). Return float32\(4, 6\)"),
        (Twice(), "Twice.mu was rounded before in this step. Round it once"),
        (Never(), "Never.mu: was not rounded in this step. Call `round` once"),
        (OtherMoment(), "OtherMoment: moment nu is not declared. Add the field `nu: Moment"),
        (OtherMomentShape(), r"OtherMomentShape.mu became float32\(4,\) and is float32\(4, 6\)"),
        (NoDtype(), "NoDtype: moment mu reads mu_dtype, mu_rounding, which is no field"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Rule) else "",
)
def test_a_bad_rule_is_named_with_its_way_out(rule, message):
    refuses(rule, message)
