"""Codebooks against exact fractions, published tables and sums over every word."""

from fractions import Fraction

import numpy as np
import pytest

from halfstep_spec.numbers.random_words import random_words
from halfstep_spec.storage.base_codes import NAN_SCALE
from halfstep_spec.storage.blocks import pack, unpack
from halfstep_spec.storage.formats import Encoded
from halfstep_spec.storage.state_dtypes import codebook
from halfstep_spec.storage.tables import TABLES, decode_table, encode_table

LOWEST = {"dynamic8": 23, "udynamic8": 24}


def midpoints_of_a_linspace(signed: bool) -> np.ndarray:
    """Return the 8-bit dynamic map as T. Dettmers et al. build it: means of neighbours in a linspace."""
    numbers = [np.float64([0, 1])]
    for i in range(7):
        edges = np.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)
        numbers += [means, -means] if signed else [means]
    return np.sort(np.concatenate(numbers))


@pytest.mark.parametrize(("name", "signed"), [("dynamic8", True), ("udynamic8", False)])
def test_tables_of_8_bits_are_the_dynamic_map(name, signed):
    """To float32's precision: the usual code computes in it, in some order."""
    ours, theirs = TABLES[name].values, midpoints_of_a_linspace(signed)
    assert ours.size == 256
    np.testing.assert_allclose(ours, theirs, rtol=2.0**-23)


@pytest.mark.parametrize("name", TABLES)
def test_numbers_are_the_nearest_float32_of_the_fractions(name):
    table = TABLES[name]
    assert len(set(table.exact)) == len(table.exact) == 256
    for exact, value in zip(table.exact, table.values, strict=True):
        neighbours = [np.nextafter(value, np.float32(end)) for end in (-2, 2)]
        off = abs(exact - Fraction(float(value)))
        assert all(off <= abs(exact - Fraction(float(x))) for x in neighbours)
    assert (np.diff(table.values) > 0).all()
    assert table.values[-1] == 1


@pytest.mark.parametrize("name", TABLES)
def test_lowest_bytes_are_those_of_the_contract(name):
    table = TABLES[name]
    smallest = np.abs(table.values[table.values != 0]).min()
    assert table.lowest == LOWEST[name]
    assert 2.0**-126 <= float(smallest) / 2 * 2.0 ** (table.lowest - 127) < 2.0**-125


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", TABLES)
def test_a_number_of_the_table_is_stored_as_itself(name, rounding):
    table = TABLES[name]
    for word in (0, 2**32 - 1):
        words = np.full(table.values.size, word, np.uint32) if rounding == "stochastic" else None
        codes = encode_table(table.values, words, table)
        assert np.unique(codes).size == codes.size
        np.testing.assert_array_equal(decode_table(codes, table), table.values)
    assert decode_table(np.zeros(1, np.uint8), table) == 0


@pytest.mark.parametrize("name", TABLES)
def test_nearest_is_the_nearer_neighbour(name):
    """To within the rounding of a difference, which is under 2^-23 of the larger neighbour."""
    table = TABLES[name]
    y = np.random.default_rng(0).uniform(table.values[0], 1, 20000).astype(np.float32)
    got = decode_table(encode_table(y, None, table), table).astype(np.float64)
    best = np.abs(table.values.astype(np.float64)[None] - y[:, None]).min(axis=1)
    assert (np.abs(got - y) <= best + 2.0**-23).all()


