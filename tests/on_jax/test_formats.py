"""State formats: codes, scales and decoded values are those of the reference, in every cut and mode."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import halfstep_jax as hs
import halfstep_spec as spec
from backends.on_jax import from_jax
from compare import assert_same
from halfstep.float_formats import FLOAT_FORMATS
from halfstep.storage.floats import numbers_of
from halfstep.storage.state_dtypes import SCALED_DTYPES
from halfstep_jax.numbers.arrays import JaxArrays
from halfstep_jax.storage.float_codes import cast
from halfstep_jax.storage.formats import Encoded, Format
from halfstep_spec.vectors import Array
from on_jax.steps import EIGHT, FOUR, FP8, assert_same_in_every_mode, assert_trees_same

UNSIGNED = [name for name, codes in (spec.SCALED_CODES | spec.PLAIN_CODES).items() if not codes.signed]
ALL = list(dict.fromkeys((*SCALED_DTYPES, *UNSIGNED)))


def format_of(dtype, block_size=128):
    """Return the format that takes arrays of any size."""
    return Format(dtype) if dtype not in SCALED_DTYPES else hs.scaled(dtype, block_size, 0, 0)


def spec_format(fmt: Format) -> spec.Format:
    return spec.Format(**dataclasses.asdict(fmt))


def values(shape, seed: int, *, positive: bool) -> np.ndarray:
    """Return float32 over 60 binades, with zeros, extremes and, in some rows, what is not finite."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-50, 10, shape))).astype(np.float32)
    x[0] = 0
    x[1] *= np.float32(2.0**100)
    x[2, ::3] = np.nextafter(np.float32(448), np.float32(rng.choice([0, 1000])))
    x[3, 5], x[4, -1], x[5, 0] = np.nan, np.inf, -np.inf
    x[6] = rng.choice(np.float32([0.0, -0.0, 1.0, 127.0, 3.4e38]), x[6].shape)
    return np.where(x < 0, -x, x) if positive else x


def test_a_cast_as_on_tpu_reads_the_numbers_that_integers_read():
    patterns = np.arange(256, dtype=np.uint8)
    read = np.asarray(
        numbers_of(JaxArrays(), jnp.asarray(patterns, jnp.int32), FLOAT_FORMATS["float8_e4m3fn"])
    )
    numbers = np.asarray(cast(jnp.asarray(patterns.view(ml_dtypes.float8_e4m3fn))))
    stored = ~np.isinf(numbers)  # of infinity the code is that of NaN
    np.testing.assert_array_equal(numbers[stored], read[stored])


@pytest.mark.parametrize("keep_nonzero", ["never", "always"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", ALL)
def test_codes_scales_and_values_are_those_of_the_reference(dtype, rounding, keep_nonzero):
    """Formats without a sign are given second moments alone."""
    positive = keep_nonzero == "always" or dtype in UNSIGNED
    fmt = format_of(dtype)
    encode = jax.jit(functools.partial(fmt.encode, keep_nonzero=keep_nonzero))
    for seed in range(3):
        x = values((16, 200), seed, positive=positive)
        words = spec.random_words(seed, 1, "w", 1, x.shape) if rounding == "stochastic" else None
        expected = spec_format(fmt).encode(x, words, keep_nonzero=keep_nonzero)
        stored = encode(jnp.asarray(x), words)
        assert_same(from_jax(stored.codes), Array.of(expected.codes, fmt.code_dtype), dtype)
        if fmt.scaled:
            assert_same(from_jax(stored.scale), Array.of(expected.scale), dtype)
        decoded = spec_format(fmt).decode(expected)
        assert_same(from_jax(jax.jit(fmt.decode)(stored)), Array.of(decoded), dtype)


CUTS = [*itertools.product([(4, 3, 5, 7)], [1, 3, 8, 100, 128, 4096, "row", None])]
CUTS += [*itertools.product([(300,), (), (0, 8)], [8, "row", None]), ((5, 1), "row"), ((9, 7), "row")]
OF_BYTES = [*itertools.product(["float8_e4m3fn", "dynamic8"], CUTS)]
OF_TWO_TO_A_BYTE = [("int4", cut) for cut in CUTS if cut[1] not in (1, 3, None)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cut"), OF_BYTES + OF_TWO_TO_A_BYTE, ids=str)
def test_every_cut_into_blocks_and_bytes_is_that_of_the_reference(name, cut):
    shape, block_size = cut
    function = {"float8_e4m3fn": "scaled", "dynamic8": "codebook", "int4": "relative"}[name]
    fmt, reference = (getattr(package, function)(name, block_size, 0, 0) for package in (hs, spec))
    x = np.abs(np.random.default_rng(0).standard_normal(shape)).astype(np.float32)
    encode, expected = jax.jit(lambda x: fmt.encode(x, None)), reference.encode(x, None)
    stored = encode(jnp.asarray(x))
    assert stored.codes.shape == fmt.code_shape(shape)
    assert_same(from_jax(stored.codes), Array.of(expected.codes, fmt.code_dtype))
    assert_same(from_jax(stored.scale), Array.of(expected.scale))
    assert_same(from_jax(jax.jit(fmt.decode)(stored)), Array.of(reference.decode(expected)))
    assert_trees_same(fmt.zeros_like(jnp.asarray(x)), encode(jnp.zeros(shape)))


@pytest.mark.parametrize("dtype", SCALED_DTYPES)
def test_every_code_under_every_scale_is_decoded_as_in_the_reference(dtype):
    """But for codes that are never stored: infinity, -128, and anything but 0 in a marked block."""
    fmt = format_of(dtype, "row")
    codes = np.arange(65536 if dtype == "float16" else 256).astype(
        "uint16" if dtype == "float16" else "uint8"
    )
    if dtype in spec.FLOAT_FORMATS:
        float_format = spec.FLOAT_FORMATS[dtype]
        infinite = codes & (2 ** (float_format.bits - 1) - 1) == float_format.overflow_code
        codes = codes[~infinite]
    if dtype == "int8":
        codes = codes[codes != 128]
    low, high = spec.SCALED_CODES[dtype].scale_range
    scales = np.array([low, low + 1, 100, 127, 150, high - 1, high], np.uint8)[:, None]
    table = np.broadcast_to(codes, (scales.size, codes.size)).copy()
    given = table.view(getattr(ml_dtypes, dtype, fmt.code_dtype))
    decoded = jax.jit(fmt.decode)(Encoded(jnp.asarray(given), jnp.asarray(scales)))
    assert_same(from_jax(decoded), Array.of(spec_format(fmt).decode(spec.Encoded(table, scales))), dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "formats",
    [FP8, EIGHT, FOUR, {"mu_dtype": hs.scaled("int8", "row"), "nu_dtype": hs.scaled("float16", 100)}],
    ids=["fp8", "codebook", "4 bits", "mixed"],
)
def test_op_by_op_compiled_and_over_devices_give_the_same_bits(formats):
    assert_same_in_every_mode(hs.adamw(1e-3, weight_decay=0.1, seed=3, **formats))
