"""Rounding gives the bits of the reference, for every target, mode and pattern."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfstep_jax as hs
import halfstep_spec as spec
from backends.on_jax import from_jax
from compare import assert_same
from halfstep_jax.storage.formats import Encoded, Format
from halfstep_spec.vectors import Array

TARGETS = tuple(spec.FLOAT_FORMATS)
NARROW = TARGETS[1:]
ROUND = jax.jit(hs.round_to, static_argnames=("dtype", "saturate"))

# Upper half-words of every exponent with crowded lower halves: ties, their neighbours, both ends.
EDGES = (
    np.arange(0, 2**16, 37, dtype=np.uint32)[:, None] << 16
    | np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
).ravel()
SPECIALS = np.array(
    [0, 1, 0x007FFFFF, 0x00800000, 0x33000000, 0x33000001, 0x33800000, 0x387FC000, 0x387FE000, 0x387FFFFF,
    0x38800000,
     0x43E00000, 0x43E80000, 0x43E80001, 0x43F00000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47600000,
     0x47700000, 0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000,
     0x7FFFFFFF],
    np.uint32,
)  # fmt: skip
PATTERNS = np.concatenate([EDGES, SPECIALS, SPECIALS | np.uint32(0x80000000)])
WORDS = {
    "nearest": None,
    "zeros": np.zeros(PATTERNS.size, np.uint32),
    "ones": np.full(PATTERNS.size, 0xFFFFFFFF, np.uint32),
    "random": np.random.default_rng(3).integers(0, 2**32, PATTERNS.size, dtype=np.uint32),
}


def check(round_to, patterns, dtype, words, saturate):
    actual = round_to(patterns.view(np.float32), dtype=dtype, words=words, saturate=saturate)
    expected = spec.round_to(patterns.view(np.float32), dtype, words, saturate=saturate)
    assert_same(from_jax(actual), Array.of(expected, dtype), f"{dtype} {saturate}")


@pytest.mark.parametrize("dtype", TARGETS)
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_edges_and_specials_round_as_in_the_reference(dtype, saturate, words):
    for round_to in (ROUND, hs.round_to):
        check(round_to, PATTERNS, dtype, words, saturate)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16),
    words=st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16),
    dtype=st.sampled_from(TARGETS),
    saturate=st.booleans(),
)
def test_any_pattern_under_any_word_rounds_as_in_the_reference(bits, words, dtype, saturate):
    patterns = np.array(bits, np.uint32)
    check(ROUND, patterns, dtype, np.array(words, np.uint32), saturate)
    check(ROUND, patterns, dtype, None, saturate)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("saturate", [False, True])
def test_every_upper_half_word_rounds_as_in_the_reference(dtype, saturate):
    rng = np.random.default_rng(5)
    patterns = (np.arange(2**16, dtype=np.uint32)[:, None] << 16) | rng.integers(
        0, 2**16, (2**16, 24), np.uint32
    )
    words = rng.integers(0, 2**32, patterns.size, dtype=np.uint32)
    for chosen in (None, words):
        check(ROUND, patterns.ravel(), dtype, chosen, saturate)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_representable_value_never_moves(dtype):
    width = jnp.dtype(dtype).itemsize * 8
    codes = np.arange(2**width, dtype=f"u{width // 8}").view(getattr(ml_dtypes, dtype, np.float16))
    values = np.asarray(codes, np.float32)
    for word in (0, 1, 0x80000000, 0xFFFFFFFF):
        words = np.full(values.shape, word, np.uint32)
        assert_same(from_jax(ROUND(values, dtype=dtype, words=words)), from_jax(codes))
    assert_same(from_jax(ROUND(values, dtype=dtype)), from_jax(codes))


def gap(x, dtype) -> float:
    """Return the distance of the two values of `dtype` around x."""
    limits = jnp.finfo(dtype)
    exponent = max(int(np.floor(np.log2(abs(float(x))))), int(limits.minexp))
    return 2.0 ** (exponent - int(limits.nmant))


# The word's top bits decide, so a run over all upper half-words sees every outcome as often as it happens.
ALL_TOP_HALVES = np.arange(2**16, dtype=np.uint32) << 16


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("bits", [0x3F812340, 0xBF812300, 0x38101200, 0x3C7F0100, 0x00012300, 0x33412000])
def test_stochastic_rounding_is_unbiased_over_all_words(dtype, bits):
    x = np.array([bits], np.uint32).view(np.float32)[0]
    rounded = np.asarray(ROUND(np.full(2**16, x), dtype=dtype, words=ALL_TOP_HALVES))
    values = sorted({float(v) for v in rounded.astype(np.float64)}, key=abs)
    down, up = values[0], values[-1]
    share = np.count_nonzero(rounded.astype(np.float64) == up) / 2**16
    if down == up:
        # So near to one of them that no upper half-word is enough to carry: within 2^-16 of the gap.
        assert abs(float(x) - down) < gap(x, dtype) * 2**-16
    elif jnp.dtype(dtype) == jnp.bfloat16 or abs(float(x)) >= float(jnp.finfo(dtype).smallest_normal):
        # At most 16 discarded bits for bfloat16; for the others these inputs end in zeros enough.
        assert down + share * (up - down) == float(x)
    else:
        # Some 2^16 words cannot show more than 16 bits of a fraction that has more.
        assert abs(down + share * (up - down) - float(x)) < abs(up - down) * 2**-16


def test_all_words_sum_to_the_exact_total():
    rng = np.random.default_rng(11)
    for bits in rng.integers(0x00800000, 0x7F000000, 20, dtype=np.uint32):
        x = np.array([bits], np.uint32).view(np.float32)[0]
        rounded = np.asarray(ROUND(np.full(2**16, x), dtype="bfloat16", words=ALL_TOP_HALVES), np.float64)
        # Exact in float64: values of 8 bits in one binade, 2^16 of them.
        assert rounded.sum() == float(x) * 2**16


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_is_monotone_and_symmetric(dtype):
    x = np.sort(PATTERNS[np.isfinite(PATTERNS.view(np.float32))].view(np.float32))
    for word in (None, 0x12345678):
        words = None if word is None else np.full(x.shape, word, np.uint32)
        y = np.asarray(ROUND(x, dtype=dtype, words=words, saturate=True), np.float32)
        assert (np.diff(y) >= 0).all()
        np.testing.assert_array_equal(
            -np.asarray(ROUND(-x, dtype=dtype, words=words, saturate=True), np.float32), y
        )


class VariantsTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    def test_rounding_is_the_same_with_and_without_jit_and_on_a_device(self):
        @self.variant
        def all_targets(x, words):
            return [
                hs.round_to(x, d, w, saturate=s)
                for d in TARGETS
                for w in (None, words)
                for s in (False, True)
            ]

        x = PATTERNS[::29].view(np.float32)
        words = WORDS["random"][::29]
        outputs = iter(all_targets(x, words))
        for dtype in TARGETS:
            for chosen in (None, words):
                for saturate in (False, True):
                    expected = spec.round_to(x, dtype, chosen, saturate=saturate)
                    assert_same(from_jax(next(outputs)), Array.of(expected, dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_stored_moment_decodes_to_what_it_is(dtype):
    codes = np.arange(2**16, dtype=np.uint16)
    stored = Encoded(jnp.asarray(codes.view(getattr(ml_dtypes, dtype, np.float16))), None)
    for decode in (Format(dtype).decode, jax.jit(Format(dtype).decode)):
        assert_same(from_jax(decode(stored)), Array.of(spec.decode(codes, dtype), "float32"))


def test_targets_go_by_name_and_by_dtype():
    for dtype in ("bfloat16", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16):
        assert hs.round_to(1.001, dtype) == 1.0
    for x in (1.001, np.float32(1.001), jnp.float32(1.001), np.float16(1.0), jnp.bfloat16(1.0)):
        assert hs.round_to(x, "float16").dtype == jnp.float16
