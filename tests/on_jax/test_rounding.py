"""Rounding gives the bits of the reference, whose bias, order and fixed points `tests/spec` looks at."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import halfstep_jax as hs
import halfstep_spec as spec
from backends.on_jax import from_jax
from compare import assert_same
from halfstep_jax.storage.formats import Encoded, Format
from halfstep_spec.vectors import Array

TARGETS = tuple(spec.FLOAT_FORMATS)
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
RNG = np.random.default_rng(3)
HELD = [spec.decode(np.arange(2**16, dtype=np.uint16), name) for name in ("bfloat16", "float16")]
DRAWN = RNG.integers(0, 2**32, 50_000, np.uint32)
PATTERNS = np.concatenate(
    [EDGES, SPECIALS, SPECIALS | np.uint32(0x80000000), *(x.view(np.uint32) for x in HELD), DRAWN]
)
WORDS = {
    "nearest": None,
    "zeros": np.zeros(PATTERNS.size, np.uint32),
    "ones": np.full(PATTERNS.size, 0xFFFFFFFF, np.uint32),
    "random": RNG.integers(0, 2**32, PATTERNS.size, dtype=np.uint32),
}


def check(round_to, patterns, dtype, words, saturate):
    actual = round_to(patterns.view(np.float32), dtype=dtype, words=words, saturate=saturate)
    expected = spec.round_to(patterns.view(np.float32), dtype, words, saturate=saturate)
    assert_same(from_jax(actual), Array.of(expected, dtype), f"{dtype} {saturate}")


@pytest.mark.parametrize("dtype", TARGETS)
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_patterns_of_all_kinds_round_as_in_the_reference(dtype, saturate, words):
    for round_to in (ROUND, hs.round_to):
        check(round_to, PATTERNS, dtype, words, saturate)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TARGETS[1:])
@pytest.mark.parametrize("saturate", [False, True])
def test_every_upper_half_word_rounds_as_in_the_reference(dtype, saturate):
    rng = np.random.default_rng(5)
    patterns = (np.arange(2**16, dtype=np.uint32)[:, None] << 16) | rng.integers(
        0, 2**16, (2**16, 24), np.uint32
    )
    words = rng.integers(0, 2**32, patterns.size, dtype=np.uint32)
    for chosen in (None, words):
        check(ROUND, patterns.ravel(), dtype, chosen, saturate)


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
