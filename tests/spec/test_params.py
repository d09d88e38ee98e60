"""Weight rules: what each keeps, over many small steps and over every tie."""

import numpy as np
import pytest

from halfstep_spec.numbers.random_words import Role, random_words
from halfstep_spec.numbers.rounding import decode, round_to
from halfstep_spec.weights.narrow_weights import Compensate
from halfstep_spec.weights.split_weights import SplitWeight, nearest_away
from halfstep_spec.weights.weight_rule import apply_updates

DTYPES = ["bfloat16", "float16"]


def weights(count: int, exponents=(-12, 12)) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64(3))
    return (
        rng.choice([-1, 1], count) * (1 + rng.random(count)) * 2.0 ** rng.integers(*exponents, count)
    ).astype(np.float32)


def words(count: int, step: int = 1) -> np.ndarray:
    return random_words(0, step, "w", Role.PARAM, (count,))


def test_bfloat16_and_sixteen_bits_are_float32_itself():
    """Every low half over several high halves, ties and both kinds of infinity among them."""
    low = np.arange(65536, dtype=np.uint32)
    high = np.array([0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x0001, 0x0080, 0x7F7F, 0xFF7F], np.uint32)
    w = ((high[:, None] << 16) | low).ravel().view(np.float32)
    split = SplitWeight("bfloat16", 16)
    for word in (0, 2**32 - 1):
        p, extra = split.split(w, np.full(w.size, word, np.uint32))
        np.testing.assert_array_equal(split.join(p, extra).view(np.uint32), w.view(np.uint32))
        np.testing.assert_array_equal(p, nearest_away(w, "bfloat16"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_shown_weight_is_nearest_with_ties_away_from_zero(dtype):
    w = weights(100_000)
    p, _ = SplitWeight(dtype, 16).split(w, words(w.size))
    even = decode(round_to(w, dtype), dtype)
    shown = decode(p, dtype)
    ties = shown != even
    assert (np.abs(shown[~ties] - w[~ties]) <= np.abs(even[~ties] - w[~ties])).all()
    assert (np.abs(shown[ties] - w[ties]) == np.abs(even[ties] - w[ties])).all()
    assert (np.abs(shown[ties]) > np.abs(w[ties])).all()
    half = np.array([0x3F808000, 0xBF808000, 0x3F818000], np.uint32).view(np.float32)
    np.testing.assert_array_equal(nearest_away(half, "bfloat16"), [0x3F81, 0xBF81, 0x3F82])


def test_float16_and_sixteen_bits_hold_float32_where_float16_is_normal():
    w = weights(100_000, (-14, 15))
    split = SplitWeight("float16", 16)
    np.testing.assert_array_equal(split.join(*split.split(w, words(w.size))), w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bits_lose_nothing_on_average(dtype):
    """One value under 65,536 different words; the unit is 2^-15 (bfloat16) or 2^-18 of the binade."""
    w = np.full(65536, 1.2345678, np.float32)
    top = (np.arange(65536, dtype=np.uint32) << np.uint32(16)) + np.uint32(0x8000)
    split = SplitWeight(dtype, 8)
    joined = split.join(*split.split(w, top)).astype(np.float64)
    unit = 2.0**-15 if dtype == "bfloat16" else 2.0**-18
    assert np.abs(joined - float(w[0])).max() < unit
    assert abs(joined.mean() - float(w[0])) < unit * 2.0**-16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extra_bits", [8, 16])
def test_nan_stays_nan_and_infinity_stays_infinity(dtype, extra_bits):
    patterns = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000], np.uint32)
    split = SplitWeight(dtype, extra_bits)
    p, extra = split.split(patterns.view(np.float32), np.full(6, 2**32 - 1, np.uint32))
    for values in (decode(p, dtype), split.join(p, extra)):
        assert np.isnan(values[:4]).all()
        np.testing.assert_array_equal(values[4:], [np.inf, -np.inf])


def compensated(dtype: str, size: float, steps: int) -> float:
    """Return how far `steps` updates of `size` carry a weight of 1 and its compensation."""
    storage, p = Compensate(dtype), round_to(np.ones(1, np.float32), dtype)
    compensation = storage.init(p)
    for _ in range(steps):
        u, compensation = storage.emit(p, np.full(1, size, np.float32), compensation, words(1))
        p = apply_updates(p, u, dtype)
    return float((storage.join(p, compensation) - 1)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "size"), [("bfloat16", 2.0**-14), ("bfloat16", 2.0**-16), ("float16", 2.0**-18)]
)
def test_compensation_carries_updates_that_nearest_loses(dtype, size):
    """Powers of two, of which the compensation holds every sum exactly: nothing at all is lost."""
    one = round_to(np.ones(1, np.float32), dtype)
    assert (apply_updates(one, np.full(1, size, np.float32), dtype) == one).all()
    assert compensated(dtype, size, 2048) == 2048 * size


def test_compensation_ends_where_it_cannot_hold_its_own_sum():
    """Half a unit of a bfloat16 weight of 1 is 2^-8; a compensation of 2^-10 no longer takes 2^-18."""
    assert compensated("bfloat16", 2.0**-18, 2048) == 2.0**-10


@pytest.mark.parametrize(("dtype", "mantissa_bits", "lowest"), [("bfloat16", 7, -126), ("float16", 10, -14)])
def test_a_compensation_of_more_than_half_a_unit_of_its_weight_is_ignored(dtype, mantissa_bits, lowest):
    """It is of the weight that stood there before, which another has set since."""
    storage = Compensate(dtype)
    for number in (1.0, -1.984375, 0.0, 2.0**lowest, 2.0 ** (lowest - 3), 0.375):
        exponent = max(lowest, int(np.floor(np.log2(abs(number)))) if number else lowest)
        half = 2.0 ** (exponent - mantissa_bits - 1)
        p = round_to(np.full(6, number, np.float32), dtype)
        c = round_to(np.array([half, -half, half * 1.0078125, -2 * half, np.nan, 0], np.float32), "bfloat16")
        due = np.float32(number) + np.append(decode(c[:2], "bfloat16"), np.zeros(4, np.float32))
        np.testing.assert_array_equal(storage.join(p, c), due)
        u, _ = storage.emit(p, np.full(6, -0.0, np.float32), c, words(6))
        np.testing.assert_array_equal(apply_updates(p, u, dtype)[2:], p[2:])


def test_a_compensation_carries_no_weight_past_a_zero_that_the_update_leads_to():
    p, c = (
        round_to(np.full(3, 3.0, np.float32), "bfloat16"),
        round_to(np.float32([-(2.0**-7)] * 3), "bfloat16"),
    )
    left = np.array([0, 2.0**-12, 1.0], np.float32)
    u, _ = Compensate("bfloat16").emit(p, left - 3, c, words(3))
    after = decode(apply_updates(p, u, "bfloat16"), "bfloat16")
    np.testing.assert_array_equal(after, [0, 2.0**-12, 1 - 2.0**-7])
