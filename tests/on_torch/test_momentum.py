"""Lion and SGD: their state, groups and schedulers, and the chain that each of them is."""

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import halfstep_torch as hs
from on_torch.steps import parameters, run, step_by_ones

MAKES = {
    "Lion": lambda params, **o: hs.Lion(params, lr=1e-2, weight_decay=0.1, mu_rounding="stochastic", **o),
    "SGD": lambda params, **o: hs.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True, **o),
    "SGD without momentum": lambda params, **o: hs.SGD(params, lr=1e-2, **o),
}


def steps(optimizer, p, count=20):
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def test_the_state_has_torchs_names():
    for make, key in (("Lion", "exp_avg"), ("SGD", "momentum_buffer")):
        params = parameters()
        optimizer = MAKES[make](params)
        run(params, optimizer, range(1))
        state = optimizer.state[params[0][1]]
        assert {name: x.dtype for name, x in state.items()} == {"step": torch.int64, key: torch.bfloat16}
    params = parameters()
    plain = MAKES["SGD without momentum"](params)
    run(params, plain, range(1))
    assert set(plain.state[params[0][1]]) == {"step"}


def test_scaled_momentum_has_scales_beside_it():
    p = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    optimizer = hs.SGD([p], momentum=0.9, accumulator_dtype=hs.scaled("float8_e4m3fn", 4, 0, 0))
    steps(optimizer, p, 2)
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.float8_e4m3fn
    assert optimizer.state[p]["momentum_buffer_scale"].shape == (4, 2)


def test_a_group_may_have_a_momentum_of_its_own():
    a, b = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizer = hs.SGD([{"params": [a]}, {"params": [b], "momentum": 0.5}], lr=0.5)
    step_by_ones(optimizer)
    optimizer.step()
    assert a[0] == 0.0
    assert b[0] == -0.25
    assert "momentum_buffer" not in optimizer.state[a]


def test_a_momentum_that_comes_later_starts_from_zero():
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = hs.SGD([p], lr=0.5)
    step_by_ones(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.5
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"][0] == 1
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"][0] == 1.5


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR"])
def test_schedulers_that_cycle_momentum_drive_it_as_torchs_own(name):
    make = {
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=7),
    }[name]
    rates = []
    for sgd in (hs.SGD, torch.optim.SGD):
        p = torch.nn.Parameter(torch.ones(20))
        optimizer = sgd([p], lr=1e-2, momentum=0.9)
        scheduler, seen = make(optimizer), []
        for _ in range(6):
            steps(optimizer, p, 1)
            group = optimizer.param_groups[0]
            seen.append((float(group["lr"]), float(group["momentum"])))
            scheduler.step()
        rates.append(seen)
    assert rates[0] == rates[1]
    assert len({momentum for _, momentum in rates[0]}) > 2


def test_a_chain_and_the_class_are_one():
    results = []
    for make in (
        lambda p: hs.SGD([("w", p)], lr=0.1, momentum=0.9, nesterov=True, seed=5),
        lambda p: hs.Optimizer(
            [("w", p)],
            hs.chain(
                hs.trace(0.9, True, seed=5), hs.scale_by_learning_rate(0.1), hs.round_stochastically(seed=5)
            ),
        ),
    ):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 50).to(torch.bfloat16))
        steps(make(p), p, 5)
        results.append(p.detach().float().numpy())
    np.testing.assert_array_equal(*results)
