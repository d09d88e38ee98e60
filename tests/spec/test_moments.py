"""Moments against exact arithmetic, and fixed points derived by hand."""

from fractions import Fraction

import numpy as np
import pytest

from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.storage.state_dtypes import as_format
from stops import STOPS


@pytest.mark.parametrize("b", [0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.999999])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 100, 1000, 30000])
def test_bias_correction_is_within_a_millionth_of_the_exact_one(b, count):
    exact = 1 - Fraction(float(np.float32(b))) ** count
    assert abs(Fraction(float(bias_correction(b, count))) / exact - 1) < Fraction(1, 10**6)


def test_bias_correction_ends_at_one():
    assert bias_correction(0.999999, 2**31 - 1) == 1
    assert bias_correction(0.0, 1) == 1


@pytest.mark.parametrize("b", [0.9, 0.999])
def test_ema_rounds_each_operation_once(b):
    """Against exact products and sums, rounded by hand to 24 bits."""
    f = np.float32
    average, value = f(0.7310586), f(-1.2345679)
    first = f(float(Fraction(float(f(b))) * Fraction(float(average))))
    second = f(float(Fraction(float(f(1) - f(b))) * Fraction(float(value))))
    assert ema(average, value, b) == f(float(Fraction(float(first)) + Fraction(float(second))))


@pytest.mark.parametrize(("dtype", "b"), [key for key in STOPS if key[0] in ("bfloat16", "float16")])
def test_nearest_averages_stop_at_their_fixed_points(dtype, b):
    fmt = as_format(dtype)
    x = np.zeros(1, np.float32)
    for _ in range(40000):
        new = fmt.decode(fmt.encode(ema(x, np.float32(1), b), None))
        if new == x:
            break
        x = new
    assert x[0] == STOPS[dtype, b]


@pytest.mark.parametrize(
    ("dtype", "b", "freezes"),
    [
        ("bfloat16", 0.9, False),
        ("bfloat16", 0.99, False),
        ("bfloat16", 0.996, False),
        ("bfloat16", 0.9961, True),
        ("bfloat16", 0.999, True),
        ("float16", 0.999, False),
        ("float16", 0.9996, True),
        ("float32", 0.9999999, False),
    ],
)
def test_freezing_begins_below_half_the_relative_gap(dtype, b, freezes):
    assert as_format(dtype).freezes(b) == freezes


def test_a_dtype_that_needs_a_scale_is_no_plain_state_dtype():
    with pytest.raises(ValueError, match="float8_e4m3fn cannot hold a state"):
        as_format("float8_e4m3fn")
