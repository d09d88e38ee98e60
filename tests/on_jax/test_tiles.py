"""What only a TPU runs, run here: the same values as what everything else runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.storage.base_codes import NAN_SCALE
from halfstep_jax.numbers.arrays import _marked_by_bits, _marked_by_select
from halfstep_jax.storage import tiles
from halfstep_jax.storage.blocks import (
    _maximum,
    _of_maximum_on_tpu,
    _packed,
    _packed_on_tpu,
    _repeated,
    _repeated_on_tpu,
    _unpacked_on_tpu,
)
from halfstep_jax.storage.codes import CODES

# The last two stand on end, and one of them cannot be cut in eights.
_SHAPES = ((16, 512), (3, 16, 256), (9, 300), (2, 3, 5, 130), (300,), (1024, 200), (512, 133))
_SCALES = {**CODES["scaled"], **{f"fine {name}": codes for name, codes in CODES["fine"].items()}}


def _magnitudes(shape):
    rng = np.random.default_rng(0)
    x = np.abs(rng.standard_normal(shape)) * np.exp2(rng.integers(-140, 100, shape))
    x.flat[:: x.size // 3] = np.inf
    return jnp.asarray(x, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "block"), [*((shape, 128) for shape in _SHAPES), ((16, 512), 512)])
def test_scales_of_blocks_are_the_same_in_the_order_of_a_tpu(shape, block):
    rows = _magnitudes(shape)
    scale = CODES["scaled"]["ufloat8_e5m3"].scale
    assert {*np.asarray(scale(_maximum(rows, block))).flat} >= {NAN_SCALE}
    np.testing.assert_array_equal(_of_maximum_on_tpu(scale, rows, block, True), scale(_maximum(rows, block)))


@pytest.mark.parametrize("codes", _SCALES.values(), ids=_SCALES)
def test_a_larger_magnitude_has_no_smaller_scale(codes):
    magnitudes = jnp.sort(_magnitudes((50_000,)))
    scales = np.asarray(codes.scale(magnitudes)).astype(int)
    assert (np.diff(scales) >= 0).all()
    assert np.unique(scales).size > 100


@pytest.mark.parametrize(("shape", "block"), [*((shape, 128) for shape in _SHAPES), ((16, 512), 512)])
def test_scales_of_elements_are_the_same_in_the_order_of_a_tpu(shape, block):
    blocks = -(-shape[-1] // block)
    scales = jnp.asarray(np.random.default_rng(1).integers(0, 256, (*shape[:-1], blocks)), jnp.uint8)
    expected = _repeated(scales, block)[..., : shape[-1]]
    np.testing.assert_array_equal(_repeated_on_tpu(scales, shape, block, True), expected)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*_SHAPES[:4], (3, 13, 256), (9, 768)])
def test_codes_of_four_bits_are_packed_the_same_by_a_product(shape):
    codes = jnp.asarray(np.random.default_rng(2).integers(0, 16, shape), jnp.uint8)
    packed = _packed(codes)
    np.testing.assert_array_equal(_packed_on_tpu(codes), packed)
    np.testing.assert_array_equal(_unpacked_on_tpu(packed), codes)


def test_every_byte_is_unpacked_by_a_product():
    packed = jnp.arange(256, dtype=jnp.uint8).reshape(2, 128)
    halves = np.stack([packed & 15, packed >> 4], -1).reshape(2, 256)
    np.testing.assert_array_equal(_unpacked_on_tpu(packed), halves)
    assert "dot_general" in str(jax.make_jaxpr(_unpacked_on_tpu)(packed))


def test_the_order_of_a_tpu_is_really_taken():
    assert tiles.cut_by_blocks((16, 512), 128)
    assert tiles.cut_by_blocks((15, 512), 128)
    assert not tiles.cut_by_blocks((16, 512), 64)
    assert not tiles.cut_by_blocks((15, 512), 512)
    assert [tiles.on_end(shape) for shape in _SHAPES if len(shape) > 1][-3:] == [False, True, True]


@pytest.mark.parametrize("one_axis", [True, False])
def test_maxima_of_blocks_go_by_tiles_but_where_the_array_itself_is_on_end(one_axis):
    def maxima(rows):
        return _of_maximum_on_tpu(lambda x: x, rows, 128, one_axis)

    by_tiles = ["transpose" in str(jax.make_jaxpr(maxima)(jnp.zeros(shape))) for shape in _SHAPES]
    assert by_tiles == [True, True, True, True, False, not one_axis, not one_axis]


def test_a_marked_block_is_nan_to_the_bit_by_bits():
    scale = jnp.arange(256, dtype=jnp.uint8)
    for down in range(16):
        field = scale.astype(jnp.uint32) - np.uint32(down)
        by_bits, selected = _marked_by_bits(scale, field), _marked_by_select(scale, field)
        np.testing.assert_array_equal(
            np.asarray(by_bits).view(np.uint32)[down:], np.asarray(selected).view(np.uint32)[down:]
        )
        assert np.isnan(by_bits[NAN_SCALE])


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_codes_are_the_same_selected_as_floats(dtype):
    codes = CODES["scaled"][dtype]
    bits = jnp.arange(256 if dtype.startswith("float8") else 65536).astype(codes._bits)
    finite = jnp.arange(bits.size) % 3 > 0
    as_bits, as_floats = codes._select_bits(finite, bits), codes._select_floats(finite, bits)
    nan = jnp.isnan(as_bits)
    np.testing.assert_array_equal(nan, jnp.isnan(as_floats))
    same = np.asarray(as_bits).view(np.uint8) == np.asarray(as_floats).view(np.uint8)
    assert (same.reshape(bits.size, -1).all(axis=1) | np.asarray(nan)).all()
