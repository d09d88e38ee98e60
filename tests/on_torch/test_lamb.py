"""LAMB: steps in stages and in pieces, chains that see whole parameters, groups. Contract: L."""

import pytest
import torch

import halfstep_torch as hs
from halfstep_spec import PARAM_STORAGES
from halfstep_torch.engine.plan import make_plan
from on_torch.steps import (
    UNIT,
    reals,
    step_in_pieces,
)

LR = 1e-2
SHAPES = ((40, 50), (7,), (), (0,), (300, 128), (3, 4, 5))


def model(dtype=torch.bfloat16):
    return [
        (f"layer.{i}", torch.nn.Parameter((reals(s, 0.05, i) if i else reals(s, 0.05)).to(dtype)))
        for i, s in enumerate(SHAPES)
    ]


def train(optimizer, params, steps: int, first: int = 0, piece: int | None = None) -> None:
    for step in range(first, first + steps):
        for i, (_, p) in enumerate(params):
            p.grad = reals(p.shape, 0.1, 100 * step + i).to(p.dtype)
        step_in_pieces(optimizer, piece) if piece else optimizer.step()


def run(make, dtype=torch.bfloat16, steps=3, piece=None, **options):
    params = model(dtype)
    optimizer = make(params, lr=LR, **{"weight_decay": 0.1, "compile": False, **options})
    train(optimizer, params, steps, piece=piece)
    return optimizer


def float32_of(optimizer):
    return [x.double() for x in hs.float32_params(optimizer).values()]


STORAGES = tuple(PARAM_STORAGES)


@pytest.mark.parametrize("storage", STORAGES)
def test_steps_in_pieces_are_those_of_a_whole(storage):
    whole = run(hs.Lamb16, param_storage=storage, trust_power=0.382)
    pieces = run(hs.Lamb16, param_storage=storage, trust_power=0.382, piece=1000)
    for a, b in zip(float32_of(whole), float32_of(pieces), strict=True):
        # The order of a sum may decide a rounding. A weight then moves by one more unit of its storage. The
        # order also changes the length of a step by roundings.
        unit = {"split8": 2.0**-15, "split16": 2.0**-22, "master": 2.0**-22}.get(storage, 2.0**-7)
        assert ((a - b).abs() <= 3 * (unit * a.abs() + 8 * UNIT * LR * torch.linalg.vector_norm(a))).all()
        if storage in ("stochastic", "nearest") and a.numel():
            assert (a == b).double().mean() > 0.99
    for key in ("exp_avg", "exp_avg_sq"):
        for s, t in zip(whole.state.values(), pieces.state.values(), strict=True):
            assert torch.equal(s[key], t[key])


class Normalize(hs.Rule):
    """A rule of another kind that sees the whole parameter: the update gets length 1."""

    scope = "parameter"

    def update(self, g, p, n, m, op):
        return g / op.norm(g)


@pytest.mark.parametrize("piece", [None, 1])
@pytest.mark.parametrize(("maximize", "last"), [(False, 9.0), (True, -1.0)])
def test_a_chain_may_see_whole_parameters_twice_first_and_last(maximize, last, piece):
    p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = hs.Optimizer([p], hs.chain(Normalize(), hs.scale_by_trust_ratio()), maximize=maximize)
    p.grad = torch.tensor([0.0, 7.0])
    step_in_pieces(optimizer, piece) if piece else optimizer.step()
    assert p.tolist() == [3.0, last]


def test_an_elementwise_chain_is_one_stage():
    plans = [plan for _, _, plan in run(hs.AdamW, steps=0).plans()]
    assert all(len(plan.stages) == 1 for plan in plans)
    scopes = ["elementwise", "parameter", "elementwise"]
    for _, _, plan in run(hs.Lamb, steps=0).plans():
        assert [stage.scope for stage in plan.stages] == scopes
    assert make_plan([], [], torch.float32, False).stages[0].applies


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ratio_of_the_gradient_leaves_the_gradient_alone(dtype, maximize):
    p = torch.nn.Parameter(torch.full((3,), 2.0, dtype=dtype))
    tx = hs.chain(hs.scale_by_trust_ratio(), hs.scale_by_learning_rate(1.0))
    optimizer = hs.Optimizer([p], tx, maximize=maximize)
    p.grad = torch.full((3,), 0.25, dtype=dtype)
    optimizer.step()
    assert (p.grad == 0.25).all()
    # The ratio is 8, in exact arithmetic: the norms differ by a power of two.
    assert p.tolist() == [4.0 if maximize else 0.0] * 3


def test_weights_of_any_layout_take_the_same_step():
    plain, columns = (torch.nn.Parameter(reals((30, 20)).to(torch.bfloat16)) for _ in range(2))
    columns.data = columns.data.t().contiguous().t()
    for p in (plain, columns):
        optimizer = hs.Lamb([("w", p)], lr=LR, compile=False)
        p.grad = reals((30, 20), 1.0, 5).to(torch.bfloat16)
        optimizer.step()
    assert not columns.is_contiguous()
    assert torch.equal(plain, columns)


def test_groups_have_their_own_power_and_none_is_lamb():
    params = model()
    groups = [{"params": params[:1], "trust_power": 0.5}, {"params": params[1:]}]
    optimizer = hs.Lamb16(groups, lr=LR, weight_decay=0.1, compile=False)
    train(optimizer, params, 2)
    plain, half = run(hs.Lamb16, steps=2), run(hs.Lamb16, steps=2, trust_power=0.5)
    for i, (_, p) in enumerate(params):
        assert torch.equal(p, (plain if i else half).param_groups[0]["params"][i])


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["stochastic", "split16", "master"])
def test_compiled_steps_are_the_eager_ones(storage, monkeypatch):
    # The norms are computed by the same code; so there is not one bit between them where pieces agree.
    eager = run(hs.Lamb16, param_storage=storage, trust_power=0.382)
    compiled = run(hs.Lamb16, param_storage=storage, trust_power=0.382, compile=True)
    for name, a, b in zip([n for n, _ in model()], float32_of(eager), float32_of(compiled), strict=True):
        assert (a == b).double().mean() > 0.99 or not a.numel(), name
        assert ((a - b).abs() <= 2.0**-6 * a.abs()).all()
    for s, t in zip(eager.state.values(), compiled.state.values(), strict=True):
        assert torch.equal(s["exp_avg"], t["exp_avg"])
        assert torch.equal(s["exp_avg_sq"], t["exp_avg_sq"])
