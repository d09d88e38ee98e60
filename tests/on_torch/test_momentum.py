"""SGD: a momentum that comes later, and schedulers that cycle it."""

import pytest
import torch
from torch.optim import lr_scheduler

import halfstep_torch as hs
from on_torch.steps import step_by_ones

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
