"""Second moments as fourth roots, and first moments in units of a power of two, against exact arithmetic."""

import numpy as np
import pytest

from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.lion import ScaleByLion
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.fourth_root_codes import FLOOR, inverse_root, power_of_root
from halfstep_spec.storage.relative import relative

ROOT, MU_LAW = Format("uroot4_e4m4"), relative("mulaw8")
_CODES = np.arange(256, dtype=np.uint8)
_NUMBERS = ROOT.codes.decode(_CODES, None)[:255]
# All that rounding reads: the top 16 bits of a word.
_WORDS = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)


def _adam(**options) -> ScaleByAdam:
    given = {"mu_dtype": MU_LAW, "nu_dtype": "uroot4_e4m4", "mu_rounding": "auto"} | options
    return ScaleByAdam(**given)


def _encoded(fmt: Format, x, words) -> np.ndarray:
    return fmt.encode(np.asarray(x, np.float32), words).codes


@pytest.mark.parametrize("fmt", [ROOT, MU_LAW], ids=lambda fmt: fmt.dtype)
def test_a_number_that_is_a_code_keeps_it(fmt):
    numbers = fmt.codes.decode(_CODES, None)
    for words in (None, np.full(256, 1 << 31, np.uint32)):
        codes = _encoded(fmt, numbers, words)
        assert (codes == _CODES).all()


def test_a_fourth_power_is_exact():
    roots = (_CODES[:255].astype(np.uint32) + np.uint32(1833) << np.uint32(19)).view(np.float32)
    assert (_NUMBERS.astype(np.float64) == roots.astype(np.float64) ** 4).all()


def test_the_mean_of_the_fourth_root_is_kept():
    """Newton's steps err by 10 patterns of 2^19 in a gap, and half of 2^16 draws is missing at the end."""
    for v in np.exp(np.random.default_rng(0).uniform(np.log(_NUMBERS[1]), np.log(_NUMBERS[-2]), 40)):
        x = np.full(_WORDS.shape, v, np.float32)
        roots = _NUMBERS[_encoded(ROOT, x, _WORDS)].astype(np.float64) ** 0.25
        gap = roots.max() - roots.min()
        assert abs(roots.mean() - np.float64(x[0]) ** 0.25) <= gap * (10 * 2.0**-19 + 2.0**-17)


def test_the_inverse_root_errs_by_less_than_two_millionths():
    """It is never asked below the smallest number, and a spike may be anything."""
    v = np.exp(np.random.default_rng(0).uniform(np.log(FLOOR), np.log(3e38), 1 << 18)).astype(np.float32)
    assert (np.abs(inverse_root(v) * np.sqrt(v.astype(np.float64)) - 1) < 2e-6).all()


@pytest.mark.parametrize("b2", [0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.99999, 0.999999])
def test_without_gradients_no_code_falls_below_the_smallest(b2):
    n = _adam(b2=b2).numbers(1)
    v = np.float32(b2) * _NUMBERS + (n.rest * np.float32(0) + n.floor)
    # What an encoder that raises nothing would make of it: its codes are the same.
    assert (v > FLOOR).all()
    y = np.sqrt(inverse_root(v).astype(np.float64))
    assert (v * y**3 > np.float64(FLOOR) ** 0.25 * (1 + 10 * 2.0**-23)).all()


def test_the_root_of_a_number_is_at_least_its_power_of_two_and_below_two_and_a_quarter():
    ratio = np.sqrt(_NUMBERS.astype(np.float64)) / power_of_root(_CODES[:255])
    assert ratio.min() == 1
    assert ratio.max() < 2.25


def test_finite_numbers_saturate_and_what_is_not_finite_is_loud():
    x = np.array([2e4, 3e38, np.inf, np.nan, -np.nan], np.float32)
    for words in (np.zeros(5, np.uint32), np.full(5, 2**32 - 1, np.uint32), None):
        assert _encoded(ROOT, x, words).tolist() == [254, 254, 255, 255, 255]
    rule = _adam()
    with np.errstate(all="ignore"):
        for g in (np.inf, -np.inf, np.nan, 2e19):
            u, state = rule.step(np.full((1,), g, np.float32), rule.init((1,)), "w")
            assert not np.isfinite(u).any()
            u, _ = rule.step(np.zeros(1, np.float32), state, "w")
            assert np.isnan(u).all()


@pytest.mark.parametrize("mu_dtype", [MU_LAW, relative("float8_e3m4")], ids=lambda fmt: fmt.dtype)
@pytest.mark.parametrize("spike", [1e3, 1e6])
def test_no_step_after_a_spike_is_longer_than_eight(spike, mu_dtype):
    """Gradients of 10: a thousand times them is past the largest second moment, whose root is 132."""
    rule, rng = _adam(mu_dtype=mu_dtype), np.random.default_rng(0)
    state = rule.init((256,))
    for t in range(300):
        g = rng.standard_normal(256).astype(np.float32) * 10
        u, state = rule.step(g * np.float32(spike) if t == 100 else g, state, "w")
        assert np.abs(u).max() < 8


@pytest.mark.parametrize("median", [1e-5, 1.0, 30.0])
def test_steady_gradients_move_weights_as_in_float32(median):
    """By 1 each step; an element's second moment is a tenth off for long: the mean errs by a thousandth."""
    rule, sizes = _adam(), np.exp(0.3 * np.random.default_rng(0).standard_normal(8192))
    state, moved, g = rule.init((8192,)), 0.0, (median * sizes).astype(np.float32)
    for _ in range(300):
        u, state = rule.step(g, state, "w")
        moved += u.mean(dtype=np.float64)
    assert moved / 300 == pytest.approx(1, abs=4e-3)


def test_eps_enters_under_the_root():
    u, _ = _adam(eps=3.0).step(np.full((1,), 4.0, np.float32), _adam().init((1,)), "w")
    assert u == pytest.approx(4 / 5, rel=3e-3)


def test_the_unit_is_refused_without_its_second_moment_and_beyond_its_bound():
    with pytest.raises(ValueError, match="in units of a power of two that nu in uroot4_e4m4 gives"):
        _adam(nu_dtype="bfloat16").init((4,))
    with pytest.raises(ValueError, match="nu_dtype=uroot4_e4m4 stops at its largest number"):
        _adam(mu_dtype="bfloat16").init((4,))
    with pytest.raises(ValueError, match=r"reaches 22\.9 roots of nu"):
        _adam(b2=0.9999).init((4,))
    with pytest.raises(ValueError, match="mu_dtype is relative, and mu has no second moment"):
        ScaleByLion(mu_dtype=MU_LAW).init((4,))
