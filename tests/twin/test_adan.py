"""Adan, the worked example of a new rule: against its formula, and JAX against torch in any storage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_spec
import halfstep_torch

STORAGES = ("bfloat16 bfloat16", "scaled float8_e4m3fn ufloat8_e5m3", "codebook dynamic8 udynamic8")


def test_the_reference_follows_the_paper():
    gradients = np.random.default_rng(0).normal(size=(20, 50))
    rule = halfstep_spec.RULES["adan"](eps=0.0)
    state = rule.init((50,))
    for g in gradients:
        u, state = rule.step(g, state, "w")
    # The averages as sums: each of 20 steps rounds them by 2^-24 of magnitudes below 3, three times.
    d = np.diff(gradients, axis=0, prepend=gradients[:1])
    terms = (gradients, d, (gradients + 0.92 * d) ** 2)
    weights = [(1 - b) * b ** np.arange(20)[::-1] / (1 - b**20) for b in (0.98, 0.92, 0.99)]
    m, e, v = (np.tensordot(w, x, 1) for w, x in zip(weights, terms, strict=True))
    np.testing.assert_allclose(u, (m + 0.92 * e) / np.sqrt(v), atol=20 * 3 * 3 * 2.0**-24)


def make(package, chain, storage):
    *kind, signed, unsigned = storage.split()
    signed, unsigned = (getattr(package, *kind)(x, 8, 0, 0) if kind else x for x in (signed, unsigned))
    adan = package.scale_by_adan(mu_dtype=signed, diff_dtype=signed, nu_dtype=unsigned, grad_dtype=signed)
    return chain(adan, package.scale_by_learning_rate(0.01), package.round_stochastically(3))


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("storage", STORAGES)
def test_jax_and_torch_agree_to_the_bit(storage, compile):
    draws = np.random.default_rng(1).normal(size=(13, 16, 24)).astype(np.float32)
    tx = make(halfstep_jax, optax.chain, storage)
    params = {"w": jnp.asarray(draws[0], jnp.bfloat16)}
    state, update = tx.init(params), jax.jit(tx.update)
    p = torch.nn.Parameter(torch.from_numpy(draws[0]).bfloat16())
    torch_tx = make(halfstep_torch, halfstep_torch.chain, storage)
    optimizer = halfstep_torch.Optimizer([("w", p)], torch_tx, compile=compile)
    for g in draws[1:]:
        updates, state = update({"w": jnp.asarray(g, jnp.bfloat16)}, state, params)
        params = optax.apply_updates(params, updates)
        p.grad = torch.from_numpy(g).bfloat16()
        optimizer.step()
    np.testing.assert_array_equal(np.asarray(params["w"], np.float32), p.detach().float().numpy())
