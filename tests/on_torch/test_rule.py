"""Rules that a user writes: elementwise, on whole parameters, with state of another shape; and bad ones."""

import copy

import numpy as np
import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.links.link import Link
from on_torch.steps import assert_same_snapshots, give_gradients, parameters, snapshot, step_by_ones

SHAPES = {"a.weight": (24, 40), "a.bias": (7,), "b.weight": (130, 64)}


class ScaleByMyLion(hs.Rule):
    """Lion, as a user writes it."""

    b1: float = hs.decay_rate(0.9, torch="betas[0]")
    b2: float = hs.decay_rate(0.99, torch="betas[1]")
    mu_dtype: object = None
    mu_rounding: str = "auto"
    seed: int = 0
    mu = hs.moment(rate="b2", torch="exp_avg")

    def update(self, g, p, n, m, op):
        u = op.sign(op.ema(m.mu.value, g, n.b1))
        m.mu.round(op.ema(m.mu.value, g, n.b2))
        return u


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

    def numbers(self, h, t, op):
        return {"warm": min(t, 10) / 10}

    def update(self, g, p, n, m, op):
        f = m.fast_avg.round(op.ema(m.fast_avg.value, g, n.fast))
        s = m.slow_avg.round(op.ema(m.slow_avg.value, g, n.slow))
        return n.warm * (f + n.boost * (f - s))


def outer(row, column):
    return row[..., :, None] * column[..., None, :] / row.mean(-1, keepdim=True)[..., None]


def newton_schulz(x):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(5):
        y = x @ x.T
        x = a * x + (b * y + c * y @ y) @ x
    return x


class Orthogonalize(Link):
    """Muon's update of matrices; others keep theirs."""

    scope = "parameter"
    decay: float = hs.number(0.95, torch="momentum")
    trace_dtype: object = None
    trace = hs.moment(torch="momentum_buffer")

    def is_noop(self, h, info):
        return len(info.shape) != 2

    def update(self, g, p, n, m, op):
        t = m.trace.round(g + n.decay * m.trace.value)
        wide = t.shape[0] <= t.shape[1]
        return op.apply(lambda t: newton_schulz(t if wide else t.T).reshape_as(t), t)


class Factored(Link):
    """Adafactor's second moment: a row and a column in place of a matrix."""

    scope = "parameter"
    b2: float = hs.decay_rate(0.9)
    nu_dtype: object = None
    seed: int = 0
    row = hs.moment(rate="b2", signed=False, dtype="nu_dtype", shape=lambda shape: shape[:-1])
    column = hs.moment(
        rate="b2", signed=False, dtype="nu_dtype", shape=lambda shape: (*shape[:-2], *shape[-1:])
    )

    def is_noop(self, h, info):
        return len(info.shape) < 2

    def update(self, g, p, n, m, op):
        square = g * g + 1e-30
        row = m.row.round(op.ema(m.row.value, op.apply(lambda x: x.mean(-1), square), n.b2))
        column = m.column.round(op.ema(m.column.value, op.apply(lambda x: x.mean(-2), square), n.b2))
        return g / op.sqrt(op.apply(outer, row, column))


def run(rule, steps=3, **options):
    named = parameters(shapes=SHAPES)
    links = hs.add_decayed_weights(0.1), hs.scale_by_learning_rate(1e-2), hs.round_stochastically(3)
    optimizer = hs.Optimizer(named, hs.chain(rule, *links), **options)
    for step in range(steps):
        give_gradients(named, step)
        optimizer.step()
    return named, optimizer


FP8 = hs.scaled("float8_e4m3fn", 16, 0, 0)


RULES = {
    "lion": ScaleByMyLion(seed=5),
    "lion in 8 bits": ScaleByMyLion(mu_dtype=FP8, mu_rounding="stochastic"),
    "two averages": TwoAverages(slow_avg_dtype="bfloat16"),
    "two averages, a table": TwoAverages(slow_avg_dtype=hs.codebook("dynamic8", 16, 0, 0)),
    "muon": Orthogonalize(trace_dtype="bfloat16"),
    "muon in 8 bits": Orthogonalize(trace_dtype=FP8),
    "adafactor": Factored(),
    "adafactor in 8 bits": Factored(nu_dtype=hs.scaled("ufloat8_e5m3", 8, 0, 1)),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_users_rule_steps_and_resumes_to_the_bit(rule):
    _, straight = run(rule, steps=5)
    named, first = run(rule, steps=2)
    again = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in named]
    second = hs.Optimizer(again, first._choices[0].chain)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(2, 5):
        give_gradients(again, step)
        second.step()
    assert_same_snapshots(snapshot(straight), snapshot(second))
    start = dict(parameters(shapes=SHAPES))
    assert all((p != start[name]).float().mean() > 0.5 for name, p in again)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two averages", "muon in 8 bits"])
def test_a_users_rule_has_the_same_bits_compiled(name):
    eager, compiled = (run(RULES[name], compile=compile)[1] for compile in (False, True))
    assert_same_snapshots(snapshot(eager), snapshot(compiled))


def test_a_whole_parameter_rule_sees_the_float32_weights_that_the_last_rule_keeps():
    seen = []

    class Look(hs.Rule):
        scope = "parameter"

        def update(self, g, p, n, m, op):
            op.apply(lambda p: seen.append(p.clone()) or p, p)
            return g

    p = torch.nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))
    tx = hs.split_params(hs.chain(Look(), hs.scale_by_learning_rate(2.0**-12)))
    optimizer = hs.Optimizer([("w", p)], tx)
    seen.clear()
    for _ in range(2):
        step_by_ones(optimizer)
    assert [(x.shape, x.unique().tolist()) for x in seen] == [(p.shape, [1.0]), (p.shape, [1 - 2.0**-12])]


def test_entries_of_a_users_rule_are_those_of_the_group():
    p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    tx = hs.chain(TwoAverages(fast=0.0, slow=0.0), hs.scale_by_learning_rate(1.0))
    optimizer = hs.Optimizer([{"params": [p]}, {"params": [q], "boost": 5.0, "fast": 0.5}], tx)
    assert sorted(optimizer.defaults) == ["boost", "fast", "lr", "maximize", "slow", "slow_avg_dtype"]
    step_by_ones(optimizer)
    # f = s = 1, in the first step scaled by 1/10; of the second group f = 1/2.
    torch.testing.assert_close(p.detach(), torch.full((2,), -0.1), rtol=1e-6, atol=0)
    torch.testing.assert_close(q.detach(), torch.full((2,), 0.2), rtol=1e-6, atol=0)


class Quotients(hs.Rule):
    """Quotients by and of a number, and of a constant that is a power of two."""

    c: float = hs.number(0.3)

    def update(self, g, p, n, m, op):
        return n.c / g + g / n.c + 2.0 / g + g / 2


def test_quotients_of_a_number_are_rounded_once():
    # Eager torch computes 0.3 / x as 0.3 (1 / x): 5,268 of 20,000 numbers are other ones.
    p, g = (
        torch.nn.Parameter(torch.zeros(5000)),
        torch.randn(5000, generator=torch.Generator().manual_seed(0)),
    )
    p.grad = g.clone()
    hs.Optimizer([p], hs.chain(Quotients()), compile=False).step()
    x, c = g.numpy(), np.float32(0.3)
    np.testing.assert_array_equal(p.detach().numpy(), c / x + x / c + np.float32(2) / x + x / np.float32(2))
