"""The 16-bit float without a sign: its numbers, and how it rounds to them."""

import numpy as np

from halfstep_spec.storage.formats import Encoded, Format
from halfstep_spec.storage.unsigned_halves import LARGEST, NAN_CODE

FORMAT = Format("ufloat16_e7m9")
LAST = 127 * 512 - 1
NUMBERS = FORMAT.decode(Encoded(np.arange(LAST + 1, dtype=np.uint16), None))


def test_the_codes_are_127_binades_of_512_numbers():
    exponents = np.repeat(np.arange(-79, 48), 512)
    due = np.ldexp(1 + np.tile(np.arange(512), 127) / 512, exponents)
    np.testing.assert_array_equal(NUMBERS, due.astype(np.float32))
    assert (NUMBERS[0], NUMBERS[-1]) == (2.0**-79, LARGEST)


def test_what_the_format_holds_never_moves():
    for words in (None, np.zeros(NUMBERS.shape, np.uint32), np.full(NUMBERS.shape, 0xFFFFFFFF, np.uint32)):
        np.testing.assert_array_equal(FORMAT.encode(NUMBERS, words).codes, np.arange(LAST + 1))


def test_the_mean_over_all_words_is_the_value():
    words = np.arange(65536, dtype=np.uint32) << np.uint32(16)
    for x in (np.float32(1e-20), np.float32(0.7123), np.float32(3e5 + 77)):
        decoded = FORMAT.decode(FORMAT.encode(np.full(words.shape, x), words)).astype(np.float64)
        gap = np.ptp(decoded)
        assert 2.0**-10 * x < gap <= 2.0**-9 * x
        assert abs(decoded.mean() - float(x)) <= gap * 2.0**-14


def test_nearest_rounding_takes_even_codes_at_ties():
    ties = (NUMBERS[:-1] + NUMBERS[1:]) / 2
    below = np.arange(LAST)
    np.testing.assert_array_equal(FORMAT.encode(ties, None).codes, below + below % 2)


def test_small_numbers_are_raised_and_those_past_the_largest_are_nan():
    small = np.array([0, -0.0, 1e-45, 1e-38, np.nextafter(NUMBERS[0], np.float32(0))], np.float32)
    past = np.array([np.nextafter(LARGEST, np.float32(np.inf)), 3e38, np.inf, np.nan, -np.nan], np.float32)
    for words in (None, np.full(5, 0xFFFFFFFF, np.uint32)):
        assert (FORMAT.encode(small, words).codes == 0).all()
        assert (FORMAT.encode(past, words).codes == NAN_CODE).all()
    assert np.isnan(FORMAT.decode(Encoded(np.array([NAN_CODE], np.uint16), None))).all()
