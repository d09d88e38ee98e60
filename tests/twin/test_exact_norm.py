"""Norms by sums of integers: which bits count, and what is no number, in the spec and in both packages."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from halfstep_jax.numbers import global_norm as jax_norms
from halfstep_jax.numbers.global_norm import global_norm as in_jax
from halfstep_spec.numbers.global_norm import global_norm as in_spec
from halfstep_torch.numbers import global_norm as torch_norms
from halfstep_torch.numbers.global_norm import global_norm as in_torch
from halfstep_torch.numbers.norms import in_range

NORMS = {
    "spec": lambda x: in_spec([np.float32(x)], exact=True),
    "jax": lambda x: np.asarray(in_jax([jnp.float32(x)], exact=True)),
    "torch": lambda x: in_torch([torch.tensor(x, dtype=torch.float32)], exact=True).numpy(),
}
PACKAGES = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


@PACKAGES
def test_half_a_unit_of_the_largest_counts_and_what_is_below_does_not(norm):
    # In units of the last place of the first: their squares are one less than what float32 rounds up.
    x = [9270610.0, 3317.0, 62.0, 7.0, 3.0, 2.0]
    assert norm(x) == np.float32(9270610)
    assert norm([*x, 0.5]) == np.float32(9270611)
    below = [0.25, 0.49999997, 2.0**-3, 2.0**-100, 2.0**-149]
    assert norm([*x, *below]) == np.float32(9270610)


@PACKAGES
def test_an_infinity_and_nan_stay_what_they_are(norm):
    assert norm([1.0, -np.inf, 3e38]) == np.inf
    assert np.isnan(norm([1.0, np.nan, np.inf]))
    assert norm([0.0, 2.0**-140]) == 0
    assert norm([np.finfo(np.float32).max]) == np.finfo(np.float32).max


@pytest.mark.parametrize("x", [[1.0, -np.inf], [3e38, 3e38], [1.0, np.nan]], ids=["infinity", "large", "nan"])
def test_a_norm_past_float32_is_given_of_smaller_numbers_if_these_are_finite(x):
    in_jax = jax_norms.global_norms([jnp.float32(x)], exact=True).in_range()
    in_torch = in_range(torch_norms.global_norms([torch.tensor(x)], exact=True))
    small = np.float32(3e38 * 2**-64) * np.sqrt(2)
    expected = (small, 2.0**-64) if x[0] == 3e38 else (np.inf if np.isinf(x).any() else np.nan, 1)
    for found in (in_jax, in_torch):
        np.testing.assert_allclose([float(n) for n in found], expected, rtol=1e-6)
