"""State kept in a format from without, in both frameworks: not one bit apart."""

import numpy as np
import optax
import pytest

import halfstep_jax
import halfstep_torch
from backends.on_torch import from_torch
from twin.moving import jax_run, torch_run

_RATE = 1e-2
FLOAT32 = {"mu_dtype": "float32", "nu_dtype": "float32"}


@pytest.mark.slow
def test_stored_state_of_a_chain_agrees_to_the_bit():
    """In a chain, so that the place of the link is part of the names."""
    rng = np.random.default_rng(0)
    start, rows = rng.normal(size=(6, 10)).astype(np.float32), rng.normal(size=(4, 6, 10)).astype(np.float32)

    def make(package, chain):
        inside = chain(package.add_decayed_weights(0.125), package.scale_by_adam(**FLOAT32))
        stored = package.store_state(inside, package.scaled("float8_e4m3fn", 4, 0, 0))
        return chain(stored, package.scale_by_learning_rate(_RATE))

    w, state = jax_run(make(halfstep_jax, optax.chain), start, rows, "float32")
    tx = make(halfstep_torch, halfstep_torch.chain)
    theirs, made = torch_run(lambda named: halfstep_torch.Optimizer(named, tx), start, rows, "float32")
    np.testing.assert_array_equal(w, theirs)
    nu = np.asarray(optax.tree.get(state, "nu")["w"]).view(np.uint8)
    (kept,) = made.state.values()
    np.testing.assert_array_equal(from_torch(kept["exp_avg_sq"]).bits, nu)
