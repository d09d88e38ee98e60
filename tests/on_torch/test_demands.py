"""What PyTorch asks of the steps of an optimizer, its own tests of them as a model: of all of ours."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler

from on_torch.demands import parameters
from on_torch.steps import assert_same_snapshots, give_gradients, run, snapshot


def test_a_step_goes_downhill(make):
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randn(8, 1)
    weight, bias = torch.nn.Parameter(torch.randn(6, 1)), torch.nn.Parameter(torch.randn(1))
    optimizer = make([weight, bias], lr=1e-2)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.99)

    def closure():
        optimizer.zero_grad()
        loss = (x @ weight + bias - y).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(20):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses[-1] < losses[0]


def test_to_maximize_is_to_minimize_the_opposite(make):
    runs = []
    for maximize in (False, True):
        params = parameters()
        optimizer = make(params, lr=1e-2, maximize=maximize)
        for seed in range(3):
            give_gradients(params, seed)
            for _, p in params:
                p.grad = -p.grad if maximize else p.grad
            optimizer.step()
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


def test_parameters_of_all_dtypes_step_together_as_they_do_alone(make):
    def of(dtypes):
        params = [(f"{name}.{dtype}", p) for dtype in dtypes for name, p in parameters(getattr(torch, dtype))]
        optimizer = make(params, lr=1e-2, weight_decay=0.1)
        for step in range(2):
            for i in range(0, len(params), 4):
                give_gradients(params[i : i + 4], step)
            optimizer.step()
        return snapshot(optimizer)

    dtypes = ["float32", "bfloat16", "float16"]
    assert_same_snapshots(of(dtypes), [x for dtype in dtypes for x in of([dtype])])


def test_nothing_happens_without_gradients(make):
    params = parameters()
    optimizer = make(params, lr=1e-2, weight_decay=0.1)
    before = [p.detach().clone() for _, p in params]
    optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(p, old) for (_, p), old in zip(params, before, strict=True))


def test_gradients_of_zero_move_nothing(make):
    params = parameters()
    optimizer = make(params, lr=1e-2, weight_decay=0.0)
    before = [p.detach().clone() for _, p in params]
    for _ in range(2):
        for _, p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert all(torch.equal(p, old) for (_, p), old in zip(params, before, strict=True))


def test_a_parameter_without_gradient_is_left_alone(make):
    params = parameters()
    optimizer = make(params, lr=1e-2, weight_decay=0.1)
    run(params, optimizer, range(2))
    give_gradients(params, 2)
    frozen = params[0][1]
    frozen.grad = None
    before, state = frozen.detach().clone(), copy.deepcopy(optimizer.state[frozen])
    optimizer.step()
    assert torch.equal(frozen, before)
    assert all(torch.equal(x, optimizer.state[frozen][key]) for key, x in state.items())
    assert int(optimizer.state[params[1][1]]["step"]) == 3


def test_a_group_has_its_own_learning_rate(make):
    params = parameters()
    optimizer = make([{"params": params[:1], "lr": 0.0}, {"params": params[1:]}], lr=1e-1)
    still, moves = (p.detach().clone() for _, p in params[:2])
    run(params, optimizer, range(2))
    assert torch.equal(params[0][1], still)
    assert not torch.equal(params[1][1], moves)


def test_a_group_has_its_own_decay(make):
    params = parameters(torch.float32)
    optimizer = make(
        [{"params": params[:1], "weight_decay": 0.5}, {"params": params[1:]}], lr=1e-1, weight_decay=0.0
    )
    before = [p.detach().clone() for _, p in params]
    for _, p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert (params[0][1].abs() < before[0].abs()).all()
    assert all(torch.equal(p, old) for (_, p), old in zip(params[1:], before[1:], strict=True))


@pytest.mark.parametrize(
    "rate",
    [
        torch.tensor(0.125),
        torch.tensor([0.125]),
        torch.tensor([[0.125]]),
        torch.tensor(0.125, dtype=torch.float64),
    ],
    ids=["()", "(1,)", "(1, 1)", "float64"],
)
def test_a_learning_rate_in_a_tensor_is_that_number(make, rate):
    runs = []
    for lr in (0.125, rate.clone()):
        params = parameters()
        optimizer = make(params, lr=lr)
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
        for seed in range(3):
            run(params, optimizer, [seed])
            scheduler.step()
        runs.append([p.detach() for _, p in params])
        given = lr
    assert all(torch.equal(p, q) for p, q in zip(*runs, strict=True))
    assert optimizer.param_groups[0]["lr"] is given  # a compiled program may hold it
    assert given == 0.125 / 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_no_bit(make, dtype):
    runs = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            params = parameters(torch.float32)  # which show every bit
            optimizer = make(params, lr=1e-2, weight_decay=0.1)
            run(params, optimizer, range(3))
        finally:
            torch.set_default_dtype(torch.float32)
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


def test_deterministic_mode_changes_no_bit(make):
    """It fills memory that is asked for with NaN: nothing is read that was not written."""
    runs = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            params = parameters()
            optimizer = make(params, lr=1e-2, weight_decay=0.1)
            run(params, optimizer, range(3))
        finally:
            torch.use_deterministic_algorithms(False)
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


def test_weights_stay_leaves_that_want_gradients(make):
    params = parameters()
    run(params, make(params, lr=1e-2), range(2))
    assert all(p.is_leaf and p.requires_grad and p.grad_fn is None for _, p in params)


def test_zero_grad_drops_gradients_or_fills_them_with_zeros(make):
    params = parameters()
    optimizer = make(params)
    give_gradients(params, 0)
    grads = [p.grad for _, p in params]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is g and not g.any() for (_, p), g in zip(params, grads, strict=True))
    optimizer.zero_grad()
    assert all(p.grad is None for _, p in params)


def test_a_closure_runs_once_with_gradients_and_its_value_is_returned(make):
    params, called = parameters(), []
    optimizer = make(params, lr=1e-2)

    def closure():
        assert torch.is_grad_enabled()
        called.append(1)
        loss = sum(p.float().square().sum() for _, p in params)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert called == [1]
    assert loss.requires_grad
    assert int(optimizer.state[params[0][1]]["step"]) == 1
