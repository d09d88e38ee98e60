"""A run of a setting in the reference, in torch and in JAX; each gives the patterns of all its arrays."""

import contextlib
import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import halfstep_jax
import halfstep_spec as spec
import halfstep_torch
from backends.on_torch import EXTRA
from compare import assert_same, differing
from halfstep.rule import declared
from halfstep_spec.vectors import Array
from halfstep_torch.storage.stored_moment import scale_key
from halfstep_torch.weights.weight_storage import with_param_storage
from hunt.rules import moment_names, stored
from hunt.settings import Numbers, Setting

Patterns = dict[str, np.ndarray]
Arrays = dict[str, Array]


class Reference:
    """The reference, one leaf after the other."""

    def __init__(self, setting: Setting, numbers: Numbers, weights: Patterns):
        self.setting, self.rate = setting, np.float32(numbers.learning_rate)
        self.step_of_leaf, self.params = setting.reference(numbers), dict(weights)
        self.stored = stored(self.step_of_leaf)
        self.states = {name: self.step_of_leaf.init(p) for name, p in weights.items()}

    def step(self, gradients: Patterns) -> None:
        """Take a step of the leaves that have a gradient."""
        self.params, self.states = dict(self.params), dict(self.states)
        for name, g in gradients.items():
            values = spec.decode(g, self.setting.dtype)
            self.params[name], self.states[name] = self.step_of_leaf.step(
                self.params[name], values, self.states[name], name, self.rate
            )

    def set(self, weights: Patterns) -> None:
        """Set the weights from outside."""
        self.params = dict(weights)

    def after(self, gradients: Patterns) -> "Reference":
        """Return the run after a step; this one stays where it is."""
        run = copy.copy(self)
        run.step(gradients)
        return run

    def arrays(self) -> Arrays:
        """Return weights, codes, scales and what stands beside the weights, by leaf and name."""
        arrays = {}
        for name, state in self.states.items():
            arrays[f"{name} p"] = Array(self.setting.dtype, np.asarray(self.params[name]))
            for moment, kept in state.rule.moments.items():
                fmt = self.stored[moment].format(kept.array_shape)
                arrays[f"{name} {moment}"] = Array(fmt.dtype, np.asarray(kept.codes))
                if kept.scale is not None:
                    arrays[f"{name} {moment}_scale"] = Array("uint8", np.asarray(kept.scale))
            if state.extra is not None:
                extra = np.asarray(state.extra)
                dtype = self.step_of_leaf.storage.extra_dtype
                arrays[f"{name} extra"] = Array(dtype, extra.view(f"u{extra.itemsize}"))
        return arrays


@contextlib.contextmanager
def subnormals_are_zeros() -> Iterator[None]:
    """Take subnormal numbers for zeros, as XLA on a CPU does: NumPy obeys the mode of its thread."""
    assert torch.set_flush_denormal(True), "This processor cannot take subnormal numbers for zeros."
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def patterns_of(x: torch.Tensor) -> np.ndarray:
    """Return the patterns of a tensor, in one row."""
    size = x.element_size()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    return x.detach().reshape(-1).view(integers).numpy().view(f"u{size}").copy()


def tensor(bits: np.ndarray, dtype: str) -> torch.Tensor:
    """Return patterns as a tensor."""
    return torch.from_numpy(bits.view(f"int{8 * bits.itemsize}").copy()).view(getattr(torch, dtype))


class Torch:
    """halfstep_torch, eager or compiled."""

    def __init__(self, setting: Setting, numbers: Numbers, weights: Patterns, compile: bool = False):
        hs = halfstep_torch
        self.setting = setting
        self.params = {name: torch.nn.Parameter(tensor(p, setting.dtype)) for name, p in weights.items()}
        chain = hs.chain(*setting.links(hs, numbers.of_links, numbers.seed))
        storage = "nearest" if setting.dtype == "float32" else setting.storage
        chain = with_param_storage("hunt", chain, storage, numbers.seed)
        named = [(name.replace("/", "."), p) for name, p in self.params.items()]
        self.optimizer = hs.Optimizer(named, chain, compile=compile)

    def step(self, gradients: Patterns) -> None:
        """Take a step of the leaves that have a gradient."""
        for name, p in self.params.items():
            p.grad = tensor(gradients[name], self.setting.dtype) if name in gradients else None
        self.optimizer.step()

    def set(self, weights: Patterns) -> None:
        """Set the weights from outside."""
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(tensor(weights[name], self.setting.dtype))

    def arrays(self) -> Patterns:
        """Return the arrays as the reference names them."""
        arrays, keys = (
            {},
            _torch_keys(tuple(type(link.rule) for link in self.optimizer._choices[0].chain.links)),
        )
        for name, p in self.params.items():
            state, arrays[f"{name} p"] = self.optimizer.state[p], patterns_of(p)
            for key, moment in keys.items():
                if key in state:
                    arrays[f"{name} {moment}"] = patterns_of(state[key])
        return arrays


