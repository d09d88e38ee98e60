"""What users of torch.optim expect of an optimizer, and what they get here besides."""

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import halfstep_torch as hs
from on_torch.demands import parameters
from on_torch.steps import give_gradients


def test_step_zero_grad_drops_the_gradients_after_use():
    params = parameters()
    optimizer = hs.AdamW(params)
    give_gradients(params, 0)
    assert optimizer.step(zero_grad=True) is None
    assert all(p.grad is None for _, p in params)
    assert all(optimizer.state[p]["step"] == 1 for _, p in params)


def test_counts_stop_at_the_last_step_and_others_go_on():
    last = 2**31 - 1
    params = [(name, torch.nn.Parameter(torch.ones(2))) for name in "abc"]
    for _, p in params:
        p.grad = torch.ones(2)
    optimizer = hs.AdamW(params, compile=False)
    optimizer.step()
    counts = [optimizer.state[p]["step"] for _, p in params]
    for count, start in zip(counts, (7, last - 1, last), strict=True):
        count.fill_(start)
    optimizer.step()
    assert [int(count) for count in counts] == [8, last, last]


def test_a_step_leaves_the_global_generators_alone():
    params = parameters()
    optimizer = hs.AdamW(params)
    give_gradients(params, 0)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    optimizer.step()
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_a_dry_run_without_memory_makes_state_and_counts():
    with FakeTensorMode():
        model = torch.nn.Linear(80, 80, dtype=torch.bfloat16)
        optimizer = hs.AdamW(model.named_parameters(), **hs.recipes.eight_bit)
        for _ in range(3):
            model(torch.ones(2, 80, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        state = optimizer.state[model.weight]
        assert (int(state["step"]), state["exp_avg_sq"].shape) == (3, (80, 80))
