"""Rules that a user writes: elementwise, on whole parameters, with state of another shape; and bad ones."""

import copy
import dataclasses
from typing import ClassVar

import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import assert_same_snapshots, snapshot

SHAPES = {"a.weight": (24, 40), "a.bias": (7,), "b.weight": (130, 64)}


@dataclasses.dataclass(frozen=True)
class ScaleByMyLion(hs.Rule):
    """Lion, as a user writes it."""

    b1: float = hs.decay_rate(0.9, "betas[0]")
    b2: float = hs.decay_rate(0.99, "betas[1]")
    mu_dtype: object = None
    mu_rounding: str = "auto"
    seed: int = 0
    exp_avg = hs.moment("mu", rate="b2")

    def update(self, g, p, n, moments):
        mu = moments.exp_avg
        u = torch.sign(hs.ema(mu.value, g, n.b1))
        mu.round(hs.ema(mu.value, g, n.b2))
        return u


@dataclasses.dataclass(frozen=True)
class TwoAverages(hs.Rule):
    """The difference of a fast and a slow average: a moment that no rule of ours has."""

    fast: float = hs.decay_rate(0.9)
    slow: float = hs.decay_rate(0.99)
    boost: float = hs.number(2.0)
    slow_avg_dtype: object = None
    slow_avg_rounding: str = "stochastic"
    seed: int = 0
    fast_avg = hs.moment(rate="fast")
    slow_avg = hs.moment(rate="slow")

    def numbers(self, h, step):
        return {"warm": min(step, 10) / 10}

    def update(self, g, p, n, moments):
        f = moments.fast_avg.round(hs.ema(moments.fast_avg.value, g, n.fast))
        s = moments.slow_avg.round(hs.ema(moments.slow_avg.value, g, n.slow))
        return n.warm * (f + (n.boost * (f - s)))


def newton_schulz(x):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(5):
        y = x @ x.T
        x = a * x + (b * y + c * y @ y) @ x
    return x


@dataclasses.dataclass(frozen=True)
class Orthogonalize(hs.Rule):
    """Muon's update of matrices; others keep theirs."""

    scope: ClassVar[str] = "parameter"
    decay: float = hs.number(0.95, "momentum")
    trace_dtype: object = None
    momentum_buffer = hs.moment("trace")

    def acts(self, h, info):
        return len(info.shape) == 2

    def update(self, g, p, n, moments):
        t = moments.momentum_buffer.round(g + (n.decay * moments.momentum_buffer.value))
        return newton_schulz(t if t.shape[0] <= t.shape[1] else t.T).reshape_as(t)


@dataclasses.dataclass(frozen=True)
class Factored(hs.Rule):
    """Adafactor's second moment: a row and a column in place of a matrix."""

    scope: ClassVar[str] = "parameter"
    b2: float = hs.decay_rate(0.9)
    nu_dtype: object = None
    seed: int = 0
    row = hs.moment(rate="b2", signed=False, dtype="nu_dtype", shape=lambda shape: shape[:-1])
    column = hs.moment(
        rate="b2", signed=False, dtype="nu_dtype", shape=lambda shape: (*shape[:-2], *shape[-1:])
    )

    def acts(self, h, info):
        return len(info.shape) >= 2

    def update(self, g, p, n, moments):
        square = g * g + 1e-30
        row = moments.row.round(hs.ema(moments.row.value, square.mean(-1), n.b2))
        column = moments.column.round(hs.ema(moments.column.value, square.mean(-2), n.b2))
        scale = row.mean(-1, keepdim=True)[..., None]
        return g / torch.sqrt(row[..., :, None] * column[..., None, :] / scale)


