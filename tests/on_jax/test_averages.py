"""What storage does to an average over many steps, seen through the transform that keeps it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep_jax as hs
from halfstep_jax.storage.formats import Encoded
from halfstep_jax.storage.state_dtypes import as_format
from halfstep_spec import SCALED_CODES
from stops import STOPS

QUICK = ("bfloat16", "scaled ufloat8_e5m3")
STOCHASTIC = {
    "bfloat16": "bfloat16",
    **{
        f"scaled {name}": hs.scaled(name, min_size=0)
        for name, c in SCALED_CODES.items()
        if c.for_second_moments
    },
    "ufloat8_e6m2": "ufloat8_e6m2",
}


def stored_format(dtype: str):
    return hs.scaled(dtype, min_size=0, min_ndim=1) if dtype.startswith("float8") else dtype


def values(state, fmt):
    """Return the float32 values of both moments."""
    pairs = ((state.mu, state.mu_scale), (state.nu, state.nu_scale))
    return [decoded(codes, scales, fmt) for codes, scales in pairs]


def decoded(codes, scales, fmt):
    """Return the float32 values of the moment of a bare array, whose name is empty."""
    return as_format("", "", fmt).decode(Encoded(codes, scales[""] if scales else None))


@functools.partial(jax.jit, static_argnums=(0, 3))
def take_steps(tx, gradient, state, steps):
    def step(_, state):
        return tx.update(gradient, state)[1]

    return jax.lax.fori_loop(0, steps, step, state)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "b"), STOPS)
def test_nearest_averages_stop_at_their_fixed_points(dtype, b):
    fmt = stored_format(dtype)
    forced = {"mu_rounding": "nearest_unchecked", "nu_rounding": "nearest_unchecked"}
    nu = "float32" if dtype == "float16" else fmt  # refused
    tx = hs.scale_by_adam(b1=b, b2=b, mu_dtype=fmt, nu_dtype=nu, **forced)
    gradient = jnp.ones((2, 4))
    state = take_steps(tx, gradient, tx.init(gradient), 6000)
    for moments in (values(state, fmt), values(take_steps(tx, gradient, state, 1), fmt)):
        for moment in moments[:1] if dtype == "float16" else moments:
            assert (moment == STOPS[dtype, b]).all()


def test_a_nearest_average_that_should_decay_stays():
    tx = hs.scale_by_adam(nu_dtype="bfloat16", nu_rounding="nearest_unchecked")
    gradient = jnp.zeros(4)
    state = tx.init(gradient)._replace(nu=jnp.ones(4, jnp.bfloat16))
    assert (take_steps(tx, gradient, state, 2000).nu == 1).all()


def check_mean(name, v, truth):
    """Check 4,096 averages: their mean; of floats without a sign and of roots, that of the step.

    To within 5 of its own standard errors, or 3 %: what is left in third order of a gap of a quarter.
    """
    if "ufloat8" in name or "uroot8" in name:
        assert abs(np.sqrt(truth / v).mean() - 1) < 0.03
    else:
        assert abs(v.mean() - truth) < 5 * v.std(ddof=1) / np.sqrt(v.size)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in STOCHASTIC]
)
def test_stochastic_averages_follow_the_true_mean(name):
    """Averages of g = 1 have the mean 1 - b^t. The words are a function of the seed: the outcome is fixed."""
    steps, b, fmt = 700, np.float32(0.999), STOCHASTIC[name]
    tx = hs.scale_by_adam(b2=b, mu_dtype="float32", nu_dtype=fmt, seed=3)
    gradient = jnp.ones((32, 128))
    state = take_steps(tx, gradient, tx.init(gradient), steps)
    v = np.float64(decoded(state.nu, state.nu_scale, fmt))
    check_mean(name, v, 1 - float(b) ** steps)
    assert v.std() > 0.001 * v.mean()
