"""Errors that a step feeds back, as both packages offer, refuse and describe it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import halfstep_jax
import halfstep_torch
from halfstep_torch.rules.adan import scale_by_adan

W = (64, 128)


def torch_weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(W, dtype=torch.bfloat16))


def adan_in_torch(**options) -> halfstep_torch.Optimizer:
    links = halfstep_torch.chain(scale_by_adan(**options), halfstep_torch.scale_by_learning_rate(1e-3))
    return halfstep_torch.Optimizer([("w", torch_weight())], links)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: halfstep_jax.scale_by_lion(mu_rounding="feedback"), "mu"),
        (lambda: halfstep_torch.scale_by_lion(mu_rounding="feedback"), "mu"),
        (lambda: halfstep_jax.scale_by_adan(mu_rounding="feedback"), "mu"),
        (lambda: adan_in_torch(mu_rounding="feedback"), "mu"),
        (lambda: halfstep_jax.scale_by_adam(nu_rounding="feedback"), "nu"),
        (lambda: halfstep_torch.scale_by_adam(nu_rounding="feedback"), "nu"),
    ],
)
def test_what_no_update_is_linear_in_is_refused(make, name):
    with pytest.raises(
        ValueError,
        match=f'_rounding="feedback" takes back the error of storing {name}, .* in it. Use "stochastic"',
    ):
        make()


def test_the_report_says_what_is_fed_back():
    recipe = halfstep_jax.recipes.eight_bit
    arrays = halfstep_jax.describe(
        halfstep_jax.adamw(1e-3, **recipe), {"w": jnp.ones(W, jnp.bfloat16)}
    ).arrays
    assert {row.name: row.rounding for row in arrays}["mu"] == "feedback"
    optimizer = halfstep_torch.AdamW([("w", torch_weight())], **halfstep_torch.recipes.eight_bit)
    assert halfstep_torch.describe(optimizer).of("w", "exp_avg").rounding == "feedback"


@pytest.mark.slow
def test_lamb_pays_nothing():
    """Its ratio would take the norm of what is fed back, too."""
    w, g = jnp.ones(W), jax.random.normal(jax.random.key(0), W)
    steps = []
    for rounding in ("feedback", "stochastic"):
        options = {**halfstep_jax.recipes.four_bit, "mu_rounding": rounding}
        tx = halfstep_jax.lamb(1e-2, **options)
        steps.append(np.asarray(jax.jit(tx.update)(g, tx.init(w), w)[0]))
    np.testing.assert_array_equal(*steps)
    optimizer = halfstep_torch.Lamb([("w", torch_weight())], **halfstep_torch.recipes.four_bit)
    assert halfstep_torch.describe(optimizer).of("w", "exp_avg").rounding == "stochastic"
