"""What users of torch.optim expect of an optimizer, and what they get here besides."""

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import halfstep_torch as hs
from on_torch.steps import assert_same_snapshots, inputs, mlp, snapshot, train


def test_training_lowers_the_loss():
    model = mlp()
    optimizer = hs.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.0)
    first = model(inputs(0)).square().mean().item()
    train(model, optimizer, range(60))
    assert model(inputs(0)).square().mean().item() < first / 4


def test_updates_far_below_the_spacing_arrive_on_average():
    # 2^-7 is the spacing above 1, a step is 1e-4: to nearest no weight ever moves.
    moved = {}
    for storage in ("nearest", "stochastic"):
        p = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
        optimizer = hs.AdamW([p], lr=1e-4, weight_decay=0.0, param_storage=storage)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[storage] = 1 - p.detach().double().mean().item()
    assert moved["nearest"] == 0
    # Below 1 the spacing is 2^-8: 10,000 weights, each a walk of variance at most 0.01 * 2^-8: five sigmas.
    assert abs(moved["stochastic"] - 0.01) < 5 * (0.01 * 2**-8 / 10_000) ** 0.5 + 1e-4


def test_maximize_is_the_step_of_minus_the_gradient():
    p, q = (torch.nn.Parameter(torch.ones(40, dtype=torch.bfloat16)) for _ in range(2))
    up, down = hs.Adam([("w", p)], weight_decay=0.1, maximize=True), hs.Adam([("w", q)], weight_decay=0.1)
    for _ in range(3):
        p.grad, q.grad = torch.full_like(p, 0.3), torch.full_like(q, -0.3)
        up.step()
        down.step()
    assert_same_snapshots(snapshot(up), snapshot(down))


def named(shapes=((5, 4), (300,), (7, 3, 2))):
    generator = torch.Generator().manual_seed(1)
    return [
        (f"layer.{i}.w", torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()))
        for i, shape in enumerate(shapes)
    ]


def test_a_closure_runs_with_gradients_and_its_value_comes_back():
    model = mlp()
    optimizer = hs.AdamW(model.named_parameters(), lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = model(inputs(0)).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0]


def test_step_zero_grad_drops_the_gradients_after_use():
    model = mlp()
    optimizer = hs.AdamW(model.named_parameters())
    model(inputs(0)).sum().backward()
    assert optimizer.step(zero_grad=True) is None
    assert all(p.grad is None for p in model.parameters())
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())


def test_gradients_are_not_written_to():
    params = named()
    optimizer = hs.Adam(params, weight_decay=0.1, maximize=True)
    for _, p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for _, p in params)


def test_hooks_around_a_step_run():
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer, seen = hs.AdamW([p]), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["before", "after"]


def test_a_step_without_any_gradient_does_nothing():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = hs.AdamW([p])
    optimizer.step()
    assert not optimizer.state
    assert torch.equal(p.detach(), torch.ones(2))


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


def test_mixed_dtypes_step_together():
    params = [
        torch.nn.Parameter(torch.ones(5, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float16)
    ]
    optimizer = hs.AdamW(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    dtypes = [optimizer.state[p]["exp_avg"].dtype for p in params]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32]
    assert all((p < 0.95).all() for p in params)


def test_a_gradient_that_is_not_finite_touches_its_element_alone():
    p, q = (torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16)) for _ in range(2))
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    p.grad[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    for x in (p, q):
        hs.AdamW([("w", x)], lr=0.1).step()
    assert p[:3].isnan().all()
    assert torch.equal(p[3:], q[3:])


def test_grad_scaler_steps_and_skips():
    model = mlp(torch.float32)
    optimizer = hs.AdamW(model.named_parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(inputs(0, torch.float32)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())
    next(model.parameters()).grad.fill_(float("inf"))
    scaler.step(optimizer)
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())


def test_clipping_gradients_by_torch_works():
    model = mlp()
    optimizer = hs.AdamW(model.named_parameters())
    model(inputs(0)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def test_a_step_leaves_the_global_generators_alone():
    model = mlp()
    optimizer = hs.AdamW(model.named_parameters())
    model(inputs(0)).sum().backward()
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
