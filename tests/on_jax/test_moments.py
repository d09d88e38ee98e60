"""Moments and their bias correction give the bits of the reference; nearest freezes where it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfstep_spec as spec
from halfstep_jax.numbers.moments import bias_correction, ema
from halfstep_jax.storage.formats import Format

RATES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.999999)
COUNTS = (1, 2, 3, 7, 10, 100, 999, 1000, 12345, 2**20 - 1, 2_000_000, 2**31 - 1)


def test_bias_correction_is_that_of_the_reference():
    expected = np.array([[spec.bias_correction(b, t) for t in COUNTS] for b in RATES])
    rates, counts = np.array(RATES, np.float32)[:, None], np.array(COUNTS, np.int32)
    for correct in (bias_correction, jax.jit(bias_correction)):
        np.testing.assert_array_equal(np.asarray(correct(rates, counts)), expected)
    constant = jax.jit(lambda: jnp.stack([bias_correction(b, COUNTS[4]) for b in RATES]))
    np.testing.assert_array_equal(np.asarray(constant()), expected[:, 4])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(b=st.floats(0, 1, exclude_max=True, width=32), count=st.integers(1, 2**31 - 1))
def test_any_bias_correction_is_that_of_the_reference(b, count):
    assert float(bias_correction(np.float32(b), np.int32(count))) == float(spec.bias_correction(b, count))


@pytest.mark.parametrize("b", RATES)
def test_an_average_is_that_of_the_reference(b):
    rng = np.random.default_rng(2)
    average, value = rng.standard_normal((2, 5000)).astype(np.float32)
    expected = spec.ema(average, value, b)
    for b_given in (b, jnp.float32(b)):
        for average_of in (ema, jax.jit(ema)):
            np.testing.assert_array_equal(
                np.asarray(average_of(jnp.asarray(average), jnp.asarray(value), b_given)), expected
            )


@pytest.mark.parametrize(("dtype", "exponent"), [("bfloat16", 8), ("float16", 11)])
def test_a_format_freezes_below_half_its_relative_gap(dtype, exponent):
    fmt = Format(dtype)
    edge = np.float32(1 - 2.0**-exponent)
    assert not fmt.freezes(edge)
    assert fmt.freezes(np.nextafter(edge, np.float32(1)))
    assert not Format("float32").freezes(0.9999999)
