"""Formats and states of formats that cannot be: value, rule and way out."""

import jax
import jax.numpy as jnp
import optax
import pytest

import halfstep_jax as hs
from on_jax.steps import E4M3, E5M3, FOUR, weights

STATE = "Pass the state that init made, and the block_size that it was made with."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"nu_scale": jnp.full((64, 2), 30, jnp.uint8)},
            f"scale_by_adam: the nu_scale of 'w' holds 30, outside [31, 253]. {STATE}",
        ),
        (
            {"mu_scale": jnp.full((64, 2), 255, jnp.uint8)},
            f"scale_by_adam: the mu_scale of 'w' holds 255, outside [18, 254]. {STATE}",
        ),
        (
            {"nu_scale": jnp.full((64, 4), 40, jnp.uint8)},
            "scale_by_adam: the nu_scale of 'w' is uint8[64, 4]; block_size=128 makes it uint8[64, 2]. "
            + STATE,
        ),
        (
            {"nu_scale": jnp.full((64, 2), 40, jnp.int32)},
            "scale_by_adam: the nu_scale of 'w' is int32[64, 2]; block_size=128 makes it uint8[64, 2]. "
            + STATE,
        ),
    ],
)
def test_a_scale_that_init_did_not_make_is_refused(change, message):
    params = {"w": weights((64, 200))}
    tx = hs.scale_by_adam(mu_dtype=E4M3, nu_dtype=E5M3)
    state = tx.init(params)._replace(**{name: {"w": x} for name, x in change.items()})
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        tx.update({"w": jnp.ones((64, 200))}, state)
    assert str(caught.value) == message


def test_packed_codes_of_another_shape_or_scale_are_refused():
    tx, params = hs.scale_by_adam(**FOUR), {"w": weights((64, 200))}
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"update of 'w' has shape \(64, 202\), its mu \(64, 100\)"):
        tx.update({"w": jnp.ones((64, 202))}, state)
    scale = {"w": jnp.zeros((64, 2), jnp.uint8)}
    with pytest.raises(ValueError, match=r"mu_scale of 'w' holds 0, outside \[1, 254\]"):
        tx.update({"w": jnp.ones((64, 200))}, state._replace(mu_scale=scale))


@pytest.mark.parametrize("scales", [{}, {"v": jnp.full((64, 2), 40, jnp.uint8)}, optax.EmptyState()])
def test_scales_that_are_not_there_are_missed(scales):
    params = {"w": weights((64, 200))}
    tx = hs.scale_by_adam(mu_dtype=E4M3, nu_dtype=E5M3)
    with pytest.raises(ValueError, match="the nu_scale of 'w' is missing; block_size=128 makes it uint8"):
        tx.update({"w": jnp.ones((64, 200))}, tx.init(params)._replace(nu_scale=scales))


@pytest.mark.slow
def test_a_marked_block_is_no_fault():
    params = {"w": weights((64, 200))}
    tx = hs.scale_by_adam(mu_dtype=E4M3, nu_dtype=E5M3)
    _, state = jax.jit(tx.update)({"w": jnp.ones((64, 200)).at[0, 0].set(jnp.nan)}, tx.init(params))
    assert int(state.nu_scale["w"][0, 0]) == 255
    tx.update({"w": jnp.ones((64, 200))}, state)
