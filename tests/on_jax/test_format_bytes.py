"""What state formats cost: bytes per parameter, small leaves, shards and trees of scales."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import halfstep_jax as hs
from on_jax.steps import E4M3, E5M3, EIGHT, FOUR, FP8, assert_no_collectives, sharded, take_step, weights


@pytest.mark.slow
@pytest.mark.parametrize(("formats", "columns"), [(FP8, 256), (FOUR, 128)], ids=["fp8", "4"])
def test_codes_and_scales_are_sharded_as_their_leading_axes_and_send_nothing(formats, columns):
    """Codes of 4 bits, of a first moment, stand two to a byte."""
    params = {"w": sharded(weights((64, 256)), ("x", "y")), "conv": sharded(weights((64, 32, 3, 3)), "x")}
    tx = hs.adamw(1e-3, **formats)
    state = tx.init(params)
    adam = state[0]
    assert adam.mu["w"].shape == (64, columns)
    for codes, scale in ((adam.mu, adam.mu_scale), (adam.nu, adam.nu_scale)):
        assert scale["w"].shape == (64, 2)
        assert scale["conv"].shape == (64, 3)
        for name, p in params.items():
            leading = p.sharding.shard_shape(p.shape)[0]
            assert codes[name].sharding.shard_shape(codes[name].shape)[0] == leading
            assert scale[name].sharding.shard_shape(scale[name].shape)[0] == leading
    g = jax.tree.map(lambda p: (p * 0.1).astype(jnp.float32), params)
    step = jax.jit(functools.partial(take_step, tx), donate_argnums=(0, 1))
    assert_no_collectives(step.lower(params, state, g).compile())
    _, new = step(params, state, g)
    assert new[0].mu["w"].sharding.shard_shape((64, columns)) == (8, columns)
    assert new[0].nu_scale["w"].sharding.shard_shape((64, 2)) == (8, 2)


_D = 2048
_BLOCK = [(_D,), (_D, _D), (_D, 512), (_D, 512), (_D, _D), (_D,), (_D, 5632), (_D, 5632), (5632, _D)]
TRANSFORMER = [(32000, _D), *_BLOCK * 2, (_D,), (_D, 32000)]
"""A Llama of 1.1 billion parameters, with two of its 22 equal layers."""


_WIDTHS = [3, 64, 64, 128, 128, 256, 256, 256, *[512] * 6]
_CONVOLUTIONS = [shape for a, b in itertools.pairwise(_WIDTHS) for shape in ((3, 3, a, b), (b,))]
CNN = [*_CONVOLUTIONS, (25088, 4096), (4096,), (4096, 4096), (4096,), (4096, 1000), (1000,)]
"""VGG-16."""


@pytest.mark.parametrize("shapes", [TRANSFORMER, CNN], ids=["transformer", "cnn"])
@pytest.mark.parametrize(
    ("mu", "nu", "of_state", "in_all"),
    [
        ("bfloat16", "bfloat16", 4.0, 8.0),
        ("bfloat16", hs.scaled("float16"), 4.02, 8.02),
        (E4M3, E5M3, 2.02, 6.02),
        (*EIGHT.values(), 2.02, 6.02),
        (*FOUR.values(), 1.52, 5.52),
    ],
    ids=["bf16", "bf16-scaled16", "fp8", "codebook", "4 bits"],
)
def test_bytes_per_parameter(shapes, mu, nu, of_state, in_all):
    """Of the state, and of all that training keeps: weights and gradients in bfloat16, and the state."""
    params = {str(i): jax.ShapeDtypeStruct(shape, jnp.bfloat16) for i, shape in enumerate(shapes)}
    state = jax.eval_shape(hs.adamw(1e-3, mu_dtype=mu, nu_dtype=nu).init, params)
    size = sum(p.size for p in params.values())
    used = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / size
    gradients = jax.eval_shape(jax.grad(lambda tree: sum(p.sum() for p in tree.values())), params)
    whole = used + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, gradients))) / size
    # Counts, seeds and the byte that stands for no scale: under 100 bytes a leaf.
    assert used <= of_state + 100 * len(shapes) / size
    assert whole <= in_all + 100 * len(shapes) / size


def test_small_and_flat_leaves_are_kept_in_float32():
    params = {"w": weights((64, 256)), "small": weights((64, 63)), "flat": weights((5000,))}
    state = hs.scale_by_adam(mu_dtype=E4M3, nu_dtype=hs.scaled("float16", min_ndim=1)).init(params)
    packed = hs.scale_by_adam(**FOUR).init(params)
    kept = {"small": ("float32", (64, 63)), "flat": ("float32", (5000,))}
    for mu, codes in ((state.mu, ("float8_e4m3fn", (64, 256))), (packed.mu, ("uint8", (64, 128)))):
        assert {name: (str(x.dtype), x.shape) for name, x in mu.items()} == kept | {"w": codes}
    assert state.nu["flat"].dtype == "float16"
    assert state.nu_scale["flat"].shape == (40,)


def test_a_state_without_scaled_formats_has_no_trees_of_scales():
    state = hs.scale_by_adam(nu_dtype="ufloat16_e7m9").init({"w": weights((64, 64))})
    assert jax.tree.leaves((state.mu_scale, state.nu_scale)) == []


@pytest.mark.parametrize("formats", [FP8, FOUR], ids=["fp8", "4"])
def test_map_params_meets_codes_with_their_params_and_no_scales(formats):
    params = {"w": weights((64, 256)), "b": weights((64,))}
    tx = hs.adamw(1e-3, **formats)
    state = tx.init(params)
    seen = optax.tree.map_params(tx, lambda x, p: (x.shape, p.shape), state, params)
    assert seen[0].mu == {"w": (state[0].mu["w"].shape, (64, 256)), "b": ((64,), (64,))}
    assert seen[0].nu_scale.keys() == {"w"}
    assert seen[0].nu_scale["w"] is state[0].nu_scale["w"]
