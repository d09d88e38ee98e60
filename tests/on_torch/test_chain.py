"""Chains: links compose, and do for one parameter what they say."""

import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import assert_same_snapshots, snapshot


def step(tx, p, grads, **options):
    optimizer = hs.Optimizer([("w", p)], tx, **options)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    return optimizer


def weights(dtype=torch.bfloat16, size=500):
    return torch.nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype))


def gradients(count=4, size=500):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).bfloat16() for _ in range(count)]


def test_a_chain_of_chains_is_flat():
    inner = hs.chain(hs.scale_by_adam(), hs.add_decayed_weights(0.1))
    nested = hs.chain(inner, hs.chain(hs.scale_by_learning_rate(0.1), hs.round_stochastically()))
    assert [link.name for link in nested.links] == [
        "scale_by_adam",
        "add_decayed_weights",
        "scale_by_learning_rate",
        "round_stochastically",
    ]


def test_without_a_last_link_weights_are_rounded_to_nearest():
    p, grads = weights(), gradients(1)
    before = p.detach().float()
    step(hs.scale_by_learning_rate(0.37), p, grads)
    assert torch.equal(p.detach(), (before - torch.tensor(0.37) * grads[0].float()).bfloat16())


def test_absolute_decay_is_not_scaled_by_the_learning_rate():
    p = torch.nn.Parameter(torch.full((3,), 2.0))
    tx = hs.chain(hs.scale_by_learning_rate(0.0), hs.add_decayed_weights(0.25, absolute=True))
    step(tx, p, [torch.ones(3)])
    assert torch.equal(p.detach(), torch.full((3,), 1.5))


def test_a_mask_chooses_what_decays_by_name_and_shape():
    asked = []

    def mask(name, param):
        asked.append(name)
        return param.ndim > 1

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    tx = hs.chain(hs.add_decayed_weights(0.5, mask), hs.scale_by_learning_rate(1.0))
    optimizer = hs.Optimizer(model.named_parameters(), tx)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert asked == ["0/weight", "0/bias", "1/weight", "1/bias"]
    assert [p.mean().item() for p in model.parameters()] == [0.25, 1.0, 1.0, 1.0]


def test_a_decay_of_zero_leaves_infinite_weights_alone():
    p = torch.nn.Parameter(torch.tensor([float("inf"), 1.0]))
    step(hs.chain(hs.add_decayed_weights(0.0), hs.scale_by_learning_rate(0.0)), p, [torch.ones(2)])
    assert torch.equal(p.detach(), torch.tensor([float("inf"), 1.0]))


@pytest.mark.parametrize(("b1", "expected"), [(0.5, "nearest"), (0.6, "stochastic"), (0.999, "stochastic")])
def test_auto_rounding_is_nearest_only_where_that_falls_short_by_under_a_thousandth(b1, expected):
    """Half a gap of float16 is 2^-11: over 1 - b1 under 1e-3 at 0.5, not at 0.6."""
    auto, told = (weights() for _ in range(2))
    ours = step(hs.scale_by_adam(b1, mu_dtype="float16"), auto, gradients())
    theirs = step(hs.scale_by_adam(b1, mu_dtype="float16", mu_rounding=expected), told, gradients())
    assert_same_snapshots(snapshot(ours), snapshot(theirs))
