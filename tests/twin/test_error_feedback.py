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


FEEDBACK = {"param_storage": "feedback"}
CODES = {"param_storage": "int8"}
CLASSES = {"adamw": "AdamW", "sgd": "SGD", "schedule_free_adamw": "AdamWScheduleFree"}
# An alias, the weights' dtype, its arguments, and what is said.
REFUSED = [
    ("adamw", "bfloat16", FEEDBACK | {"mu_rounding": "feedback"}, "steps before it stores"),
    ("adamw", "bfloat16", FEEDBACK | {"recipe": "one_pass"}, "nu_dtype=uroot4_e4m4 makes updates of moments"),
    ("sgd", "bfloat16", FEEDBACK, "momentum=.* keeps nothing of it. Use a number above 0"),
    ("sgd", "bfloat16", FEEDBACK | {"momentum": 0.0}, r"momentum=0\.0 keeps nothing of it"),
    ("sgd", "bfloat16", FEEDBACK | {"momentum": 0.9, "rounding": "feedback"}, "steps before it stores"),
    ("lion", "bfloat16", FEEDBACK, "A sign makes updates of one size"),
    ("muon", "bfloat16", FEEDBACK, "The factor makes momentum orthogonal"),
    ("adafactor", "bfloat16", FEEDBACK, "keeps no first moment"),
    ("lamb16", "bfloat16", FEEDBACK, "divides by the norm of updates"),
    ("schedule_free_adamw", "bfloat16", FEEDBACK, "averages weights for good"),
    ("adan", "bfloat16", FEEDBACK, "it is not known"),
    ("lion", "float32", CODES, "is for AdamW alone, whose first moment"),
    ("adam", "float32", CODES, "is for AdamW alone, whose first moment"),
    ("adamw", "float32", {"param_storage": "float8_e4m3fn"},
     r'param_storage="float8_e4m3fn" would end as far from float32 .*0\.352'),
    ("adamw", "bfloat16", CODES,
     'bfloat16, and param_storage="int8" keeps the numbers of float32.*Pass float32 weights'),
    ("adamw", "float32", CODES | {"mu_dtype": "float16"},
     'mu_dtype=float16 holds numbers of a fixed range.*Use "float32", "bfloat16" or relative'),
    ("adamw", "float32", CODES | {"recipe": "eight_bit"},
     "mu_dtype=relative float8_e3m4 holds numbers of a fixed range"),
    ("adamw", "float32", CODES | {"recipe": "one_pass"},
     "mu_dtype=relative mulaw8 holds numbers of a fixed range"),
]  # fmt: skip


@pytest.mark.parametrize(("alias", "dtype", "options", "message"), REFUSED)
def test_weights_that_a_rule_cannot_feed_back_or_keep_in_codes_are_refused_by_both(
    alias, dtype, options, message
):
    with pytest.raises(ValueError, match=message):
        getattr(halfstep_jax, alias)(1e-3, **options).init({"w": jnp.ones(W, dtype)})
    w = torch.nn.Parameter(torch.ones(W, dtype=getattr(torch, dtype)))
    w.grad = torch.ones_like(w)
    with pytest.raises(ValueError, match=message):
        getattr(halfstep_torch, CLASSES.get(alias, alias.capitalize()))([("w", w)], 1e-3, **options).step()


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