def model(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    return [
        (name, torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for name, shape in SHAPES.items()
    ]


def give_gradients(named, step):
    generator = torch.Generator().manual_seed(100 + step)
    for _, p in named:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def build(rule, *, last=None, **options):
    named = model()
    last = hs.round_stochastically(3) if last is None else last
    tx = hs.chain(rule, hs.add_decayed_weights(0.1), hs.scale_by_learning_rate(1e-2), last)
    return named, hs.Optimizer(named, tx, **options)


def run(rule, steps=3, **options):
    named, optimizer = build(rule, **options)
    for step in range(steps):
        give_gradients(named, step)
        optimizer.step()
    return named, optimizer


FP8 = hs.scaled("float8_e4m3fn", 16, 0, 0)
RULES = {
    "lion": ScaleByMyLion(seed=5),
    "lion in 8 bits": ScaleByMyLion(mu_dtype=FP8, mu_rounding="stochastic"),
    "two averages": TwoAverages(slow_avg_dtype="bfloat16"),
    "two averages, 4 bits": TwoAverages(slow_avg_dtype=hs.codebook("dynamic4", 16, 0, 0)),
    "muon": Orthogonalize(trace_dtype="bfloat16"),
    "muon in 8 bits": Orthogonalize(trace_dtype=FP8),
    "adafactor": Factored(),
    "adafactor in 8 bits": Factored(nu_dtype=hs.scaled("ufloat8_e5m3", 8, 0, 1)),
    "adafactor in 4 bits": Factored(nu_dtype=hs.codebook("udynamic4", 8, 0, 1)),
}


def test_a_users_lion_has_the_bits_of_ours():
    ours = snapshot(run(hs.scale_by_lion(seed=5))[1])
    assert_same_snapshots(ours, snapshot(run(ScaleByMyLion(seed=5))[1]))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_users_rule_steps_and_resumes_to_the_bit(rule):
    _, straight = run(rule, steps=5)
    named, first = run(rule, steps=2)
    again = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in named]
    second = hs.Optimizer(again, first._chain)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(2, 5):
        give_gradients(again, step)
        second.step()
    assert_same_snapshots(snapshot(straight), snapshot(second))
    start = dict(model())
    assert all((p != start[name]).float().mean() > 0.5 for name, p in again)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two averages", "muon in 8 bits"])
def test_a_users_rule_has_the_same_bits_compiled(name):
    eager, compiled = (run(RULES[name], compile=compile)[1] for compile in (False, True))
    assert_same_snapshots(snapshot(eager), snapshot(compiled))


def test_state_of_a_factored_rule_has_its_own_shape_and_format():
    named, optimizer = run(RULES["adafactor in 8 bits"], steps=1)
    state = optimizer.state[dict(named)["b.weight"]]
    assert {key: tuple(x.shape) for key, x in state.items() if key != "step"} == {
        "row": (130,),
        "row_scale": (17,),
        "column": (64,),
        "column_scale": (8,),
    }
    assert state["row"].dtype == torch.uint8
    assert set(optimizer.state[dict(named)["a.bias"]]) == {"step"}


def test_an_orthogonal_update_of_a_matrix_has_singular_values_near_1():
    p = torch.nn.Parameter(torch.zeros(24, 40))
    optimizer = hs.Optimizer([p], hs.chain(Orthogonalize(), hs.scale_by_learning_rate(1.0)))
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    # Muon's coefficients bring singular values into (0.68, 1.13) by design, in five iterations.
    values = torch.linalg.svdvals(p.detach())
    assert 0.6 < values.min()
    assert values.max() < 1.2


def test_a_whole_parameter_rule_sees_the_float32_weights_that_the_last_rule_keeps():
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Look(hs.Rule):
        scope: ClassVar[str] = "parameter"

        def update(self, g, p, n, moments):
            seen.append(p.clone())
            return g

    p = torch.nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))
    tx = hs.split_params(hs.chain(Look(), hs.scale_by_learning_rate(2.0**-12)))
    optimizer = hs.Optimizer([("w", p)], tx)
    seen.clear()
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert [(x.shape, x.unique().tolist()) for x in seen] == [(p.shape, [1.0]), (p.shape, [1 - 2.0**-12])]


def test_moments_of_one_rule_are_rounded_by_words_of_their_own():
    rule = TwoAverages(fast=0.999, slow=0.999, seed=9, slow_avg_dtype="bfloat16")
    _, optimizer = run(rule, steps=1)
    rounded = [s for s in optimizer.state.values() if s["slow_avg"].numel() > 1000]
    assert rounded
    for state in rounded:
        assert not torch.equal(state["fast_avg"], state["slow_avg"])


def test_store_state_keeps_the_moments_of_a_users_rule():
    tx = hs.chain(hs.store_state(TwoAverages(slow_avg_dtype="float32"), "bfloat16"))
    p = torch.nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4)
    optimizer = hs.Optimizer([p], tx)
    optimizer.step()
    assert {key: x.dtype for key, x in optimizer.state[p].items() if key != "step"} == {
        "fast_avg": torch.bfloat16,
        "slow_avg": torch.bfloat16,
    }


def test_entries_of_a_users_rule_are_those_of_the_group():
    p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    tx = hs.chain(TwoAverages(fast=0.0, slow=0.0), hs.scale_by_learning_rate(1.0))
    optimizer = hs.Optimizer([{"params": [p]}, {"params": [q], "boost": 5.0, "fast": 0.5}], tx)
    assert sorted(optimizer.defaults) == ["boost", "fast", "lr", "maximize", "slow", "slow_avg_dtype"]
    for x in (p, q):
        x.grad = torch.ones(2)
    optimizer.step()
    # f = s = 1, in the first step scaled by 1/10; of the second group f = 1/2.
    torch.testing.assert_close(p.detach(), torch.full((2,), -0.1), rtol=1e-6, atol=0)
    torch.testing.assert_close(q.detach(), torch.full((2,), 0.2), rtol=1e-6, atol=0)


def rule_of(update=None, **attributes):
    """Return a rule of one average, with what the caller puts in its place."""
    members = {
        "__annotations__": {"b1": float},
        "b1": hs.decay_rate(0.9),
        "average": hs.moment(rate="b1"),
        "update": update or (lambda self, g, p, n, moments: moments.average.round(g)),
        **attributes,
    }
    return dataclasses.dataclass(frozen=True)(type("Mine", (hs.Rule,), members))()


