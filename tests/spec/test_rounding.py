"""Rounding against exact fractions, and against ml_dtypes over every code."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS
from halfstep_spec.numbers.random_words import random_words
from halfstep_spec.numbers.rounding import decode, round_to

FORMATS = sorted(name for name, fmt in FLOAT_FORMATS.items() if fmt.bits < 32)
DTYPES = {name: np.dtype(np.float16 if name == "float16" else getattr(ml_dtypes, name)) for name in FORMATS}
PATTERNS = st.integers(0, 2**32 - 1)


def every_code(name: str) -> np.ndarray:
    return np.arange(2 ** FLOAT_FORMATS[name].bits, dtype=FLOAT_FORMATS[name].code_dtype)


def number(pattern: int) -> np.ndarray:
    return np.array([pattern], np.uint32).view(np.float32)


def grid(name: str) -> list[Fraction]:
    """Every non-negative finite value of a format, ascending, and the one that would come next."""
    fmt = FLOAT_FORMATS[name]
    values = decode(every_code(name)[: fmt.max_code + 1], name)
    exact = [Fraction(float(value)) for value in values]
    return [*exact, 2 * exact[-1] - exact[-2]]


GRIDS = {name: grid(name) for name in FORMATS}


def neighbours(x: float, name: str) -> tuple[int, Fraction]:
    """Return the code of the value at or below |x|, and how far |x| is into the gap above it, exactly."""
    values, size = GRIDS[name], abs(Fraction(x))
    below = np.searchsorted(np.array(values, object), size, side="right") - 1
    below = min(int(below), len(values) - 2)
    return below, (size - values[below]) / (values[below + 1] - values[below])


@pytest.mark.parametrize("name", FORMATS)
def test_decode_agrees_with_ml_dtypes_on_every_code(name):
    codes = every_code(name)
    theirs = codes.view(DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(decode(codes, name), theirs)
    np.testing.assert_array_equal(np.signbit(decode(codes, name)), np.signbit(theirs))


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_is_a_fixed_point_under_every_word(name):
    codes = every_code(name)
    values = decode(codes, name)
    codes, values = codes[~np.isnan(values)], values[~np.isnan(values)]
    for word in (None, 0, 1, 2**31, 2**32 - 1):
        words = None if word is None else np.full(values.shape, word, np.uint32)
        np.testing.assert_array_equal(round_to(values, name, words), codes)


@pytest.mark.parametrize("name", FORMATS)
def test_nearest_agrees_with_ml_dtypes_casts(name):
    """Every upper half of a pattern, with lower halves at and around the ties."""
    low = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = ((np.arange(2**16, dtype=np.uint32)[:, None] << 16) | low).ravel().view(np.float32)
    with np.errstate(all="ignore"):
        theirs = x.astype(DTYPES[name])
    ours = round_to(x, name)
    nan = np.isnan(theirs.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(decode(ours, name)), nan)
    np.testing.assert_array_equal(ours[~nan], theirs.view(ours.dtype)[~nan])


@pytest.mark.parametrize("name", FORMATS)
@given(pattern=PATTERNS, word=PATTERNS)
def test_stochastic_goes_up_just_when_the_fraction_in_16_bits_and_the_word_carry(name, pattern, word):
    x = number(pattern)
    if not np.isfinite(x[0]):
        return
    below, fraction = neighbours(float(x[0]), name)
    fmt = FLOAT_FORMATS[name]
    if fraction >= 1:  # past the gap above the largest finite value
        expected = fmt.overflow_code
    else:
        expected = below + (int(fraction * 2**16 + Fraction(1, 2)) + (word >> 16) >= 2**16)
    code = int(round_to(x, name, np.array([word], np.uint32))[0])
    assert code & (2 ** (fmt.bits - 1) - 1) == expected
    assert code >> (fmt.bits - 1) == pattern >> 31


@pytest.mark.parametrize("name", FORMATS)
@given(pattern=PATTERNS)
def test_nearest_is_the_exact_nearest_with_ties_to_even(name, pattern):
    x = number(pattern)
    if not np.isfinite(x[0]):
        return
    below, fraction = neighbours(float(x[0]), name)
    fmt = FLOAT_FORMATS[name]
    up = fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and below % 2 == 1)
    code = int(round_to(x, name)[0]) & (2 ** (fmt.bits - 1) - 1)
    assert code == min(below + up, fmt.overflow_code)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_the_mean_over_all_fields_is_exactly_the_value(name):
    """Unbiasedness is proved, not sampled: every field of 16 bits once, summed exactly."""
    words = np.arange(2**16, dtype=np.uint64) << np.uint64(16)
    for pattern in (0x3F800001, 0x3F80ABCD, 0xBF923456, 0x40FFFFFF, 0x3DCCCCCD):
        x = number(pattern)
        rounded = decode(round_to(np.repeat(x, words.size), name, words.astype(np.uint32)), name)
        counted = zip(*np.unique(rounded, return_counts=True), strict=True)
        total = sum((Fraction(float(value)) * int(times) for value, times in counted), Fraction(0))
        assert total == Fraction(float(x[0])) * words.size


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(pattern=PATTERNS)
def test_the_chance_to_go_up_is_the_fraction_to_within_2_to_the_minus_17(name, pattern):
    """Of the 65,536 fields of a word as many as the fraction says, rounded: counted by their threshold."""
    x = number(pattern)
    if not np.isfinite(x[0]) or neighbours(float(x[0]), name)[1] >= 1:
        return
    below, fraction = neighbours(float(x[0]), name)
    stays, goes = -1, 2**16
    while goes - stays > 1:
        middle = (stays + goes) // 2
        code = int(round_to(x, name, np.array([middle << 16], np.uint32))[0])
        up = code & (2 ** (FLOAT_FORMATS[name].bits - 1) - 1) == below + 1
        stays, goes = (stays, middle) if up else (middle, goes)
    assert abs(Fraction(2**16 - goes, 2**16) - fraction) <= Fraction(1, 2**17)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 2.0**-15, 2.0**-18])
def test_eight_bit_rounding_is_unbiased_in_and_below_the_subnormal_range(name, scale):
    """z < 5 over 2^20 of our own words; variance f (1 - f) per element, in units of the gap."""
    words = random_words(1, 1, name, 0, (2**20,))
    x = np.full(words.shape, 1.3 * scale, np.float32)
    below, fraction = neighbours(float(x[0]), name)
    codes = round_to(x, name, words)
    ups = int((codes != below).sum())
    assert set(np.unique(codes)) <= {below, below + 1}
    spread = max(float(words.size * fraction * (1 - fraction)) ** 0.5, 1.0)
    assert abs(ups - float(words.size * fraction)) < 5 * spread


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("word", [None, 0, 2**32 - 1])
def test_nan_stays_nan_and_infinity_follows_the_rule(name, word):
    fmt = FLOAT_FORMATS[name]
    nans = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    words = None if word is None else np.full(4, word, np.uint32)
    for saturate in (False, True):
        assert np.isnan(decode(round_to(nans, name, words, saturate=saturate), name)).all()
    infinity = np.full(4, -np.inf, np.float32)
    sign = 1 << (fmt.bits - 1)
    assert (round_to(infinity, name, words) == sign | fmt.overflow_code).all()
    assert np.isnan(decode(round_to(infinity, name, words, saturate=True), name)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_states_stop_at_the_largest_finite_value(name):
    x = np.array([3.4028235e38, -3.4028235e38], np.float32)
    largest = decode(
        np.array([FLOAT_FORMATS[name].max_code], np.uint16 if "8_" not in name else np.uint8), name
    )[0]
    for words in (None, np.full(2, 2**32 - 1, np.uint32)):
        np.testing.assert_array_equal(
            decode(round_to(x, name, words, saturate=True), name), [largest, -largest]
        )
