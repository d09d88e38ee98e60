"""Moments in units of a root: the bound, zeros, fine scales and dither, against exact arithmetic."""

import math

import numpy as np
import pytest

from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.lion import ScaleByLion
from halfstep_spec.storage.formats import Encoded
from halfstep_spec.storage.relative import bound, relative
from halfstep_spec.storage.state_dtypes import codebook, scaled

FORMATS = {
    "e3m4": relative("float8_e3m4"),
    "int8, blocks": relative("int8", 8, 0, 0),
    "int4, blocks": relative("int4", 8, 0, 0),
}
_SHAPE = (4, 16)


def _normal(seed: int, shape=_SHAPE) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape).astype(np.float32)


def _adam(mu, **others) -> ScaleByAdam:
    return ScaleByAdam(mu_dtype=mu, nu_dtype="ufloat16_e7m9", mu_rounding="auto", **others)


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.999), (0.95, 0.999), (0.9, 0.99), (0.0, 0.5)])
def test_the_bound_is_reached_by_gradients_that_grow_as_cauchy_and_schwarz_say(b1, b2):
    m = v = 0.0
    for k in reversed(range(400)):
        g = (b1 / b2) ** k
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    assert math.isclose(m / math.sqrt(v), bound(b1, b2), rel_tol=1e-9)


def test_there_is_no_bound_where_the_first_average_is_the_longer_one():
    assert bound(0.9, 0.81) == bound(0.99, 0.9) == math.inf


@pytest.mark.parametrize("name", FORMATS)
def test_a_coordinate_without_gradients_never_moves(name):
    rule = _adam(FORMATS[name])
    state = rule.init(_SHAPE)
    for t in range(6):
        g = _normal(t)
        g[1] = 0
        u, state = rule.step(g, state, "w")
        assert (u[1] == 0).all()
        assert (u[0] != 0).any()


@pytest.mark.parametrize(("name", "most"), [("e3m4", 0.07), ("int8, blocks", 0.05)])
def test_steps_are_near_those_in_float32(name, most):
    """An error of a rounding of z: a 32nd of it, or a 32nd of one, of every element; nu is float32."""
    rule = ScaleByAdam(mu_dtype=FORMATS[name], mu_rounding="auto")
    exact, state = ScaleByAdam(), rule.init(_SHAPE)
    truth = exact.init(_SHAPE)
    for t in range(10):
        u, state = rule.step(_normal(t), state, "w")
        due, truth = exact.step(_normal(t), truth, "w")
    assert np.linalg.norm(u - due) < most * np.linalg.norm(due)


def test_z_is_the_quotient_by_the_root_of_what_was_stored():
    rule = ScaleByAdam(mu_dtype=relative("float8_e3m4"), nu_dtype="ufloat16_e7m9", mu_rounding="nearest")
    g = np.full((1,), 0.3, np.float32)
    _, state = rule.step(g, rule.init((1,)), "w")
    v = rule.moments["nu"].decode(state.moments["nu"], 1, "w")
    z = np.float32(0.1) * g / np.sqrt(v)  # 3.1, of which e3m4 times 1/2 holds every eighth
    assert abs(float(state.moments["mu"].codes[0] & 0x0F) / 16 + 1 - float(z[0]) / 2) <= 1 / 32


@pytest.mark.parametrize("byte", range(100, 104))
def test_what_fine_integers_hold_never_moves(byte):
    """Under each of the four significands of a scale, all integers; the largest makes the scale."""
    fmt = scaled("int8", "row", 0, 0, "fine")
    codes = np.arange(-127, 128).astype(np.int8).view(np.uint8)
    codes = np.stack([codes, np.full_like(codes, 127)], 1)
    x = fmt.decode(Encoded(codes, np.full((255, 1), byte, np.uint8)))
    for words in (None, np.zeros(x.shape, np.uint32), np.full(x.shape, 0xFFFFFFFF, np.uint32)):
        np.testing.assert_array_equal(fmt.decode(fmt.encode(x, words)), x)


