"""What only a TPU runs, run here: the same values as what everything else runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep_jax.storage.blocks import (
    _fills_tiles,
    _maximum,
    _maximum_by_tiles,
    _packed,
    _packed_by_tiles,
    _repeated,
    _repeated_by_tiles,
    _unpacked_by_tiles,
)
from halfstep_jax.storage.codes import SCALED_CODES

_SHAPES = ((16, 512), (3, 16, 256), (9, 300), (2, 3, 5, 130), (300,))


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("block", [128])
def test_maxima_of_blocks_are_the_same_in_the_order_of_a_tpu(shape, block):
    rows = jnp.asarray(np.random.default_rng(0).random(shape, np.float32))
    np.testing.assert_array_equal(_maximum_by_tiles(rows, block), _maximum(rows, block))


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("block", [128])
def test_scales_of_elements_are_the_same_in_the_order_of_a_tpu(shape, block):
    blocks = -(-shape[-1] // block)
    scales = jnp.asarray(np.random.default_rng(1).integers(0, 256, (*shape[:-1], blocks)), jnp.uint8)
    np.testing.assert_array_equal(_repeated_by_tiles(scales, block), _repeated(scales, block))


@pytest.mark.parametrize("shape", [*_SHAPES, (3, 13, 256), (9, 768)])
def test_codes_of_four_bits_are_packed_the_same_by_a_product(shape):
    codes = jnp.asarray(np.random.default_rng(2).integers(0, 16, shape), jnp.uint8)
    packed = _packed(codes)
    np.testing.assert_array_equal(_packed_by_tiles(codes), packed)
    np.testing.assert_array_equal(_unpacked_by_tiles(packed), codes)


def test_every_byte_is_unpacked_by_a_product():
    packed = jnp.arange(256, dtype=jnp.uint8).reshape(2, 128)
    halves = np.stack([packed & 15, packed >> 4], -1).reshape(2, 256)
    np.testing.assert_array_equal(_unpacked_by_tiles(packed), halves)
    assert "dot_general" in str(jax.make_jaxpr(_unpacked_by_tiles)(packed))


def test_the_order_of_a_tpu_is_really_taken():
    assert _fills_tiles((16, 512), 128)
    assert not _fills_tiles((16, 512), 64)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_codes_are_the_same_selected_as_floats(dtype):
    codes = SCALED_CODES[dtype]
    bits = jnp.arange(256 if dtype.startswith("float8") else 65536).astype(codes._bits)
    finite = jnp.arange(bits.size) % 3 > 0
    as_bits, as_floats = codes._select_bits(finite, bits), codes._select_floats(finite, bits)
    nan = jnp.isnan(as_bits)
    np.testing.assert_array_equal(nan, jnp.isnan(as_floats))
    same = np.asarray(as_bits).view(np.uint8) == np.asarray(as_floats).view(np.uint8)
    assert (same.reshape(bits.size, -1).all(axis=1) | np.asarray(nan)).all()
