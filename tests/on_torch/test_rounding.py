"""Rounding: the spec's on patterns of all kinds, unbiased over all words, and idempotent."""

import functools

import numpy as np
import pytest
import torch

import halfstep_spec as spec
import halfstep_torch as hs
from backends.on_torch import from_torch
from compare import assert_same
from halfstep_spec.numbers.float_formats import FLOAT_FORMATS
from halfstep_spec.vectors import Array
from halfstep_torch.numbers.exact import is_tame, sqrt
from halfstep_torch.weights.weight_rule import apply_updates, landed, landing

TARGETS = tuple(FLOAT_FORMATS)
NARROW = [name for name, fmt in FLOAT_FORMATS.items() if fmt.bits < 32]
_CUTS = (
    0x00000000,
    0x33800000,
    0x387FC000,
    0x38800000,
    0x3B000000,
    0x43E00000,
    0x477FE000,
    0x7F7F0000,
    0x7F800000,
)


@functools.cache
def patterns_and_words() -> tuple[np.ndarray, np.ndarray]:
    """Draw float32 patterns, any or near where some format changes its mind; and words, ends too."""
    rng = np.random.default_rng(0)
    near = rng.integers(-3, 4, 20_000) << rng.integers(0, 21, 20_000)
    close = ((rng.choice(np.int64(_CUTS), 20_000) + near) & 0xFFFFFFFF).astype(np.uint32)
    bits = np.concatenate([rng.integers(0, 2**32, 20_000, np.uint32), close, close ^ np.uint32(0x80000000)])
    words = rng.integers(0, 2**32, bits.size, np.uint32)
    words[::8], words[1::8] = 0, 2**32 - 1
    return bits, words


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("dtype", TARGETS)
def test_rounding_is_that_of_the_spec(dtype, saturate, stochastic):
    bits, words = patterns_and_words()
    x = bits.view(np.float32)
    expected = spec.round_to(x, dtype, words if stochastic else None, saturate=saturate)
    given_words = torch.from_numpy(words.copy()) if stochastic else None
    ours = hs.round_to(torch.from_numpy(x.copy()), dtype, given_words, saturate=saturate)
    assert_same(from_torch(ours, dtype), Array(dtype, expected))


def middles(dtype: str) -> np.ndarray:
    """Return float32 values that `dtype` does not hold, normal and subnormal in it, of either sign."""
    fmt = FLOAT_FORMATS[dtype]
    codes = np.array([0, 1, fmt.max_code // 3, fmt.max_code - 1], np.int64)
    low, high = (spec.decode(c.astype(fmt.code_dtype), dtype).astype(np.float64) for c in (codes, codes + 1))
    # float32 holds these exactly: float16, the finest of them, leaves 13 bits to discard.
    between = [low + (high - low) * np.float64(part) / 8192 for part in (1, 4097, 8191)]
    x = np.concatenate(between).astype(np.float32)
    return np.concatenate([x, -x])


def numbers(rounded: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the values of what was rounded, some of it to patterns, in float64."""
    return torch.from_numpy(spec.decode(from_torch(rounded, dtype).bits, dtype)).double()


@pytest.mark.parametrize("dtype", NARROW)
def test_stochastic_rounding_is_unbiased_over_all_65536_words(dtype):
    # The words (k << 16) | 0x8000 sample [0, 2^32) evenly: where j / 65536 is discarded, j of them round up,
    # so that the mean is the value itself, and float64 holds every partial sum.
    words = torch.from_numpy(((np.arange(65536, dtype=np.int64) << 16) | 0x8000).astype(np.uint32))
    for value in middles(dtype).tolist():
        rounded = numbers(hs.round_to(torch.full((65536,), value), dtype, words), dtype)
        low, high = rounded.min().item(), rounded.max().item()
        assert low < value < high
        assert ((rounded == low) | (rounded == high)).all()
        assert rounded.mean().item() == value


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_value_of_the_format_stays_where_it_is_under_any_word(dtype, saturate):
    fmt = FLOAT_FORMATS[dtype]
    codes = np.arange(2**fmt.bits, dtype=np.int64).astype(np.uint8 if fmt.bits == 8 else np.uint16)
    x = spec.decode(codes, dtype)
    finite = np.isfinite(x)
    for word in (None, 0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
        words = None if word is None else torch.from_numpy(np.full(x.shape, word, np.uint32))
        ours = from_torch(hs.round_to(torch.from_numpy(x), dtype, words, saturate=saturate))
        np.testing.assert_array_equal(ours.bits[finite], codes[finite])


@pytest.mark.parametrize("nan", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000])
@pytest.mark.parametrize("dtype", TARGETS)
def test_nan_stays_nan_under_any_word(dtype, nan):
    x = torch.from_numpy(np.full(3, nan, np.uint32).view(np.float32))
    for words in (None, torch.tensor([0, -1, 2**31 - 1], dtype=torch.int32)):
        assert numbers(hs.round_to(x, dtype, words), dtype).isnan().all()


def test_rounding_works_on_slices_scalars_and_nothing():
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    for part in (x[:, ::2], x.T, x[0, 0], x[:0]):
        words = hs.random_words(0, 1, "w", 0, tuple(part.shape))
        ours = hs.round_to(part, "bfloat16", words)
        theirs = hs.round_to(part.contiguous(), "bfloat16", words)
        assert torch.equal(ours, theirs)
        assert ours.shape == part.shape


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_far_from_the_ends_are_rounded_alike_alone(dtype, saturate, stochastic):
    bits, words = patterns_and_words()
    x = torch.from_numpy(bits.view(np.float32).copy())
    far = x.abs() < 2.0**126
    drawn = torch.from_numpy(words.view(np.int32).copy()) if stochastic else None
    every = torch.cat([x, torch.tensor([torch.inf])])
    together = hs.round_to(
        every, dtype, None if drawn is None else torch.cat([drawn, drawn[:1]]), saturate=saturate
    )
    alone = hs.round_to(x[far], dtype, None if drawn is None else drawn[far], saturate=saturate)
    assert is_tame(x[far])
    assert not is_tame(every)
    kind = torch.int16 if dtype == "bfloat16" else torch.int32
    assert torch.equal(alone.view(kind), together[:-1][far].view(kind))


_ENDS = [0, 1, 0x3F80, 0x3F81, 0x3780, 0x0080, 0x7E7F, 0x7E80, 0x7F7F, 0x7F80, 0x7FC0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_lands_where_its_update_takes_it(dtype):
    ends = torch.tensor([end - sign for end in _ENDS for sign in (0, 1 << 15)]).to(torch.int16)
    p, q = (x.flatten().view(dtype).float() for x in torch.meshgrid(ends, ends, indexing="ij"))
    expected = apply_updates(p, landing(p, q), dtype).view(torch.int16)
    for i in range(len(p)):  # alone, as what is beside an element decides how it is computed
        at = slice(i, i + 1)
        assert torch.equal(landed(p[at], q[at], dtype).view(torch.int16), expected[at]), (p[at], q[at])


def test_roots_are_rounded_correctly():
    bits = torch.randint(
        0, 0x7F800001, (1 << 16,), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    x = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, torch.inf])])
    assert torch.equal(sqrt(x).view(torch.int32), x.double().sqrt().float().view(torch.int32))
    assert sqrt(torch.tensor([-1.0, torch.nan])).isnan().all()
