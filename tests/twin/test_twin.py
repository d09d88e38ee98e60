"""The same training in both frameworks: 1,000 steps on 100,000 elements, not one bit apart."""

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

_STEPS, _SIZE, _LEAF, _SEED = 1000, 100_000, "encoder/kernel", 2**40 + 5
_LR, _DECAY = 1e-3, 0.1
_DTYPES = {"bfloat16": (jnp.bfloat16, torch.bfloat16), "float32": (jnp.float32, torch.float32)}

# weights, moments, how weights are stored
_SETTINGS = [
    ("bfloat16", "bfloat16", "stochastic"),
    ("bfloat16", "float32", "stochastic"),
    ("bfloat16", "bfloat16", "nearest"),
    ("float32", "float32", "stochastic"),
    ("float32", "bfloat16", "nearest"),
]


def patterns(name: str, step: int, dtype: str, exponent: int) -> np.ndarray:
    """Return patterns of values of either sign over eight binades, the highest at 2^exponent."""
    words = random_words(77, step, name, 0, (_SIZE,))
    field = np.uint32(127 + exponent) - ((words >> np.uint32(24)) & np.uint32(7))
    bits = (words & np.uint32(0x807FFFFF)) | (field << np.uint32(23))
    return bits if dtype == "float32" else (bits >> np.uint32(16)).astype(np.uint16)


class JaxRun:
    """halfstep_jax.adamw under jit, donated, with optax.apply_updates."""

    def __init__(self, weights: np.ndarray, dtype: str, moments: str, storage: str):
        self.dtype = _DTYPES[dtype][0]
        tx = halfstep_jax.adamw(
            _LR, weight_decay=_DECAY, mu_dtype=moments, nu_dtype=moments, param_storage=storage, seed=_SEED
        )
        self.params = self._tree(weights)
        self.state = tx.init(self.params)

        def step(params, state, updates):
            updates, state = tx.update(updates, state, params)
            return optax.apply_updates(params, updates), state

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def _tree(self, patterns: np.ndarray):
        outer, inner = _LEAF.split("/")
        return {outer: {inner: jax.lax.bitcast_convert_type(jnp.asarray(patterns), self.dtype)}}

    def step(self, g: np.ndarray):
        self.params, self.state = self._step(self.params, self.state, self._tree(g))

    def arrays(self):
        trees = (self.params, optax.tree.get(self.state, "mu"), optax.tree.get(self.state, "nu"))
        return [from_jax(jax.tree.leaves(tree)[0]) for tree in trees]


class TorchRun:
    """halfstep_torch.AdamW."""

    def __init__(self, weights: np.ndarray, dtype: str, moments: str, storage: str, compile: bool):
        self.dtype = _DTYPES[dtype][1]
        self.p = torch.nn.Parameter(self._tensor(weights))
        self.optimizer = halfstep_torch.AdamW(
            [(_LEAF.replace("/", "."), self.p)],
            lr=_LR,
            weight_decay=_DECAY,
            mu_dtype=moments,
            nu_dtype=moments,
            param_storage=storage,
            seed=_SEED,
            compile=compile,
        )

    def _tensor(self, patterns: np.ndarray):
        return torch.from_numpy(patterns.view(f"int{8 * patterns.itemsize}").copy()).view(self.dtype)

    def step(self, g: np.ndarray):
        self.p.grad = self._tensor(g)
        self.optimizer.step()

    def arrays(self):
        state = self.optimizer.state[self.p]
        return [from_torch(x) for x in (self.p, state["exp_avg"], state["exp_avg_sq"])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "moments", "storage", "compile"),
    [
        (*_SETTINGS[0], False),
        *(pytest.param(*setting, True, marks=pytest.mark.slow) for setting in _SETTINGS),
        *(pytest.param(*setting, False, marks=pytest.mark.exhaustive) for setting in _SETTINGS[1:]),
    ],
)
def test_a_thousand_steps_agree_to_the_bit(dtype, moments, storage, compile):
    weights = patterns("weights", 0, dtype, -1)
    runs = JaxRun(weights, dtype, moments, storage), TorchRun(weights, dtype, moments, storage, compile)
    for t in range(1, _STEPS + 1):
        g = patterns("gradients", t, dtype, 0)
        for run in runs:
            run.step(g)
        if t in (1, 2, 10) or t % 100 == 0:
            for name, ours, theirs in zip(("p", "mu", "nu"), *(run.arrays() for run in runs), strict=True):
                assert_same(ours, theirs, f"step {t}, {name}, JAX against torch")
    moved = (runs[0].arrays()[0].bits != weights).mean()
    assert moved > 0.5, f"only {moved:.1%} of the weights moved: the test saw nothing"
