"""Rounding: the spec's on patterns of all kinds, whose bias and fixed points `tests/spec` looks at."""

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
from halfstep_torch.numbers.exact import is_tame, looking_at_numbers, sqrt
from halfstep_torch.weights.weight_rule import applied, apply_updates, update_between

TARGETS = tuple(FLOAT_FORMATS)
_CUTS = (0, 0x33800000, 0x387FC000, 0x38800000, 0x3B000000, 0x43E00000, 0x477FE000, 0x7F7F0000, 0x7F800000)
_NANS = (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000)


@functools.cache
def patterns_and_words() -> tuple[np.ndarray, np.ndarray]:
    """Draw patterns: any, near where a format changes its mind, held by one; and words, ends too."""
    rng = np.random.default_rng(0)
    near = rng.integers(-3, 4, 20_000) << rng.integers(0, 21, 20_000)
    close = ((rng.choice(np.int64(_CUTS), 20_000) + near) & 0xFFFFFFFF).astype(np.uint32)
    held = [spec.decode(np.arange(2**16, dtype=np.uint16), name) for name in ("bfloat16", "float16")]
    drawn = [rng.integers(0, 2**32, 20_000, np.uint32), close, close ^ np.uint32(0x80000000)]
    bits = np.concatenate([*drawn, *(x.view(np.uint32) for x in held), np.repeat(np.uint32(_NANS), 16)])
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
    with looking_at_numbers():
        alone = hs.round_to(x[far], dtype, None if drawn is None else drawn[far], saturate=saturate)
        assert is_tame(x[far])
        assert not is_tame(every)
    assert not is_tame(x[far])
    kind = torch.int16 if dtype == "bfloat16" else torch.int32
    assert torch.equal(alone.view(kind), together[:-1][far].view(kind))


_ENDS = [0, 1, 0x3F80, 0x3F81, 0x3780, 0x0080, 0x7E7F, 0x7E80, 0x7F7F, 0x7F80, 0x7FC0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_lands_where_its_update_takes_it(dtype):
    ends = torch.tensor([end - sign for end in _ENDS for sign in (0, 1 << 15)]).to(torch.int16)
    p, q = (x.flatten().view(dtype).float() for x in torch.meshgrid(ends, ends, indexing="ij"))
    expected = apply_updates(p, update_between(p, q), dtype).view(torch.int16)
    for i in range(len(p)):  # alone, as what is beside an element decides how it is computed
        at = slice(i, i + 1)
        with looking_at_numbers():
            landed = applied(p[at], q[at], dtype).view(torch.int16)
        assert torch.equal(landed, expected[at]), (p[at], q[at])


def test_roots_are_rounded_correctly():
    bits = torch.randint(
        0, 0x7F800001, (1 << 16,), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    x = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, torch.inf])])
    assert torch.equal(sqrt(x).view(torch.int32), x.double().sqrt().float().view(torch.int32))
    assert sqrt(torch.tensor([-1.0, torch.nan])).isnan().all()
