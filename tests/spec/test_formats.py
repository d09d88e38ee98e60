"""State formats against exact arithmetic, ml_dtypes and figures derived by hand."""

import math

import ml_dtypes
import numpy as np
import pytest

from halfstep_spec.numbers.moments import ema
from halfstep_spec.numbers.random_words import random_words
from halfstep_spec.storage.base_codes import NAN_SCALE
from halfstep_spec.storage.blocks import block_layout, block_maximum, scale_shape
from halfstep_spec.storage.codes import PLAIN_CODES, SCALED_CODES
from halfstep_spec.storage.formats import Encoded, Format
from halfstep_spec.storage.root_codes import eighth_root
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.storage.unsigned_floats import E5M3

_BYTES = {
    "float16": (40, 254),
    "float8_e4m3fn": (18, 254),
    "int8": (7, 254),
    "ufloat8_e5m3": (31, 253),
    "uroot8": (46, 253),
}
"""The lowest and the highest scale byte of each format."""
SIGNED = [name for name, codes in SCALED_CODES.items() if codes.signed]
ALL = [*SCALED_CODES, *(name for name, codes in PLAIN_CODES.items() if not codes.signed)]
_LARGEST = {"float16": 65504, "float8_e4m3fn": 448, "int8": 127}


def whole(dtype: str, block_size=None) -> Format:
    return scaled(dtype, block_size, 0, 0) if dtype in SCALED_CODES else Format(dtype)


@pytest.mark.parametrize(
    ("shape", "block_size", "expected", "scales"),
    [
        ((256, 512), 128, ((256,), 512, 128), (256, 4)),
        ((256, 100), 64, ((256,), 100, 64), (256, 2)),
        ((64, 32, 3, 3), 128, ((64,), 288, 128), (64, 3)),
        ((3, 3, 32, 64), 128, ((3, 3), 2048, 128), (3, 3, 16)),
        ((5, 6), 128, ((), 30, 128), (1,)),
        ((5, 6), "row", ((5,), 6, 6), (5, 1)),
        ((5, 6), None, ((), 30, 30), (1,)),
        ((300,), 128, ((), 300, 128), (3,)),
        ((0, 8), 8, ((0,), 8, 8), (0, 1)),
    ],
)
def test_blocks_run_along_the_shortest_trailing_axes(shape, block_size, expected, scales):
    assert block_layout(shape, block_size) == expected
    assert scale_shape(shape, block_size) == scales


def test_small_and_flat_arrays_are_kept_in_float32():
    fmt = scaled("int8")
    assert fmt.for_shape((64, 64)) == fmt
    assert fmt.for_shape((64, 63)).dtype == fmt.for_shape((4096,)).dtype == "float32"
    assert Format("bfloat16").for_shape((2,)).dtype == "bfloat16"


@pytest.mark.parametrize("dtype", SIGNED)
def test_the_scale_is_the_smallest_power_of_two_that_fits(dtype):
    rng = np.random.Generator(np.random.PCG64(1))
    values = (1 + rng.random(400)) * 2.0 ** rng.integers(-60, 60, 400)
    edges = _LARGEST[dtype] * 2.0 ** np.arange(-40.0, 40, 7)
    edges = np.concatenate([edges, np.nextafter(edges, np.inf, dtype=np.float32)])
    for value in np.concatenate([values, edges]).astype(np.float32):
        byte = int(whole(dtype).encode(np.array([value, 0], np.float32), None).scale[0])
        exponent = byte - 127 - math.frexp(_LARGEST[dtype])[1] + 1
        assert float(value) <= _LARGEST[dtype] * 2.0**exponent
        assert float(value) > _LARGEST[dtype] * 2.0 ** (exponent - 1)


@pytest.mark.parametrize("dtype", ALL)
def test_no_decoded_value_is_subnormal_or_infinite(dtype):
    fmt = whole(dtype)
    codes = np.arange(65536, dtype=np.uint16) if dtype == "float16" else np.arange(256, dtype=np.uint8)
    codes = codes[codes != 128] if dtype == "int8" else codes  # -128 has no opposite and is never stored
    for byte in _BYTES.get(dtype, (0, 0)):
        values = np.abs(
            fmt.decode(Encoded(codes, None if dtype not in SCALED_CODES else np.array([byte], np.uint8)))
        )
        assert np.isinf(values).sum() == (2 if dtype == "float16" else 0)
        assert not ((values > 0) & (values < 2.0**-126)).any()


