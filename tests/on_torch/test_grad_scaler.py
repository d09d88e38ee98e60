"""fp16 training as torch.amp does it: gradients of a scaled loss, unscaled in float32 inside the step."""

import copy

import numpy as np
import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import assert_same_snapshots, snapshot

SCALE = 2.0**14


def model(dtype, scale=1.0):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    with torch.no_grad():
        for p in layers.parameters():
            p.copy_(p.half())
    return layers.to(dtype)


def loss_of(net, step, size):
    """Return a loss whose gradients are of about this size."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn((16, 6), generator=generator).to(next(net.parameters()).dtype)
    return net(x).float().square().mean() * size


def train(net, optimizer, scaler, steps, size):
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(net, step, size)).backward()
        scaler.step(optimizer)
        scaler.update()


def scaler(scale=SCALE, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def parameter(dtype=torch.float16):
    return torch.nn.Parameter(torch.linspace(0.5, 1, 40).half().to(dtype))


@pytest.mark.parametrize(
    ("make", "compile"),
    [(hs.AdamW, False), (hs.Lamb, False), pytest.param(hs.AdamW, True, marks=pytest.mark.slow)],
)
def test_scaled_gradients_give_the_bits_of_gradients_unscaled_in_float32(make, compile):
    scaled, plain = parameter(), parameter(torch.float32)
    ours = make([("w", scaled)], lr=2.0**-6, param_storage="master", compile=compile)
    theirs = make([("w", plain)], lr=2.0**-6, compile=False)
    ours.grad_scale, ours.found_inf = torch.tensor(SCALE), torch.tensor(0.0)
    for step in range(3):
        grad = torch.randn(40, generator=torch.Generator().manual_seed(step)) * 2.0**-20
        scaled.grad = (grad * SCALE).half()
        plain.grad = scaled.grad.float() / SCALE
        ours.step()
        theirs.step()
    assert torch.equal(hs.float32_params(ours)["w"], plain)
    assert all(torch.equal(x, ours.state[scaled][key]) for key, x in theirs.state[plain].items())


def test_a_model_whose_gradients_underflow_trains_as_float32_does():
    """Gradients of 2^-30 are zero in float16. Adam's step does not depend on their size."""
    size, runs = 2.0**-26, {}
    for name, dtype, scale in (
        ("float32", torch.float32, 1),
        ("fp16", torch.float16, 2.0**26),
        ("lost", torch.float16, 1),
    ):
        net = model(dtype)
        optimizer = hs.AdamW(
            net.named_parameters(), 1e-2, eps=1e-20, weight_decay=0.0, param_storage="master"
        )
        first = loss_of(net, 0, 1).item()
        train(net, optimizer, scaler(scale), range(30), size)
        runs[name] = loss_of(net, 0, 1).item() / first
    assert runs["lost"] == pytest.approx(1)
    assert runs["float32"] < 0.3
    # fp16's activations are off by 2^-11 each; the loss has fallen to a third of itself and less.
    assert runs["fp16"] == pytest.approx(runs["float32"], abs=0.03)


def test_a_step_with_an_infinity_is_skipped_whole():
    p, q = parameter(), parameter()
    optimizer, s = hs.AdamW([("p", p), ("q", q)], param_storage="master"), scaler()
    for grad in (torch.ones(40), torch.full((40,), torch.inf), torch.full((40,), torch.nan)):
        p.grad, q.grad = torch.ones(40).half(), grad.half()
        s.scale(torch.ones(()))
        before = snapshot(optimizer)
        s.step(optimizer)
        if not torch.isfinite(grad).all():
            assert_same_snapshots(before, snapshot(optimizer))
        s.update()
    assert s.get_scale() == SCALE / 4
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_a_first_step_that_is_skipped_makes_no_state():
    p = parameter()
    optimizer, s = hs.AdamW([("p", p)]), scaler()
    p.grad = torch.full((40,), torch.inf).half()
    s.scale(torch.ones(()))
    s.step(optimizer)
    assert not optimizer.state


def test_a_gradient_that_was_unscaled_and_clipped_is_used_as_it_is():
    p, q = parameter(torch.float32), parameter(torch.float32)
    ours, theirs = hs.SGD([("w", p)], lr=0.5), hs.SGD([("w", q)], lr=0.5)
    s = scaler()
    grad = torch.linspace(-3, 3, 40)
    p.grad, q.grad = grad * SCALE, grad.clone()
    s.scale(torch.ones(()))
    s.unscale_(ours)
    hs.clip_grad_norm_([p], 1.0)
    s.step(ours)
    hs.clip_grad_norm_([q], 1.0)
    theirs.step()
    assert torch.equal(p, q)


