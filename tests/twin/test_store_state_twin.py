"""State kept in a format from without, in both frameworks: not one bit apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch
from backends.on_torch import from_torch

_RATE = 1e-2
FLOAT32 = {"mu_dtype": "float32", "nu_dtype": "float32"}


def scaled(package):
    return package.scaled("float8_e4m3fn", 4, 0, 0)


@pytest.mark.slow
def test_stored_state_of_a_chain_agrees_to_the_bit():
    """In a chain, so that the place of the link is part of the names."""
    rng = np.random.default_rng(0)
    start, rows = rng.normal(size=(6, 10)).astype(np.float32), rng.normal(size=(4, 6, 10)).astype(np.float32)
    p = torch.nn.Parameter(torch.from_numpy(start.copy()))
    inside = halfstep_torch.chain(
        halfstep_torch.add_decayed_weights(0.125), halfstep_torch.scale_by_adam(**FLOAT32)
    )
    ours = halfstep_torch.Optimizer(
        [("w", p)],
        halfstep_torch.chain(
            halfstep_torch.store_state(inside, scaled(halfstep_torch)),
            halfstep_torch.scale_by_learning_rate(_RATE),
        ),
    )
    link = halfstep_jax.scale_by_adam(**FLOAT32)
    inside = optax.chain(halfstep_jax.add_decayed_weights(0.125), link)
    tx = optax.chain(
        halfstep_jax.store_state(inside, scaled(halfstep_jax)), halfstep_jax.scale_by_learning_rate(_RATE)
    )
    params = {"w": jnp.asarray(start)}
    state = tx.init(params)
    for g in rows:
        p.grad = torch.from_numpy(g)
        ours.step()
        updates, state = jax.jit(tx.update)({"w": jnp.asarray(g)}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(p.detach().numpy(), np.asarray(params["w"]))
    nu = np.asarray(optax.tree.get(state, "nu")["w"]).view(np.uint8)
    np.testing.assert_array_equal(from_torch(ours.state[p]["exp_avg_sq"]).bits, nu)