@pytest.mark.parametrize("name", TABLES)
def test_the_mean_over_every_field_is_the_value(name):
    """h takes 2^16 values, each from as many words. P(up) is f, rounded to a multiple of 2^-16: off by 2^-17.

    A product and two differences, each rounded by 2^-24 of itself, move that by less than 2^-22 of f.
    """
    table = TABLES[name]
    words = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    for j in range(0, table.values.size - 1, max(1, table.values.size // 8)):
        low, high = table.values[j : j + 2]
        for share in (0.0003, 0.31, 0.5, 0.97):
            y = np.float32(low + np.float32(share) * (high - low))
            if not low < y < high:
                continue
            got = decode_table(encode_table(np.full(words.size, y), words, table), table)
            ups = int((got == high).sum())
            assert ups == words.size - int((got == low).sum())
            exact = (Fraction(float(y)) - Fraction(float(low))) / (
                Fraction(float(high)) - Fraction(float(low))
            )
            off = abs(Fraction(ups, words.size) - exact)
            assert off <= Fraction(1, 2**17) + exact / 2**22, (name, j, share)


@pytest.mark.parametrize("name", TABLES)
def test_a_code_counts_the_gaps_that_the_value_is_rounded_up_in(name):
    """The form that needs no search, and no gather on an accelerator."""
    table = TABLES[name]
    y = np.random.default_rng(1).uniform(-1.2 if table.signed else 0, 1.2, 4000).astype(np.float32)
    words = random_words(0, 1, "w", 1, y.shape)
    h = ((2 * (words >> np.uint32(16)) + np.uint32(1)) * np.float32(2.0**-17)).astype(np.float32)
    low, gap = table.values[:-1], np.diff(table.values)
    count = (h[:, None] * gap < y[:, None] - low).sum(axis=1)
    np.testing.assert_array_equal((count - table.zero) % table.values.size, encode_table(y, words, table))


def shorter_end(table) -> np.float32:
    """Return the magnitude up to which there are numbers of every sign that a table has."""
    return -table.values[0] if table.signed else np.float32(1)


@pytest.mark.parametrize("name", TABLES)
def test_the_scale_is_the_smallest_under_which_the_maximum_fits_with_either_sign(name):
    fmt = codebook(name, None, 0, 0)
    for exponent in (-90, -3, 0, 100):
        fits = shorter_end(TABLES[name]) * np.float32(2.0**exponent)
        for top, expected in ((fits, 0), (np.nextafter(fits, np.float32(np.inf)), 1)):
            (byte,) = fmt.encode(np.array([top, 0], np.float32), None).scale
            assert byte == 127 + exponent + expected


@pytest.mark.parametrize("name", TABLES)
def test_no_decoded_value_is_subnormal_or_infinite(name):
    table, fmt = TABLES[name], codebook(name, None, 0, 0)
    for byte in (table.lowest, 253):
        codes = np.arange(table.values.size, dtype=np.uint8)
        values = np.abs(fmt.decode(Encoded(codes, np.array([byte], np.uint8), codes.shape)))
        assert np.isfinite(values).all()
        assert not ((values > 0) & (values < 2.0**-125)).any()


@pytest.mark.parametrize("name", TABLES)
def test_zeros_decode_to_zero(name):
    fmt = codebook(name, 4, 0, 0)
    stored = fmt.zeros((3, 7))
    assert not stored.codes.any()
    values = fmt.decode(stored)
    assert (values == 0).all()
    again = fmt.encode(values, None, keep_nonzero="never" if TABLES[name].signed else "always")
    np.testing.assert_array_equal(again.codes, stored.codes)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", TABLES)
def test_a_positive_second_moment_is_never_stored_as_zero(name, rounding):
    x = np.float32(2.0) ** np.arange(0, -60, -1, dtype=np.float32)
    words = random_words(0, 1, "nu", 2, x.shape) if rounding == "stochastic" else None
    fmt = codebook(name, None, 0, 0)
    assert (fmt.decode(fmt.encode(x, words, keep_nonzero="always")) > 0).all()


@pytest.mark.parametrize("name", TABLES)
def test_nan_and_infinity_mark_their_block(name):
    x = np.full((3, 8), 0.5, np.float32)
    x[0, 2], x[1, 5] = np.nan, np.inf
    fmt = codebook(name, 4, 0, 0)
    stored = fmt.encode(x, None)
    marked = np.zeros((3, 2), bool)
    marked[0, 0] = marked[1, 1] = True
    np.testing.assert_array_equal(stored.scale == NAN_SCALE, marked)
    np.testing.assert_array_equal(np.isnan(fmt.decode(stored)), np.repeat(marked, 4, axis=1))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_mean_of_a_block_s_largest_element_is_right(name, sign):
    """Over 4,096 words, evenly spread: a signed table that was scaled to 1 would cut what is near -1."""
    table, words = TABLES[name], np.arange(4096, dtype=np.uint32)[:, None] << np.uint32(20)
    if sign < 0 and not table.signed:
        return
    fmt = codebook(name, "row", 0, 0)
    for magnitude in np.linspace(0.45, 2, 60, dtype=np.float32):
        x = np.full((4096, 1), sign * magnitude, np.float32)
        mean = fmt.decode(fmt.encode(x, words)).astype(np.float64).mean()
        # The widest gap is 1/4 of a scale of at most 4; a sum over the words is off by one of them.
        assert abs(mean - x[0, 0]) <= 2 / 4096


@pytest.mark.parametrize(
    ("shape", "block_size", "packed"),
    [
        ((4, 6), "row", (4, 3)),
        ((4, 7), "row", (4, 4)),
        ((3, 7), None, (11,)),
        ((64, 32, 3, 3), 128, (64, 144)),
    ],
)
def test_two_codes_stand_in_a_byte_and_a_run_ends_with_one(shape, block_size, packed):
    codes = np.random.default_rng(0).integers(0, 16, shape).astype(np.uint8)
    bytes_ = pack(codes, block_size)
    assert bytes_.shape == packed
    assert bytes_.ravel()[0] == codes.ravel()[0] + 16 * codes.ravel()[1]
    np.testing.assert_array_equal(unpack(bytes_, shape, block_size), codes)
    if np.prod(shape) % 2 or shape == (4, 7):
        assert (bytes_[..., -1] < 16).all()


@pytest.mark.parametrize(
    ("name", "b", "freezes"),
    [
        ("dynamic8", 0.9, False),
        ("dynamic8", 0.95, True),
        ("udynamic8", 0.96, False),
        ("udynamic8", 0.97, True),
    ],
)
def test_nearest_freezes_where_half_a_gap_of_the_top_decade_is_wider(name, b, freezes):
    assert codebook(name).freezes(b) == freezes


@pytest.mark.parametrize("name", TABLES)
def test_where_nearest_is_allowed_every_number_of_the_top_decade_decays(name):
    """And where it is refused, one does not. Beside a block's maximum, which holds its scale."""
    table, fmt = TABLES[name], codebook(name, "row", 0, 0)
    end = shorter_end(table)
    numbers = table.values[(table.values >= 0.1) & (table.values <= end)][1:]
    x = np.stack([numbers, np.full_like(numbers, end)], axis=1)
    for share, allowed in ((1.001, True), (0.999, False)):
        b = np.float32(1 - share * table.half_gap)
        assert fmt.freezes(b) != allowed
        decayed = x.copy()
        decayed[:, 0] *= b
        moved = fmt.decode(fmt.encode(decayed, None))[:, 0] < numbers
        assert moved.all() == allowed


def test_what_is_no_table_is_refused():
    with pytest.raises(ValueError, match="dynamic3"):
        codebook("dynamic3")
    assert codebook("dynamic8", 7).block_size == 7