def no_dataclass():
    class Mine(hs.Rule):
        def update(self, g, p, n, moments):
            return g

    return Mine()


BAD = {
    "no dataclass": (no_dataclass, TypeError, "Mine: not a dataclass. Decorate the class with"),
    "shape": (
        lambda: rule_of(lambda self, g, p, n, moments: moments.average.round(g).sum()),
        ValueError,
        "mine: what update returns is float32(); it is float32(6,) here. Keep shape and dtype.",
    ),
    "dtype": (
        lambda: rule_of(lambda self, g, p, n, moments: moments.average.round(g).to(torch.bfloat16)),
        ValueError,
        "mine: what update returns is bfloat16(6,); it is float32(6,) here. Keep shape and dtype.",
    ),
    "stored shape": (
        lambda: rule_of(lambda self, g, p, n, moments: moments.average.round(g[:2])),
        ValueError,
        "what is stored as average is float32(2,); it is float32(6,) here.",
    ),
    "never rounded": (
        lambda: rule_of(lambda self, g, p, n, moments: g),
        ValueError,
        "mine: update never rounds average, which so would stay zero. Call moments.average.round(...) once",
    ),
    "rounded twice": (
        lambda: rule_of(lambda self, g, p, n, moments: moments.average.round(moments.average.round(g))),
        ValueError,
        "mine: update rounds average twice in a step. Round it once.",
    ),
    "another moment": (
        lambda: rule_of(lambda self, g, p, n, moments: moments.other.round(g)),
        ValueError,
        "mine: update reads the moment 'other', which the rule does not declare. Declare it: other",
    ),
    "another number": (
        lambda: rule_of(lambda self, g, p, n, moments: moments.average.round(n.b2 * g)),
        ValueError,
        "'Numbers' object has no attribute 'b2'",
    ),
    "a number of self": (
        lambda: rule_of(lambda self, g, p, n, moments: moments.average.round(self.b1 * g)),
        ValueError,
        "Of its fields it knows the options; numbers are those of n, and state is in moments.",
    ),
    "neighbours": (
        lambda: rule_of(lambda self, g, p, n, moments: moments.average.round(g - g.mean())),
        ValueError,
        "mine: the update of an element depends on those beside it, and the rule is elementwise.",
    ),
    "scope": (lambda: rule_of(scope="layer"), ValueError, "Mine: scope='layer' is not a scope."),
    "rate": (
        lambda: rule_of(average=hs.moment(rate="b2")),
        ValueError,
        "Mine: the moment 'average' has rate='b2', which is no field of the rule. Declare b2, or",
    ),
    "rounding": (
        lambda: rule_of(average=hs.moment(rounding="seed")),
        ValueError,
        "Mine: the moment 'average' has rounding='seed', which is no field of the rule.",
    ),
    "one name": (
        lambda: rule_of(average=hs.moment("mu"), other=hs.moment("mu")),
        ValueError,
        "Mine: the moments 'average' and 'other' have one name in the state. Rename one.",
    ),
    "one key": (
        lambda: rule_of(average_scale=hs.moment()),
        ValueError,
        "Mine: the moments 'average' and 'average_scale' have one key in the state. Rename one.",
    ),
    "one entry": (
        lambda: rule_of(__annotations__={"b1": float, "b2": float}, b2=hs.decay_rate(0.9, "b1")),
        ValueError,
        "Mine: the fields 'b1' and 'b2' both own the group entry 'b1'. Give one of them another entry.",
    ),
    "shape of an elementwise rule": (
        lambda: rule_of(average=hs.moment(shape=lambda shape: shape[:1])),
        ValueError,
        "Mine: the moment 'average' has a shape of its own, and the rule is elementwise.",
    ),
    "no shape": (
        lambda: rule_of(average=hs.moment(shape=lambda shape: None), scope="parameter"),
        ValueError,
        "mine: the shape of average is None for a parameter of shape (2, 3). Return a tuple of sizes",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), BAD.values(), ids=BAD)
def test_a_bad_rule_is_refused_when_the_optimizer_is_built(make, error, message):
    p = torch.nn.Parameter(torch.ones(2, 3))
    with pytest.raises(error) as raised:
        hs.Optimizer([p], hs.chain(make(), hs.scale_by_learning_rate(0.1)))
    assert message in str(raised.value)


def test_two_rules_cannot_keep_one_array():
    with pytest.raises(ValueError, match="both own the state array 'exp_avg'"):
        hs.chain(hs.scale_by_adam(), rule_of(exp_avg=hs.moment("mine")))


def test_a_format_of_blocks_is_not_stored_in_another():
    inner = hs.scale_by_adam(mu_dtype=hs.scaled("float16", 4, 0, 0))
    with pytest.raises(ValueError, match="'mu' has block scales of its own"):
        hs.Optimizer([torch.nn.Parameter(torch.ones(4, 4))], hs.store_state(inner, FP8))
