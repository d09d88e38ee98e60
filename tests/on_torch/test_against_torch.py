"""Float32 throughout, it is torch.optim's Adam and AdamW, to within rounding."""

import math

import numpy as np
import pytest
import torch

import halfstep_torch as hs

STEPS, SIZE = 100, 1000
LARGEST_GRADIENT = 0.4
UNIT = 2.0**-24  # half the spacing of float32 at 1


def run(make, **options):
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(SIZE, generator=generator))
    optimizer = make([p], **options)
    for _ in range(STEPS):
        p.grad = (torch.randn(SIZE, generator=generator) * 0.1).clamp(-LARGEST_GRADIENT, LARGEST_GRADIENT)
        optimizer.step()
    return p.detach(), optimizer.state[p]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_hundred_float32_steps_are_torchs(name, weight_decay, betas, maximize):
    # Rates that float32 holds: torch forms 1 - b in float64, we in float32 (contract A4).
    b1, b2 = (float(np.float32(b)) for b in betas)
    lr = 1e-3
    options = {"lr": lr, "betas": (b1, b2), "weight_decay": weight_decay, "maximize": maximize}
    ours, state = run(getattr(hs, name), **options)
    theirs, reference = run(getattr(torch.optim, name), foreach=False, **options)
    largest_p = max(theirs.abs().max().item(), 4.0)
    # Weights: p + u rounds once on our side; torch rounds 1 - lr wd, its product with p, and the sum. The
    # update is m / sqrt(v). On either side m errs by 3 roundings of at most max |g|, remembered for n steps.
    # Because v >= (1 - b2) b2^100 max g^2, that is at most 6 n units over sqrt((1 - b2) b2^100).
    # Corrections: 1e-6 each.
    n = min(STEPS, 1 / (1 - b1))
    of_update = 2e-6 + 6 * n * UNIT / math.sqrt((1 - b2) * b2**STEPS)
    bound = STEPS * (4 * UNIT * largest_p + lr * of_update)
    assert (ours - theirs).abs().max() <= bound
    # Moments: 3 roundings a step on either side, remembered for 1 / (1 - b) steps, of what is averaged: g,
    # and with L2 decay a weight that may differ by the bound above.
    l2 = weight_decay if name == "Adam" else 0.0
    largest_g = LARGEST_GRADIENT + l2 * largest_p
    for key, b, size, carried in (
        ("exp_avg", b1, largest_g, l2 * bound),
        ("exp_avg_sq", b2, largest_g**2, 2 * largest_g * l2 * bound),
    ):
        roundings = 6 * min(STEPS, 1 / (1 - b)) * UNIT * size
        assert (state[key] - reference[key]).abs().max() <= roundings + carried, key
    # The bound is far below what a hundred steps do.
    start, _ = run(getattr(torch.optim, name), **{**options, "lr": 0.0})
    assert (theirs - start).abs().max() > 100 * bound