def test_all_codes_of_a_block_are_those_of_ml_dtypes():
    """Every finite code, scaled by a power of two, is encoded as itself."""
    fmt, codes = whole("float8_e4m3fn"), np.arange(256, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes, values = codes[np.isfinite(values)], values[np.isfinite(values)]
    for shift in (-100, -3, 0, 40):
        stored = fmt.encode(values * np.float32(2.0**shift), None)
        np.testing.assert_array_equal(stored.codes, codes)
        np.testing.assert_array_equal(fmt.decode(stored), values * np.float32(2.0**shift))


def test_unsigned_codes_are_a_monotone_grid_of_equal_relative_steps():
    fmt, u = whole(E5M3.name), E5M3
    values = fmt.decode(Encoded(np.arange(256, dtype=np.uint8), np.array([127], np.uint8)))
    assert values[0] == 0
    assert (np.diff(values) > 0).all()
    steps = values[2:] / values[1:-1] - 1
    assert steps.min() >= 2.0 ** -(u.mantissa_bits + 1)
    assert steps.max() <= 2.0**-u.mantissa_bits


def test_the_mean_of_the_fourth_root_over_all_words_is_right():
    """To a ninth of what is lost by keeping the mean of the value: 1 / (1 + u) is taken to a twelfth."""
    fmt, m = whole(E5M3.name), E5M3.mantissa_bits
    words = (np.arange(65536, dtype=np.uint32) << np.uint32(16)) + np.uint32(0x8000)
    errors, linear = [], []
    for kept in range(2**m):
        for f in (1 / 32, 0.25, 0.5, 0.75, 31 / 32):
            below, above = (1 + kept / 2**m) ** 0.25, (1 + (kept + 1) / 2**m) ** 0.25
            x = np.full(65536, 1 + (kept + f) / 2**m, np.float32)
            mean = (fmt.decode(fmt.encode(x, words)).astype(np.float64) ** 0.25).mean()
            errors.append(abs(mean - float(x[0]) ** 0.25))
            linear.append(abs((1 - f) * below + f * above - float(x[0]) ** 0.25))
    assert max(errors) <= max(linear) / 9 + 2.0**-17


def test_what_unsigned_floats_hold_never_moves():
    fmt, codes = whole(E5M3.name), np.arange(1, 255, dtype=np.uint8)
    # The largest code needs the headroom of its block's maximum, the code below.
    x = fmt.decode(Encoded(codes, np.array([127], np.uint8)))[: 255 - 2**E5M3.mantissa_bits]
    for word in (0, 0xFFFFFFFF):
        stored = fmt.encode(x, np.full(x.shape, word, np.uint32))
        np.testing.assert_array_equal(fmt.decode(stored), x)


def test_the_eighth_root_is_the_root_to_two_units_of_2_24_and_on_average():
    rng = np.random.Generator(np.random.PCG64(3))
    y = (2.0 ** rng.uniform(-46, 2, 200_000)).astype(np.float32)
    root, inverse = eighth_root(y)
    error = root.astype(np.float64) / y.astype(np.float64) ** 0.125 - 1
    assert np.abs(error).max() <= 2.1 * 2.0**-24
    assert np.abs(inverse * y.astype(np.float64) ** 0.125 - 1).max() <= 2.0**-10
    # An average takes a thousand such roundings: a bias of all would show, which an error of each does not.
    assert abs(error.mean()) <= 2.0**-26


def test_the_codes_of_uroot8_are_evenly_spaced_in_the_eighth_root():
    codes = np.arange(256, dtype=np.uint8)
    values = whole("uroot8").decode(Encoded(codes, np.array([127], np.uint8))).astype(np.float64)
    # Seven roundings of 2^-24, four of them of what is then squared.
    np.testing.assert_allclose(values, ((codes + 6.0) / 261) ** 8, rtol=8 * 2.0**-24)


def test_what_uroot8_holds_never_moves():
    fmt, codes = whole("uroot8"), np.arange(256, dtype=np.uint8)
    x = fmt.decode(Encoded(codes, np.array([127], np.uint8)))
    for words in (None, *(np.full(x.shape, word, np.uint32) for word in (0, 0x10000, 0xFFFFFFFF))):
        np.testing.assert_array_equal(fmt.encode(x, words).codes, codes)


def test_the_mean_of_the_square_of_the_eighth_root_over_all_words_is_that_of_the_root():
    """So steps, which are nu^(-1/2), keep their length: the mean of the root would make them shorter."""
    words = (np.arange(65536, dtype=np.uint32) << np.uint32(16)) + np.uint32(0x8000)
    for value in (0.7, 0.31, 1e-4, 1e-9, 1e-11):
        x = np.full(65536, value, np.float32)
        x[0] = 1.0  # the block's maximum
        codes = whole("uroot8").encode(x, words).codes[1:].astype(np.float64) + 6
        # As for floats, two fields that count as their neighbours, and by how much the root may be off; what
        # is taken off a word is cut, and its 2 R stands for C + (C + 1): a square of 1/(8 C) by that.
        bound = 2.0**-17 + 2.0**-16 + 2.0**-16 + 261 * 2.1 * 2.0**-24 + 2.0**-17
        low = codes.min()
        due = 261.0**2 * float(x[1]) ** 0.25
        assert abs((codes**2).mean() - due) <= bound * (2 * low + 1) + (1 / (8 * low)) ** 2


@pytest.mark.parametrize("dtype", SIGNED)
def test_the_mean_over_all_words_is_the_value(dtype):
    """The top 16 bits of a word take every value once: the mean is off by 2^-17 of a gap at most."""
    words = (np.arange(65536, dtype=np.uint32) << np.uint32(16)) + np.uint32(0x8000)
    for value in (0.7, 0.31, 0.0123):
        x = np.full(65536, value, np.float32)
        x[0] = 1.0  # the block's maximum
        fmt = whole(dtype)
        decoded = fmt.decode(fmt.encode(x, words))[1:]
        neighbours = np.unique(decoded)
        assert neighbours.size <= 2
        gap = float(np.ptp(neighbours))
        # One word is spent on the maximum, so one in 65,536 is missing from the count.
        assert abs(decoded.astype(np.float64).mean() - float(x[1])) <= gap * (2.0**-17 + 2.0**-16)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_positive_second_moment_is_never_stored_as_zero(dtype, rounding):
    x = np.float32(2.0) ** np.arange(0, -60, -1, dtype=np.float32)
    words = random_words(0, 1, "nu", 2, x.shape) if rounding == "stochastic" else None
    fmt = whole(dtype)
    assert (fmt.decode(fmt.encode(x, words, keep_nonzero="always")) > 0).all()


@pytest.mark.parametrize("dtype", SCALED_CODES)
def test_nan_and_infinity_stay_in_their_block_or_their_code(dtype):
    x = np.full((3, 8), 0.5, np.float32)
    x[0, 2], x[1, 5] = np.nan, np.inf
    fmt = whole(dtype, 4)
    stored = fmt.encode(x, None)
    nan = np.isnan(fmt.decode(stored))
    if (stored.scale == NAN_SCALE).any():
        expected = np.zeros((3, 8), bool)
        expected[0, :4] = expected[1, 4:] = True
    else:
        expected = ~np.isfinite(x)
    np.testing.assert_array_equal(nan, expected)
    assert (dtype in ("int8", "uroot8", E5M3.name)) == (stored.scale == NAN_SCALE).any()


@pytest.mark.parametrize("dtype", [name for name in SCALED_CODES if name != "uroot8"])
def test_blocks_of_zeros_and_of_equal_values_are_exact(dtype):
    x = np.zeros((2, 256), np.float32)
    x[1] = 0.75
    fmt = whole(dtype, 128)
    np.testing.assert_array_equal(fmt.decode(fmt.encode(x, None)), x)


def test_block_maximum_passes_over_what_is_not_finite():
    x = np.array([[np.nan, -3, np.inf, 1], [np.nan] * 4], np.float32)
    np.testing.assert_array_equal(block_maximum(x, "row"), [[3], [0]])


# An EMA of g = 1 from 0 under nearest rounding: where one element stops, whose block's scale moves with it.
@pytest.mark.parametrize(
    ("dtype", "b", "stop"),
    [
        ("float8_e4m3fn", 0.9, 0.75),
        ("float8_e4m3fn", 0.99, 0.21875),
        ("float8_e4m3fn", 0.999, 0.0234375),
    ],
)
def test_nearest_averages_stop_where_the_unscaled_format_stops_or_below(dtype, b, stop):
    """A scale adds range, not precision: above the subnormal range the unscaled fixed points hold."""
    fmt = whole(dtype)
    x = np.zeros(1, np.float32)
    for _ in range(20000):
        new = fmt.decode(fmt.encode(ema(x, np.float32(1), b), None))
        if new == x:
            break
        x = new
    assert x[0] <= stop
    assert fmt.freezes(b) or x[0] == stop
