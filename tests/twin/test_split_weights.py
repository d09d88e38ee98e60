"""Weights in two parts, in both packages, as the reference cuts them: where 16 bits of a word decide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import halfstep_spec as spec
from halfstep.float_formats import FLOAT_FORMATS
from halfstep.weights.split_weights import SplitWeight
from halfstep_jax.numbers.arrays import JaxArrays
from halfstep_spec.weights.split_weights import SplitWeight as Reference
from halfstep_spec.weights.split_weights import nearest_away
from halfstep_torch.numbers.arrays import XP

COUNT = 1 << 14


def on_the_edge(fmt, extra_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 numbers down to 2^-45, and words around that from which on each is rounded up."""
    rng = np.random.default_rng(0)
    w = rng.uniform(1, 2, COUNT) * np.exp2(rng.integers(-45, 17, COUNT)) * rng.choice([-1, 1], COUNT)
    w = w.astype(np.float32)
    lowest, mantissa_bits = fmt.min_exponent, fmt.mantissa_bits + extra_bits
    multiples = np.ldexp(np.abs(w).astype(np.float64), mantissa_bits - np.maximum(np.frexp(w)[1] - 1, lowest))
    rounded = np.floor(multiples % 1 * 2**16 + 0.5)
    top = 2**16 - rounded - rng.integers(0, 2, COUNT)
    return w, (top % 2**16).astype(np.uint32) << 16 | rng.integers(0, 2**16, COUNT, np.uint32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("extra_bits", [8, 16])
@pytest.mark.parametrize("stochastic", [True, False])
def test_both_packages_cut_and_join_as_the_reference_does(dtype, extra_bits, stochastic):
    w, words = on_the_edge(FLOAT_FORMATS[dtype], extra_bits)
    due, kept = Reference(dtype, extra_bits).split(w, words) if stochastic else (None, None)
    split = SplitWeight(dtype, extra_bits)
    given = words.view(np.int32) if stochastic else None
    jax_parts = jax.jit(lambda w, words: split.split(JaxArrays(), w, words))(w, given)
    torch_parts = split.split(XP, torch.from_numpy(w), None if given is None else torch.from_numpy(given))
    made = [
        [np.asarray(part).astype(np.int32) & 0xFFFF for part in parts] for parts in (jax_parts, torch_parts)
    ]
    np.testing.assert_array_equal(made[0], made[1])
    if stochastic:
        np.testing.assert_array_equal(made[0], [due, kept])
    joined = Reference(dtype, extra_bits).join(
        made[0][0].astype(np.uint16), made[0][1].astype(f"uint{extra_bits}")
    )
    pattern, extra = made[0]
    in_jax = jax.jit(lambda p, extra: split.join(JaxArrays(), p, extra))(
        jnp.asarray(pattern), jnp.asarray(extra)
    )
    in_torch = split.join(XP, *(torch.from_numpy(part) for part in made[0]))
    for values in (np.asarray(in_jax), in_torch.numpy()):
        np.testing.assert_array_equal(values.view(np.uint32), joined.view(np.uint32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("extra_bits", [8, 16])
def test_every_weight_is_shown_as_it_is_set_beside_any_further_bits(dtype, extra_bits):
    """A weight may be set between two steps, and the further bits are then those of the weight before."""
    half = 1 << (extra_bits - 1)
    # Of float16 and 16 bits, float32 has no more than the upper 13.
    low = np.array([0, 8, half - 8, half, half + 8, 2 * half - 8], np.int32)
    pattern, extra = (x.ravel() for x in np.meshgrid(np.arange(1 << 16, dtype=np.int32), low))
    joined = Reference(dtype, extra_bits).join(pattern.astype(np.uint16), extra.astype(f"uint{extra_bits}"))
    p = spec.decode(pattern.astype(np.uint16), dtype)
    shown = spec.decode(nearest_away(joined, dtype), dtype)
    np.testing.assert_array_equal(shown, p)
    split = SplitWeight(dtype, extra_bits)
    in_jax = jax.jit(lambda p, extra: split.join(JaxArrays(), p, extra))(pattern, extra)
    in_torch = split.join(XP, torch.from_numpy(pattern), torch.from_numpy(extra))
    for values in (np.asarray(in_jax), in_torch.numpy()):
        np.testing.assert_array_equal(np.isnan(values), np.isnan(p))
        np.testing.assert_array_equal(
            values.view(np.uint32)[~np.isnan(p)], joined.view(np.uint32)[~np.isnan(p)]
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("extra_bits", [8, 16])
def test_every_nan_stays_nan_and_infinities_stay(dtype, extra_bits):
    patterns = np.array([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32)
    w = np.concatenate([patterns, patterns | np.uint32(1 << 31)]).view(np.float32)
    due = Reference(dtype, extra_bits).split(w, np.zeros(8, np.uint32))
    split, words = SplitWeight(dtype, extra_bits), np.zeros(8, np.int32)
    in_jax = split.split(JaxArrays(), jnp.asarray(w), jnp.asarray(words))
    in_torch = split.split(XP, torch.from_numpy(w), torch.from_numpy(words))
    for parts in (in_jax, in_torch):
        made = [np.asarray(part).astype(np.int32) & 0xFFFF for part in parts]
        np.testing.assert_array_equal(made, [np.asarray(part).astype(np.int32) & 0xFFFF for part in due])
    joined = np.asarray(split.join(XP, *(torch.from_numpy(np.asarray(x, np.int32)) for x in made)))
    np.testing.assert_array_equal(np.isnan(joined), np.isnan(w))
