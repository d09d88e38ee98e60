"""The schedule that rises and falls, in both frameworks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch


def test_both_schedules_agree_and_fit_their_clients():
    ours, theirs = halfstep_jax.preheat(1e-2, 10, -0.25), halfstep_torch.preheat(1e-2, 10, -0.25)
    counts = [0, 4, 9, 10, 100, 10**6]
    # A power of float32 is within a few units of its last place.
    np.testing.assert_allclose([ours(c) for c in counts], [theirs(c) for c in counts], rtol=1e-6)
    assert jax.jit(ours)(9) == ours(9)
    assert max(map(theirs, range(100))) == theirs(9)
    tx = optax.sgd(ours)
    updates, _ = tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))
    np.testing.assert_allclose(updates["w"], -1e-3, rtol=1e-6)
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    halfstep_torch.SGD([("p", p)], lr=theirs).step()
    torch.testing.assert_close(p.detach(), torch.full((2,), 1 - 1e-3))


@pytest.mark.parametrize("package", [halfstep_jax, halfstep_torch])
def test_schedules_that_do_not_rise_or_fall_are_refused(package):
    with pytest.raises(ValueError, match="preheat_steps=0 is no rise"):
        package.preheat(1e-3, 0)
    with pytest.raises(ValueError, match=r"-decay_power=-0\.5 is negative"):
        package.preheat(1e-3, 10, 0.5)
    with pytest.raises(ValueError, match=r"=-1 is negative"):
        package.preheat(-1, 10)
