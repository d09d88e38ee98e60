"""Weights may be changed between two steps: each storage goes on as a float32 run that is changed so."""

import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch
from halfstep_spec import PARAM_STORAGES
from hunt.edits import FINITE, edited, edits_for
from twin.test_named import CLASSES

RATE, BEFORE, AFTER, SHAPE = 1e-4, 5, 3, (16, 32)
FED_BACK = {"adam": ("feedback",), "adamw": ("feedback", "int8"), "sgd": ("feedback",)}
FIRST = {"adam": "exp_avg", "adamw": "exp_avg", "sgd": "momentum_buffer"}
TORCH = {**CLASSES, "adafactor": halfstep_torch.Adafactor}


def options(function, alias: str, **more) -> dict:
    """Return float32 moments, no decay, and a momentum, as far as an optimizer has them."""
    given = {name: "float32" for name in ("mu_dtype", "nu_dtype", "slow_dtype", "diff_dtype", "grad_dtype")}
    given |= {"accumulator_dtype": "float32", "lead_dtype": "float32", "momentum": 0.9, "weight_decay": 0.0}
    known = inspect.signature(function).parameters.keys() - ({"momentum"} if alias == "muon" else set())
    return {name: value for name, value in given.items() if name in known} | more


class InTorch:
    """A run of one optimizer, whose parameters are named by their edits."""

    def __init__(self, alias: str, storage: str, weights):
        self.first = FIRST.get(alias)
        self.params = {name: torch.nn.Parameter(w) for name, w in _tensors(weights).items()}
        kind = TORCH[alias]
        given = options(kind.__init__, alias, param_storage=storage, compile=False)
        self.optimizer = kind(self.params.items(), lr=RATE, **given)

    def step(self, gradients):
        for name, g in gradients.items():
            self.params[name].grad = torch.from_numpy(g).to(self.params[name].dtype)
        self.optimizer.step()

    def weights(self):
        return {name: p.detach().float().numpy().copy() for name, p in self.params.items()}

    def known(self):
        return {name: w.numpy() for name, w in halfstep_torch.float32_params(self.optimizer).items()}

    def set(self, weights):
        with torch.no_grad():
            for name, w in _tensors(weights).items():
                self.params[name].copy_(w)

    def reset_first(self):
        for p in self.params.values():
            self.optimizer.state[p][self.first].zero_()


def _tensors(weights):
    return {
        name: torch.from_numpy(w.astype(np.float32)).to(getattr(torch, w.dtype.name))
        for name, w in weights.items()
    }


class InJax:
    """The same in JAX, jitted once."""

    def __init__(self, alias: str, storage: str, weights):
        function = getattr(halfstep_jax, alias)
        tx = function(RATE, **options(function, alias, param_storage=storage))
        self.params = jax.tree.map(jnp.asarray, weights)
        self.state = tx.init(self.params)

        @jax.jit
        def step(params, state, gradients):
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        self.next = step

    def step(self, gradients):
        self.params, self.state = self.next(self.params, self.state, jax.tree.map(jnp.asarray, gradients))

    def weights(self):
        return jax.tree.map(lambda p: np.asarray(p, np.float32), self.params)

    def known(self):
        return jax.tree.map(np.asarray, halfstep_jax.float32_params(self.params, self.state))

    def set(self, weights):
        self.params = jax.tree.map(jnp.asarray, weights)

    def reset_first(self):
        name = "mu" if optax.tree.get(self.state, "mu") is not None else "trace"
        zeros = jax.tree.map(jnp.zeros_like, optax.tree.get(self.state, name))
        self.state = optax.tree.set(self.state, **{name: zeros})


def edited_run(make, alias: str, storage: str, edits):
    """Return weights as they were set, where they are some steps later, and where they are in float32."""
    rng, dtype = np.random.default_rng(0), np.dtype("float32" if storage == "int8" else ml_dtypes.bfloat16)

    def draw(scale):
        drawn = {name: rng.normal(size=SHAPE) * scale for name in edits}
        return {name: x.astype(ml_dtypes.bfloat16).astype(np.float32) for name, x in drawn.items()}

    start = draw(0.3)
    ours = make(alias, storage, {name: w.astype(dtype) for name, w in start.items()})
    due = make(alias, "nearest", start)
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            now = {name: w.astype(dtype).view(f"u{dtype.itemsize}") for name, w in ours.weights().items()}
            new = {name: edited(name, bits, dtype.name, 1).view(dtype) for name, bits in now.items()}
            wide = {name: w.astype(np.float32) for name, w in new.items()}
            ours.set(new)
            due.set(wide)
            for run in (ours, due) if storage in ("feedback", "int8") else ():
                run.reset_first()
        gradients = draw(1.0)
        ours.step(gradients)
        due.step(gradients)
    return wide, ours.known(), due.weights()


def assert_moved_alike(make, alias: str, storage: str):
    """Hold weights against float32's: half a unit of bits beside them, and a unit for each step since."""
    edits = FINITE if storage in ("feedback", "int8") else edits_for(alias)
    runs = edited_run(make, alias, storage, edits)
    for edit in edits:
        set_to, ours, due = (run[edit].astype(np.float64) for run in runs)
        size = np.maximum(np.abs(set_to), np.abs(due))
        far = size > 1e38
        np.testing.assert_array_equal(*(x[far].astype(ml_dtypes.bfloat16) for x in (ours, due)), err_msg=edit)
        size, set_to, ours, due = (np.where(far, 1, x) for x in (size, set_to, ours, due))
        if storage == "int8":
            unit = np.broadcast_to(size.max(1, keepdims=True) / 127 * 1.25, SHAPE)
        else:
            unit = np.ldexp(1.0, np.frexp(size)[1] - 1 - 7)
        most = np.linalg.norm((0.5 + AFTER) * unit) + 0.02 * np.linalg.norm(due - set_to)
        assert np.linalg.norm(ours - due) <= most, edit


CASES = [(alias, storage) for alias in TORCH for storage in (*PARAM_STORAGES, *FED_BACK.get(alias, ()))]


def _cases(quick):
    """Return the cases; those that are not `quick` are slow."""
    return [pytest.param(*case, marks=() if quick(*case) else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(
    ("alias", "storage"), _cases(lambda alias, storage: alias in ("adamw", "lamb", "adafactor"))
)
def test_torch_goes_on_from_edited_weights_as_in_float32(alias, storage):
    assert_moved_alike(InTorch, alias, storage)


@pytest.mark.parametrize(
    ("alias", "storage"), _cases(lambda *case: case in (("adamw", "compensated"), ("adamw", "split8")))
)
def test_jax_goes_on_from_edited_weights_as_in_float32(alias, storage):
    assert_moved_alike(InJax, alias, storage)