@functools.cache
def _torch_keys(rules: tuple[type, ...]) -> dict[str, str]:
    keys = {key: "extra" for key in EXTRA.values()}
    for rule in rules:
        for name, moment in declared(rule).moments.items():
            keys |= {moment.torch: name, scale_key(moment.torch): f"{name}_scale"}
    return keys


def nested(arrays: dict[str, Any]) -> Any:
    """Return a tree of arrays by their names: dicts, and lists where names are numbers; with a None in it."""
    tree: dict = {"nothing": None}
    for name, x in arrays.items():
        *outer, last = name.split("/")
        place = tree
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = x
    return _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    parts = {key: _with_lists(part) for key, part in tree.items()}
    numbered = parts and all(re.fullmatch(r"\d+", key) for key in parts)
    return [parts[key] for key in sorted(parts)] if numbered else parts


class Jax:
    """halfstep_jax under jit, compiled once for a setting: numbers and seed are arguments.

    Where a rounding is "auto", rates are constants: of traced ones it is always stochastic (contract F3).
    """

    def __init__(self, setting: Setting, numbers: Numbers, weights: Patterns):
        self.setting = setting
        words = jnp.array([numbers.seed >> 32, numbers.seed & 0xFFFFFFFF], jnp.uint32)
        self.known = tuple(numbers.rule.items()) if setting.auto else ()
        self.numbers = {name: np.float32(value) for name, value in numbers.of_links.items()}, words
        self.params = self.tree(weights)
        self.state = _jitted(setting, self.known, "init")(*self.numbers, self.params)

    def tree(self, patterns: Patterns) -> Any:
        """Return the tree of a setting with these patterns."""
        dtype = getattr(jnp, self.setting.dtype)
        return nested({name: np.asarray(x).view(dtype) for name, x in patterns.items()})

    def step(self, gradients: Patterns) -> None:
        """Take a step."""
        step = _jitted(self.setting, self.known, "step")
        self.params, self.state = step(*self.numbers, self.params, self.state, self.tree(gradients))

    def set(self, weights: Patterns) -> None:
        """Set the weights from outside."""
        self.params = self.tree(weights)

    def arrays(self) -> Patterns:
        """Return the arrays as the reference names them."""
        arrays = {f"{name} p": np.asarray(x) for name, x in _leaves(self.params).items()}
        moments = moment_names(self.setting.rule)
        fields = {f"{name}{end}": f"{name}{end}" for name in moments for end in ("", "_scale")}
        fields |= dict.fromkeys(("compensation", "master", "extra"), "extra")
        for field, kind in fields.items():
            for name, x in _leaves(optax.tree.get(self.state, field)).items():
                arrays[f"{name} {kind}"] = np.asarray(x)
        return {name: x.reshape(-1).view(f"u{x.itemsize}") for name, x in arrays.items()}


def _leaves(tree: Any) -> dict[str, Any]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(re.findall(r"[\w/]+", jax.tree_util.keystr(path))): x for path, x in pairs}


def transform(setting: Setting, numbers: dict[str, Any], seed: Any) -> optax.GradientTransformationExtraArgs:
    """Return the setting as an Optax transform; numbers and seed may be traced."""
    hs = halfstep_jax
    chain = optax.chain(*setting.links(hs, numbers, seed))
    return hs.store_params(chain, "nearest" if setting.dtype == "float32" else setting.storage, seed=seed)


@functools.cache
def _jitted(setting: Setting, known: tuple[tuple[str, float], ...], which: str) -> Any:
    def init(numbers, seed, params):
        return transform(setting, {**numbers, **dict(known)}, seed).init(params)

    def step(numbers, seed, params, state, gradients):
        tx = transform(setting, {**numbers, **dict(known)}, seed)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit({"init": init, "step": step}[which])


def assert_same_arrays(ours: Patterns, theirs: Arrays, context: str) -> None:
    """Compare all arrays to the bit; NaN is one class."""
    assert ours.keys() == theirs.keys(), context
    for name, due in theirs.items():
        given = ours[name].reshape(due.bits.shape)
        if not np.array_equal(given, due.bits):
            assert_same(Array(due.dtype, given), due, f"{context}, {name}")


def differ_by_subnormals(ours: Patterns, theirs: Arrays, without: Arrays) -> bool:
    """Return whether we differ only at numbers that change where subnormals are zeros (contract A8)."""
    return ours.keys() == theirs.keys() and not any(
        np.any(
            differing(Array(due.dtype, ours[name].reshape(due.bits.shape)), due)
            & ~differing(without[name], due)
        )
        for name, due in theirs.items()
    )
