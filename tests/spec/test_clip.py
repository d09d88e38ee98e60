"""The norm of many arrays, exactly and in float32, against double precision; clipping by it."""

import itertools

import numpy as np
import pytest

from halfstep_spec.numbers.global_norm import global_norm
from halfstep_spec.rules.clip import clip

UNIT = 2.0**-24


def spread(sigma: float, scale: float, size: int = 3000) -> np.ndarray:
    rng = np.random.default_rng(7)
    return (np.exp(sigma * rng.normal(size=size)) * rng.normal(size=size) * scale).astype(np.float32)


@pytest.mark.parametrize(
    ("sigma", "scale"), list(itertools.product([0.0, 1.0, 3.0, 6.0], [1e-30, 1e-10, 1.0, 1e10, 1e28]))
)
def test_an_exact_norm_is_right_to_an_ulp_and_a_half(sigma, scale):
    x = spread(sigma, scale)
    truth = np.linalg.norm(x.astype(np.float64))
    # Half a unit for float32 of the square, halved by the root, and half a unit for the root; what is rounded
    # off the elements is below n 2^-50 of the square.
    assert abs(float(global_norm([x], exact=True)) / truth - 1) < 1.5 * UNIT + x.size * 2.0**-50


def test_an_exact_norm_has_the_same_bits_in_any_order_and_partition():
    x = spread(3.0, 1.0)
    rng = np.random.default_rng(0)
    norms = {global_norm([x], exact=True).tobytes()}
    for _ in range(20):
        cuts = np.sort(rng.integers(0, x.size, 5))
        norms.add(global_norm(np.split(rng.permutation(x), cuts), exact=True).tobytes())
    assert len(norms) == 1


def test_plain_sums_depend_on_the_order_where_exact_ones_do_not():
    x = spread(3.0, 1.0)
    rng = np.random.default_rng(0)
    assert len({global_norm([rng.permutation(x)]).tobytes() for _ in range(20)}) > 1


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("values", "norm"),
    [([], 0.0), ([0.0, -0.0], 0.0), ([1.0, np.inf], np.inf), ([np.inf, np.nan], np.nan), ([3.0, -4.0], 5.0)],
)
def test_special_values(exact, values, norm):
    x = np.array(values, np.float32)
    np.testing.assert_array_equal(global_norm([x], exact=exact), np.float32(norm))


def test_a_subnormal_element_counts_as_zero_in_an_exact_norm():
    assert global_norm([np.float32(1e-40)], exact=True) == 0


def test_a_norm_within_the_bound_leaves_every_bit():
    u = spread(1.0, 1.0)
    np.testing.assert_array_equal(clip(u, np.float32(2), 2.0), u)


def test_a_norm_above_the_bound_is_brought_to_it():
    u = spread(1.0, 1.0)
    clipped = clip(u, global_norm([u], exact=True), 1.5)
    # A quotient and a product, each rounded once, and the norm's own error.
    assert abs(np.linalg.norm(clipped.astype(np.float64)) / 1.5 - 1) < (1.5 + 2) * UNIT


def test_a_norm_of_nan_makes_every_update_nan():
    assert np.isnan(clip(np.ones(3), np.float32(np.nan), 1.0)).all()
