"""Cautious weight decay: against a plain implementation, by signs, and with the same bits in both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch
from twin.moving import jax_run, torch_run

LR, DECAY = 1e-2, 0.5
DRAWS = np.random.default_rng(4).normal(size=(9, 8, 16)).astype(np.float32)


def plain(direction):
    """Return x after x <- x - lr (u + decay [u x >= 0] x) in float64, and how often a decay stood aside."""
    x, aside = DRAWS[0].astype(np.float64), 0
    for u in direction(DRAWS[1:].astype(np.float64)):
        along = u * x >= 0
        aside += (~along).sum()
        x = x - LR * (u + DECAY * along * x)
    return x, aside


def adam(gradients, b1=0.9, b2=0.999):
    m = v = 0
    for t, g in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        yield (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + 1e-8)


def lion(gradients, b1=0.9, b2=0.99):
    m = 0
    for g in gradients:
        yield np.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g


@pytest.mark.parametrize(
    ("direction", "alias", "kind"), [(adam, "adamw", "AdamW"), (lion, "lion", "Lion")], ids=["adamw", "lion"]
)
def test_it_is_the_papers_formula(direction, alias, kind):
    """Each of 8 steps rounds by some 2^-24 of weights below 4; rates are float32: 1e-6 of updates of 10."""
    expected, aside = plain(direction)
    assert 200 < aside < 800  # of 1,024
    options = {"weight_decay": DECAY, "cautious": True}
    ours, _ = jax_run(getattr(halfstep_jax, alias)(LR, **options), DRAWS[0], DRAWS[1:], "float32")
    np.testing.assert_allclose(ours, expected, atol=8 * (4 * 4 * 2.0**-24 + 10 * LR * 1e-6 * 10))
    make = functools.partial(getattr(halfstep_torch, kind), lr=LR, compile=False, **options)
    np.testing.assert_array_equal(torch_run(make, DRAWS[0], DRAWS[1:], "float32")[0], ours)
    tx = getattr(halfstep_jax, alias)(LR, weight_decay=DECAY)
    incautious, _ = jax_run(tx, DRAWS[0], DRAWS[1:], "float32")
    assert np.abs(incautious - expected).max() > 1e-2


def test_signs_are_compared_where_a_product_would_be_zero():
    sizes = np.array([0.0, 1e-30, 1.0], np.float32)
    u, p = (x.reshape(-1) for x in np.meshgrid(*2 * [np.concatenate([sizes, -sizes])]))
    aside = (u != 0) & (p != 0) & (np.signbit(u) != np.signbit(p))
    assert (u[aside] * p[aside] == 0).any()
    tx = halfstep_jax.add_decayed_weights(DECAY, cautious=True)
    made, _ = jax.jit(tx.update)({"w": jnp.asarray(u)}, tx.init(None), {"w": jnp.asarray(p)})
    np.testing.assert_array_equal(np.asarray(made["w"]), np.where(aside, u, u + np.float32(DECAY) * p))


def test_an_absolute_decay_stands_aside_where_the_step_itself_leads_away():
    u, p = np.float32([0.25, -0.25, 0.25, -0.25, 0.0]), np.float32([1, 1, -1, -1, 1])
    tx = halfstep_jax.add_decayed_weights(DECAY, absolute=True, cautious=True)
    made, _ = tx.update({"w": jnp.asarray(u)}, tx.init(None), {"w": jnp.asarray(p)})
    expected = [0.25, -0.75, 0.75, -0.25, -0.5]
    assert np.asarray(made["w"]).tolist() == expected
    w = torch.nn.Parameter(torch.from_numpy(p.copy()))
    w.grad = torch.from_numpy(u)
    up = halfstep_torch.scale_by_learning_rate(1.0, flip_sign=False)
    link = halfstep_torch.add_decayed_weights(DECAY, absolute=True, cautious=True)
    halfstep_torch.Optimizer([w], halfstep_torch.chain(up, link), compile=False).step()
    assert (w.detach().numpy() - p).tolist() == expected


def test_muon_takes_it_for_both_chains():
    draws = np.random.default_rng(5).normal(size=(3, 8, 8)).astype(np.float32)

    def ends(**options):
        named = [(name, torch.nn.Parameter(torch.from_numpy(draws[0].copy()))) for name in ("dense", "head")]
        optimizer = halfstep_torch.Muon(named, LR, 0.5, compile=False, **options)
        params = {name: jnp.asarray(draws[0]) for name in ("dense", "head")}
        tx = halfstep_jax.muon(LR, weight_decay=0.5, adam_weight_decay=0.5, **options)
        state = tx.init(params)
        for g in draws[1:]:
            for _, p in named:
                p.grad = torch.from_numpy(g)
            optimizer.step()
            updates, state = jax.jit(tx.update)({name: jnp.asarray(g) for name in params}, state, params)
            params = optax.apply_updates(params, updates)
        return {name: p.detach().numpy() for name, p in named}, params

    cautious, in_jax = ends(cautious=True)
    plain, _ = ends()
    np.testing.assert_array_equal(cautious["head"], in_jax["head"])
    # The factors of the two differ by sums in another order: contract A14.
    np.testing.assert_allclose(cautious["dense"], in_jax["dense"], atol=1e-4)
    for name in ("dense", "head"):
        assert np.abs(cautious[name] - plain[name]).max() > 1e-3


@pytest.mark.parametrize("alias", ["adamw", "lion", "add_decayed_weights"])
def test_what_is_no_bool_is_refused(alias):
    with pytest.raises(
        TypeError, match=r"add_decayed_weights: cautious=1 is not a bool\. Use True or False\."
    ):
        getattr(halfstep_jax, alias)(0.1, cautious=1)
    make = {"adamw": halfstep_torch.AdamW, "lion": halfstep_torch.Lion}.get(alias)
    p = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(TypeError, match=r"cautious=1 is not a bool\. Use True or False\."):
        make(p, cautious=1) if make else halfstep_torch.add_decayed_weights(0.1, cautious=1)


def test_weights_in_codes_have_no_cautious_decay():
    with pytest.raises(ValueError, match="takes the whole step of AdamW by one rule, without cautious"):
        halfstep_jax.adamw(1e-3, cautious=True, param_storage="int8")
    with pytest.raises(ValueError, match="takes the whole step of AdamW by one rule, without cautious"):
        halfstep_torch.AdamW([torch.nn.Parameter(torch.ones(3))], cautious=True, param_storage="int8")


def test_a_group_cannot_choose_it():
    p = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="cautious=True in a param group; it is the same for all groups"):
        halfstep_torch.AdamW([{"params": p, "cautious": True}])
