"""Every update rule, storage of moments and storage of weights, in both frameworks: not one bit apart."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch
from backends.on_jax import from_jax
from backends.on_torch import from_torch
from compare import assert_same
from halfstep_spec.numbers.random_words import random_words

_LEAF, _SEED, _LR, _DECAY = "encoder/kernel", 12345, 1e-3, 0.1
_DTYPES = {"bfloat16": (jnp.bfloat16, torch.bfloat16), "float32": (jnp.float32, torch.float32)}

# Update rule, mu, nu, weights: every one of each at least once.
GRID = [
    ("adam", "bfloat16", "bfloat16", "stochastic"),
    ("adam", "bfloat16", "scaled float16", "compensated"),
    ("adam", "scaled float8_e4m3fn", "scaled ufloat8_e5m3", "stochastic"),
    ("adam", "scaled float8_e4m3fn", "scaled float8_e4m3fn", "split16"),
    ("adam", "scaled int8", "scaled ufloat8_e5m3", "split8"),
    ("adam", "scaled float8_e4m3fn", "scaled float8_e4m3fn", "nearest"),
    ("adam", "scaled float16", "ufloat16_e7m9", "nearest"),
    ("adam", "float16", "float32", "compensated"),
    ("adam", "float32", "scaled float16", "split16"),
    ("adam", "float32", "float32", "master"),
    ("lion", "bfloat16", "", "stochastic"),
    ("lion", "scaled float8_e4m3fn", "", "split16"),
    ("sgd", "bfloat16", "", "compensated"),
    ("sgd", "scaled int8", "", "stochastic"),
    ("adam", "codebook dynamic8", "codebook udynamic8", "stochastic"),
    ("adam", "relative float8_e3m4", "ufloat16_e7m9", "stochastic"),
    ("adam", "relative int8", "scaled ufloat8_e5m3", "split16"),
    ("adam", "relative int4", "scaled ufloat8_e5m3", "stochastic"),
    ("adam", "relative mulaw8", "uroot4_e4m4", "stochastic"),
]
GRID = [("bfloat16", *row) for row in GRID] + [
    ("bfloat16", "adam", "float32", "float32", "stochastic"),
    ("bfloat16", "adam", "bfloat16", "bfloat16", "nearest"),
    ("float32", "adam", "float32", "float32", "stochastic"),
    ("float32", "adam", "bfloat16", "bfloat16", "nearest"),
]


def make_format(package, name: str, block_size):
    """Return a moment's dtype: a name, or a format with scales from its own package."""
    kind, _, dtype = name.partition(" ")
    if kind == "relative" and dtype in ("float8_e3m4", "mulaw8"):
        return package.relative(dtype)
    return getattr(package, kind)(dtype, block_size, min_size=0, min_ndim=0) if dtype else kind


class Rule(NamedTuple):
    """An update rule, as both packages spell it.

    Attributes:
        jax: the alias, from a learning rate and options.
        torch: the class, from parameters and options.
        formats: the arguments that take formats, for mu and, if there is one, for nu.
        stored: the moments, by the names of JAX and of torch.
    """

    jax: Callable
    torch: Callable
    formats: tuple[str, ...]
    stored: dict[str, str]


RULES = {
    "adam": Rule(
        functools.partial(halfstep_jax.adamw, weight_decay=_DECAY),
        functools.partial(halfstep_torch.AdamW, weight_decay=_DECAY, compile=True),
        ("mu_dtype", "nu_dtype"),
        {"mu": "exp_avg", "nu": "exp_avg_sq"},
    ),
    "lion": Rule(
        functools.partial(halfstep_jax.lion, weight_decay=_DECAY),
        functools.partial(halfstep_torch.Lion, weight_decay=_DECAY, compile=True),
        ("mu_dtype",),
        {"mu": "exp_avg"},
    ),
    "sgd": Rule(
        functools.partial(halfstep_jax.sgd, momentum=0.9, nesterov=True),
        functools.partial(halfstep_torch.SGD, momentum=0.9, nesterov=True, compile=True),
        ("accumulator_dtype",),
        {"trace": "momentum_buffer"},
    ),
}


def make_options(package, rule: Rule, mu: str, nu: str, block_size) -> dict:
    """Return the formats of a rule's moments as arguments for a package."""
    kinds = zip(rule.formats, (mu, nu), strict=False)
    return {name: make_format(package, kind, block_size) for name, kind in kinds}


def patterns(name: str, step: int, shape, dtype: str = "bfloat16") -> np.ndarray:
    """Return patterns of float32 or bfloat16 values over eight binades up to 1."""
    words = random_words(78, step, name, 0, shape)
    field = np.uint32(127) - ((words >> np.uint32(24)) & np.uint32(7))
    bits = (words & np.uint32(0x807FFFFF)) | (field << np.uint32(23))
    return bits if dtype == "float32" else (bits >> np.uint32(16)).astype(np.uint16)


def run_jax(rule, dtype, formats, storage, weights, gradients, lr=_LR, block_size=128):
    options = make_options(halfstep_jax, rule, *formats, block_size)
    tx = rule.jax(lr, **options, param_storage=storage, seed=_SEED)

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
    trees = (params, full, *(optax.tree.get(state, name) for name in rule.stored))
    return [from_jax(jax.tree.leaves(one)[0]) for one in trees]


def run_torch(rule, dtype, formats, storage, weights, gradients, lr=_LR, block_size=128):
    def tensor(bits):
        return torch.from_numpy(bits.view(f"int{8 * bits.itemsize}").copy()).view(_DTYPES[dtype][1])

    p = torch.nn.Parameter(tensor(weights))
    options = make_options(halfstep_torch, rule, *formats, block_size)
    named = [(_LEAF.replace("/", "."), p)]
    optimizer = rule.torch(named, lr=lr, **options, param_storage=storage, seed=_SEED)
    for g in gradients:
        p.grad = tensor(g)
        optimizer.step()
    state = optimizer.state[p]
    (full,) = halfstep_torch.float32_params(optimizer).values()
    return [p, full, *(state[key] for key in rule.stored.values())]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rule", "mu", "nu", "storage"), GRID)
def test_every_storage_agrees_to_the_bit_over_a_thousand_compiled_steps(dtype, rule, mu, nu, storage):
    shape, steps = (125, 800), 1000
    weights = patterns("weights", 0, shape, dtype)
    bank = patterns("gradients", 0, (weights.size + 97 * steps,), dtype)
    gradients = [bank[97 * t : 97 * t + weights.size].reshape(shape) for t in range(steps)]
    setting = (RULES[rule], dtype, (mu, nu), storage, weights, gradients)
    ours, theirs = run_jax(*setting), run_torch(*setting)
    assert (ours[0].bits.reshape(-1) != weights.reshape(-1)).mean() > 0.5
    for array, a, b in zip(("p", "float32 p", *RULES[rule].stored), ours, theirs, strict=True):
        assert_same(a, from_torch(b, a.dtype), f"{array}, JAX against torch after {steps} steps")