def test_a_link_that_clips_sees_gradients_without_their_scale():
    p, q = parameter(), parameter(torch.float32)
    tx = hs.keep_master_params(hs.chain(hs.clip_by_global_norm(1.0), hs.scale_by_learning_rate(0.5)))
    ours, theirs = hs.Optimizer([("w", p)], tx), hs.Optimizer([("w", q)], tx)
    q.grad = torch.linspace(-3, 3, 40).half().float()
    p.grad = (q.grad * 2.0**8).half()
    s = scaler(2.0**8)
    s.scale(torch.ones(()))
    s.step(ours)
    theirs.step()
    assert torch.equal(hs.float32_params(ours)["w"], q)


def test_a_link_that_clips_measures_gradients_that_float16_has_not():
    """1,600 gradients of 2^-25: float16 has no such number, and their norm is 40 of it."""
    p = torch.nn.Parameter(torch.zeros(1600).half())
    tx = hs.chain(hs.clip_by_global_norm(2.0**-25), hs.scale_by_learning_rate(2.0**25))
    optimizer, s = hs.Optimizer([("w", p)], hs.keep_master_params(tx)), scaler(2.0**10)
    s.scale(torch.ones(()))
    p.grad = torch.full((1600,), 2.0**-15).half()
    s.step(optimizer)
    assert torch.equal(hs.float32_params(optimizer)["w"], torch.full((1600,), -np.float32(1 / 40)))


@pytest.mark.parametrize("clip", [hs.clip_grad_norm_, torch.nn.utils.clip_grad_norm_])
def test_float16_gradients_that_are_clipped_as_they_are_scaled_are_what_the_step_uses(clip):
    p = parameter()
    optimizer = hs.SGD([("w", p)], lr=1.0, param_storage="master")
    s = scaler(2.0**8)
    s.scale(torch.ones(()))
    p.grad = torch.ones(40).half()
    with pytest.raises(ValueError, match="unscale FP16 gradients"):  # with every optimizer
        s.unscale_(optimizer)
    grad = torch.linspace(-3, 3, 40).half()
    p.grad = grad * 2.0**8
    s = scaler(2.0**8)
    s.scale(torch.ones(()))
    start = hs.float32_params(optimizer)["w"]
    clip([p], 1.0 * s.get_scale())
    s.step(optimizer)
    moved = start - hs.float32_params(optimizer)["w"]
    clipped = grad.float() / torch.linalg.vector_norm(grad.float())
    # The norm, the factor and the product are each rounded to float16 at worst, and the weight to float32.
    assert ((moved - clipped).abs() <= 2.0**-9 * clipped.abs() + 2.0**-23 * start.abs() + 1e-6).all()


def test_fp16_training_goes_on_to_the_bit_from_a_checkpoint():
    nets = [model(torch.float16) for _ in range(2)]
    optimizers = [hs.AdamW(net.named_parameters(), 1e-2, param_storage="master") for net in nets]
    scalers = [scaler() for _ in nets]
    train(nets[0], optimizers[0], scalers[0], range(4), 1e-5)
    saved = copy.deepcopy([x.state_dict() for x in (nets[0], optimizers[0], scalers[0])])
    for x, state in zip((nets[1], optimizers[1], scalers[1]), saved, strict=True):
        x.load_state_dict(state)
    for net, optimizer, s in zip(nets, optimizers, scalers, strict=True):
        train(net, optimizer, s, range(4, 8), 1e-5)
    assert_same_snapshots(snapshot(optimizers[0]), snapshot(optimizers[1]))
    assert {p.dtype for p in nets[1].parameters()} == {torch.float16}
    assert {optimizers[1].state[p]["master"].dtype for p in nets[1].parameters()} == {torch.float32}


def test_a_scale_that_is_none_is_refused():
    p = parameter()
    optimizer = hs.SGD([p])
    p.grad, optimizer.grad_scale = torch.ones(40).half(), torch.tensor(0.0)
    with pytest.raises(ValueError, match=r"^SGD: grad_scale=0\.0 is no scale\. Use a number > 0\.$"):
        optimizer.step()


@pytest.mark.parametrize(
    ("dtype", "unscales"), [(torch.float16, True), (torch.bfloat16, False), (torch.float32, False)]
)
def test_the_step_unscales_where_a_scaler_does_not(dtype, unscales):
    """Where it says that it does, Lightning refuses to clip."""
    assert hs.AdamW([parameter(dtype)])._step_supports_amp_scaling is unscales