def test_a_fine_scale_is_at_most_a_quarter_above_what_fits():
    fmt = scaled("int8", "row", 0, 0, "fine")
    tops = np.abs(_normal(3, (300, 1))) * np.float32(100)
    stored = fmt.encode(tops, None)
    largest = fmt.decode(stored._replace(codes=np.full((300, 1), 127, np.uint8)))
    assert (largest >= tops * (1 - 2.0**-23)).all()
    assert (largest <= tops * 1.25 * (1 + 2.0**-23)).all()


def test_past_the_largest_fine_scale_a_block_is_nan():
    fmt = scaled("int8", "row", 0, 0, "fine")
    stored = fmt.encode(np.array([[127 * 1.5 * 2.0**13], [127 * 1.6 * 2.0**13]], np.float32), None)
    assert stored.scale.tolist() == [[254], [255]]
    assert np.isnan(fmt.decode(stored)).tolist() == [[False], [True]]


def test_the_mean_over_all_dithers_is_the_value():
    """Every dither of 11 bits once: the mean is off by half of their distance at most."""
    fmt = relative("int4", "row", 0, 0)
    x = np.repeat(np.array([[7.0, 0.3, -2.71, 1.5, 0.0625, 0.0]], np.float32), 2048, axis=0)
    # Alike throughout a block, which is a row.
    words = np.repeat(
        (np.arange(2048, dtype=np.uint32)[:, None] << np.uint32(21)) + np.uint32(1 << 20), 6, axis=1
    )
    values = fmt.decode(fmt.encode(x, words), words).astype(np.float64)
    np.testing.assert_allclose(values.mean(0)[1:4], x[0, 1:4], rtol=0, atol=2.0**-12)
    assert (values[:, 4:] == 0).all()  # the dead zone ends at 1/16
    assert np.abs(values - x)[:, 1:4].max() <= 0.5 + 2.0**-16


def test_what_is_barely_beyond_the_dead_zone_is_dithered():
    fmt = relative("int4", "row", 0, 0)
    x = np.array([[7.0, np.nextafter(np.float32(0.0625), np.float32(1))]], np.float32)
    assert fmt.decode(fmt.encode(x, np.zeros(x.shape, np.uint32)), np.zeros(x.shape, np.uint32))[0, 1] != 0


def test_to_nearest_int4_has_no_dither():
    fmt = relative("int4", "row", 0, 0)
    stored = fmt.encode(np.array([[7, -6.6, 0.4, 0, 1e-30]], np.float32), None)
    np.testing.assert_array_equal(fmt.decode(stored), [[7, -7, 0, 0, 0]])


def test_what_cannot_be_is_refused():
    e3m4 = relative("float8_e3m4")
    with pytest.raises(ValueError, match="ScaleByLion: mu_dtype is relative, and mu has no second moment"):
        ScaleByLion(mu_dtype=e3m4).init((2,))
    with pytest.raises(ValueError, match="nu_dtype is relative, and nu has no second moment"):
        ScaleByAdam(nu_dtype=e3m4).init((2,))
    with pytest.raises(ValueError, match=r"reaches 22.9 roots of nu at b1=0.9 and b2=0.9999"):
        _adam(e3m4, b2=0.9999).init((2,))
    with pytest.raises(ValueError, match="reaches inf roots"):
        _adam(e3m4, b1=0.99, b2=0.9).init((2,))
    for name in ("int4", "int8"):
        with pytest.raises(ValueError, match=f"dtype={name} with block_size=None is none of"):
            relative(name)
    for nu in ("float16", scaled("int8"), codebook("dynamic8")):
        with pytest.raises(ValueError, match="cannot hold a second moment"):
            ScaleByAdam(nu_dtype=nu).init((2,))


@pytest.mark.parametrize(
    ("dtype", "b", "short"),
    [
        ("bfloat16", 0.9, True),
        ("float32", 0.9, False),
        (scaled("float16"), 0.9, True),
        ("float16", 0.6, True),
    ],
)
def test_auto_is_nearest_only_where_an_average_ends_within_a_thousandth(dtype, b, short):
    rule = ScaleByLion(mu_dtype=dtype, mu_rounding="auto", b2=b)
    stored = rule.moments["mu"]
    assert stored.rounds_stochastically(stored.format((64, 64))) == short
