"""Fixtures of this folder."""

import jax
import optax
import pytest

import halfstep_jax
from twin.state_files import transform, weights


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Write the file of a run of two steps."""
    path, tx, params = tmp_path_factory.mktemp("run") / "run.safetensors", transform(), weights()
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
    halfstep_jax.save_state(path, params, state, tx)
    return path
