"""Every way to store a moment and a weight, in both frameworks: not one bit apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import halfstep_jax
import halfstep_torch
from backends.on_jax import from_jax
from backends.on_torch import from_torch
from compare import assert_same
from halfstep_spec import random_words

_LEAF, _SEED, _LR, _DECAY = "encoder/kernel", 12345, 1e-3, 0.1
_DTYPES = {"bfloat16": (jnp.bfloat16, torch.bfloat16), "float16": (jnp.float16, torch.float16)}
SIGNED = (
    "float32",
    "bfloat16",
    "float16",
    "scaled float16",
    "scaled float8_e4m3fn",
    "scaled float8_e5m2",
    "scaled int8",
    "mapped dynamic8",
    "mapped dynamic4",
)
UNSIGNED = (
    *("ufloat8_e6m2", "scaled ufloat8_e5m3", "scaled ufloat8_e4m4"),
    *("mapped udynamic8", "mapped udynamic4", "mapped ulinear4"),
)
STORAGES = ("stochastic", "nearest", "compensated", "split8", "split16", "master")

# mu, nu, weights: every format and every rule at least once.
GRID = [
    ("bfloat16", "bfloat16", "stochastic"),
    ("bfloat16", "scaled float16", "compensated"),
    ("scaled float8_e4m3fn", "scaled ufloat8_e5m3", "stochastic"),
    ("scaled float8_e4m3fn", "scaled float8_e4m3fn", "split16"),
    ("scaled float8_e5m2", "scaled float8_e5m2", "master"),
    ("scaled int8", "scaled ufloat8_e4m4", "split8"),
    ("scaled float16", "ufloat8_e6m2", "nearest"),
    ("float16", "float16", "compensated"),
    ("float32", "scaled int8", "split16"),
    ("float32", "float32", "master"),
    ("mapped dynamic8", "mapped udynamic8", "stochastic"),
    ("mapped dynamic4", "mapped ulinear4", "split16"),
]


def make_format(package, name: str, block_size):
    """Return a moment's dtype: a name, or a format with scales from its own package."""
    kind, _, dtype = name.partition(" ")
    if kind == "mapped" and isinstance(block_size, int):
        block_size += block_size % 2  # two codes to a byte
    return getattr(package, kind)(dtype, block_size, min_size=0, min_ndim=0) if dtype else kind


def make_moments(package, mu: str, nu: str, block_size) -> dict:
    """Return `mu_dtype` and `nu_dtype` for a package."""
    return {
        name: make_format(package, kind, block_size) for name, kind in (("mu_dtype", mu), ("nu_dtype", nu))
    }


def patterns(name: str, step: int, shape) -> np.ndarray:
    """Return patterns of bfloat16 values over eight binades up to 1; as float16, of other numbers."""
    words = random_words(78, step, name, 0, shape)
    field = np.uint32(127) - ((words >> np.uint32(24)) & np.uint32(7))
    return (((words & np.uint32(0x807FFFFF)) | (field << np.uint32(23))) >> np.uint32(16)).astype(np.uint16)


def run_jax(dtype, mu, nu, storage, block_size, weights, gradients):
    moments = make_moments(halfstep_jax, mu, nu, block_size)
    tx = halfstep_jax.adamw(_LR, weight_decay=_DECAY, **moments, param_storage=storage, seed=_SEED)

    def tree(bits):
        outer, inner = _LEAF.split("/")
        return {outer: {inner: jax.lax.bitcast_convert_type(jnp.asarray(bits), _DTYPES[dtype][0])}}

    @jax.jit
    def step(params, state, updates):
        updates, state = tx.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    params = tree(weights)
    state = tx.init(params)
    for g in gradients:
        params, state = step(params, state, tree(g))
    full = halfstep_jax.float32_params(params, state)
    trees = (params, *(optax.tree.get(state, name) for name in ("mu", "nu")), full)
    return [from_jax(jax.tree.leaves(one)[0]) for one in trees]


def run_torch(dtype, mu, nu, storage, block_size, weights, gradients, compile):
    def tensor(bits):
        return torch.from_numpy(bits.view(np.int16).copy()).view(_DTYPES[dtype][1])

    p = torch.nn.Parameter(tensor(weights))
    moments = make_moments(halfstep_torch, mu, nu, block_size)
    named = [(_LEAF.replace("/", "."), p)]
    options = {"param_storage": storage, "seed": _SEED, "compile": compile}
    optimizer = halfstep_torch.AdamW(named, lr=_LR, weight_decay=_DECAY, **moments, **options)
    for g in gradients:
        p.grad = tensor(g)
        optimizer.step()
    state = optimizer.state[p]
    full = halfstep_torch.float32_params(optimizer)
    full = next(iter(full.values())) if isinstance(full, dict) else full[0]
    return [from_torch(x) for x in (p, state["exp_avg"], state["exp_avg_sq"], full)]


def assert_twins(dtype, mu, nu, storage, block_size, shape, steps, compile):
    setting = (dtype, mu, nu, storage, block_size)
    weights = patterns("weights", 0, shape)
    size = int(np.prod(shape))
    bank = patterns("gradients", 0, (size + 97 * steps,))
    gradients = [bank[97 * t : 97 * t + size].reshape(shape) for t in range(steps)]
    ours = run_jax(*setting, weights, gradients)
    theirs = run_torch(*setting, weights, gradients, compile)
    for name, a, b in zip(("p", "mu", "nu", "float32 p"), ours, theirs, strict=True):
        assert_same(a, b, f"{setting}, {name}, JAX against torch after {steps} steps")


@pytest.mark.slow
@pytest.mark.parametrize(("mu", "nu", "storage"), GRID)
def test_ten_storages_agree_to_the_bit_over_a_thousand_compiled_steps(mu, nu, storage):
    assert_twins("bfloat16", mu, nu, storage, 128, (125, 800), 1000, compile=True)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], deadline=None, derandomize=True)
@given(
    st.sampled_from(tuple(_DTYPES)),
    st.sampled_from(SIGNED),
    st.sampled_from(SIGNED + UNSIGNED),
    st.sampled_from(STORAGES),
    st.sampled_from((4, 7, "row", None)),
)
def test_any_storage_agrees_to_the_bit(dtype, mu, nu, storage, block_size):
    assert_twins(dtype, mu, nu, storage, block_size, (6, 10), 4, compile=False)
