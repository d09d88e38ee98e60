"""Any Optax transform as a `torch.optim.Optimizer`."""

import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import Tensor

from halfstep.checkpoint.state_file import FileArray, read_state_file, write_state_file
from halfstep_jax.checkpoint.save_state import read_state, state_file_of
from halfstep_jax.leaf_calls import Tree
from halfstep_torch.bridge.arrays import address, copy_into, device_of, own_copy, to_jax
from halfstep_torch.engine.signals import between_steps
from halfstep_torch.leaves.checks import check_grad, check_weight
from halfstep_torch.leaves.found_names import with_names_found
from halfstep_torch.leaves.group_names import Group, StateDict, check_names
from halfstep_torch.leaves.memory import check_memory
from halfstep_torch.leaves.names import leaf_names
from halfstep_torch.optimizer_state.form import SavedState

Transforms = optax.GradientTransformation | Sequence[optax.GradientTransformation]
_NAME = "OptaxOptimizer"


class OptaxOptimizer(torch.optim.Optimizer):
    """A torch optimizer that steps parameters by any Optax transform.

    A step is one jitted program: `tx.update` and `optax.apply_updates` on the tree {leaf name: parameter}.
    JAX reads weights and gradients in place (over DLPack) if it has their device, and if they are row-major
    and aligned. Otherwise they are copied once, as `shares_memory` shows. New weights are copied back once.
    Given the gradients, the result is bit-identical to the same transform in JAX. Weights keep their dtype,
    and random words follow the parameters' names.

    Schedules belong into the transform. If it has `optax.inject_hyperparams` with a `learning_rate`, the
    param group shows this rate as `lr`. An `lr` that a scheduler writes is used from the next step on.

    Every parameter needs a gradient at every step, because Optax cannot skip a parameter.

    Args:
        params: named parameters, as from `model.named_parameters()`, or groups of them.
        tx: an Optax transform, or one for each group.

    Attributes:
        shares_memory: whether JAX read all weights and gradients of the last step in place, or None before
            the first.
        optax_state: the state of the transform, a tree of JAX arrays.

    Raises:
        TypeError: if parameters have no names or a wrong dtype, or `tx` is not a transform.
        ValueError: if the numbers of transforms and groups differ, two names are equal, or JAX does not have
            a parameter's device.

    Example:
        >>> import optax, torch
        >>> from halfstep_torch.bridge import OptaxOptimizer
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = OptaxOptimizer(model.named_parameters(), optax.contrib.prodigy())
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> int(optax.tree.get(optimizer.optax_state, "count"))
        1

    Source: ours.
    """

    def __init__(self, params: Iterable, tx: Transforms) -> None:
        self._building, self._lock = True, threading.RLock()
        super().__init__(with_names_found(_NAME, params), {})
        self._building = False
        self._params = dict(self._named())
        check_names(_NAME, self.param_groups)
        for name, param in self._params.items():
            check_weight(_NAME, name, param)
        self._check_members()
        self._devices = {name: device_of(_NAME, name, param) for name, param in self._params.items()}
        self._tx = self._one_transform(tx)
        self.optax_state: Tree = jax.jit(self._tx.init)(self.jax_params())
        self.shares_memory: bool | None = None
        self._update = jax.jit(_step_of(self._tx))
        self._show_rates()

    def add_param_group(self, param_group: Group) -> None:
        """Add a group while the optimizer is built, because the state of a transform has a fixed structure.

        Raises:
            TypeError: if it is called later.
        """
        if not self._building:
            raise TypeError(
                f"{_NAME}: the state of an Optax transform has one structure. Build a new optimizer."
            )
        super().add_param_group(param_group)

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        for i, group in enumerate(self.param_groups):
            if "param_names" not in group:
                raise TypeError(
                    f"{_NAME}: the parameters of group {i} have no names. Pass model.named_parameters()."
                )
        names = [name for group in self.param_groups for name in group["param_names"]]
        params = [param for group in self.param_groups for param in group["params"]]
        yield from zip(leaf_names(names), params, strict=True)

    def _check_members(self) -> None:
        """Raise ValueError if the groups' parameters changed, or two parameters share memory."""
        listed = [param for group in self.param_groups for param in group["params"]]
        if list(map(id, listed)) != list(map(id, self._params.values())):
            raise ValueError(
                f"{_NAME}: the parameters of the groups are not those of the start, and the state of an "
                "Optax transform has one structure. Build a new optimizer."
            )
        check_memory(_NAME, self._params.items())

    def _one_transform(self, tx: Transforms) -> optax.GradientTransformation:
        """Return the transform of all groups."""
        transforms: list = [tx] if hasattr(tx, "update") else list(tx) if isinstance(tx, Sequence) else []
        if not transforms or not all(
            hasattr(transform, "init") and hasattr(transform, "update") for transform in transforms
        ):
            raise TypeError(f"{_NAME}: tx={tx!r} is not an Optax transform, or a list of them.")
        if len(transforms) != len(self.param_groups):
            raise ValueError(
                f"{_NAME}: {len(transforms)} transforms for {len(self.param_groups)} param groups. "
                "Pass one for each group."
            )
        if len(transforms) == 1:
            return transforms[0]
        places = [str(i) for i, group in enumerate(self.param_groups) for _ in group["params"]]
        labels = dict(zip(self._params, places, strict=True))
        return optax.partition({str(i): transform for i, transform in enumerate(transforms)}, labels)

    def jax_params(self) -> dict[str, jax.Array]:
        """Return copies of the weights by leaf name, the tree that belongs to `optax_state`."""
        return {name: own_copy(to_jax(p, self._devices[name])[0]) for name, p in self._params.items()}

    @between_steps
    @torch.no_grad()
    # It returns the result of `closure`.
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters.

        Args:
            closure: a function that re-evaluates the model and returns the loss.

        Raises:
            TypeError: if a gradient is sparse or has a wrong dtype.
            ValueError: if a parameter has no gradient, the groups' parameters changed, weights share memory,
                or the transform returns another structure, shape or dtype. Weights and state are then
                unchanged.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._check_members()
        weights, grads, shared = {}, {}, []
        for name, param in self._params.items():
            if param.grad is None:
                raise ValueError(
                    f"{_NAME}: {name!r} has no gradient, and an Optax transform steps all or none. "
                    "Build the optimizer without this parameter, or give it a gradient of zeros."
                )
            check_grad(_NAME, name, param)
            for tree, tensor in ((weights, param), (grads, param.grad)):
                tree[name], same = to_jax(tensor, self._devices[name])
                shared.append(same)
        state = self._with_written_rates()
        new, after = jax.block_until_ready(self._update(weights, grads, state))
        # A program may return its inputs, and tensors would then write to the state.
        lent = {address(x) for x in (*weights.values(), *grads.values()) if x.size}
        self.optax_state = jax.tree.map(lambda x: own_copy(x) if x.size and address(x) in lent else x, after)
        for name, param in self._params.items():
            copy_into(param, new[name])
        self.shares_memory = all(shared)
        self._show_rates()
        return loss

    def _rates(self, state: Tree) -> list[jax.Array | None]:
        """Return the injected learning rate of every group, or None."""
        parts = [state] if len(self.param_groups) == 1 else []
        parts = parts or [state.inner_states[str(i)] for i in range(len(self.param_groups))]
        return [_rate(part) for part in parts]

    def _show_rates(self) -> None:
        self._shown = [None if rate is None else float(rate) for rate in self._rates(self.optax_state)]
        for group, rate in zip(self.param_groups, self._shown, strict=True):
            if rate is not None:
                group["lr"] = rate

    def _with_written_rates(self) -> Tree:
        """Return the state with the learning rates that a user or a scheduler wrote into the groups."""
        state = self.optax_state
        for i, (group, shown) in enumerate(zip(self.param_groups, self._shown, strict=True)):
            if shown is None or group["lr"] == shown:
                continue
            if len(self.param_groups) == 1:
                return _with_rate(state, group["lr"])
            part = _with_rate(state.inner_states[str(i)], group["lr"])
            state = state._replace(inner_states={**state.inner_states, str(i): part})
        return state

    @between_steps
    def state_dict(self) -> StateDict:
        """Return the state as tensors with the header of a state file, for `weights_only=True`."""
        header, arrays = state_file_of("state_dict", self.jax_params(), self.optax_state, self._tx)
        kept = {name: array for name, array in arrays.items() if not name.startswith("params/")}
        return {
            **super().state_dict(),
            "optax": {
                "header": json.dumps(header),
                "arrays": {
                    name: {"dtype": dtype, "shape": list(shape), "data": torch.from_numpy(np.array(data))}
                    for name, (dtype, shape, data) in kept.items()
                },
            },
        }

    @between_steps
    def load_state_dict(self, state_dict: SavedState) -> None:
        """Restore the state of the same transform, bit for bit. Weights do not change.

        Args:
            state_dict: a result of `state_dict`.

        Raises:
            TypeError: if it is not such a state dict.
            ValueError: if it belongs to another transform or to other parameters. Nothing is changed.
        """
        if "optax" not in state_dict:
            raise TypeError("load_state_dict: this is no state dict of an OptaxOptimizer.")
        saved, params = state_dict["optax"], self.jax_params()
        arrays = {
            name: FileArray(array["dtype"], tuple(array["shape"]), array["data"].cpu().numpy().copy())
            for name, array in saved["arrays"].items()
        }
        _, current = state_file_of("load_state_dict", params, self.optax_state, self._tx)
        arrays |= {name: array for name, array in current.items() if name.startswith("params/")}
        header = json.loads(saved["header"])
        _, self.optax_state = read_state("load_state_dict", header, arrays, params, self._tx)
        self._show_rates()

    @between_steps
    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write weights and state to a state file, for JAX, and for torch if all transforms are halfstep's.

        Args:
            path: the path of the file.
        """
        write_state_file(path, *state_file_of("save_state", self.jax_params(), self.optax_state, self._tx))

    @between_steps
    @torch.no_grad()
    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Set weights and state from a state file.

        Args:
            path: the path of the file.

        Raises:
            ValueError: if it is damaged, or belongs to another run. Nothing is changed.
        """
        caller, params = "load_state", self.jax_params()
        new, state = read_state(caller, *read_state_file(caller, path), params, self._tx)
        for name, param in self._params.items():
            copy_into(param, new[name])
        self.optax_state = state
        self._show_rates()


def _step_of(tx: optax.GradientTransformation) -> Callable:
    """Return one step of a transform."""

    def step(params, grads, state):
        updates, after = tx.update(grads, state, params)
        _check("updates", updates, params, lambda x: jnp.shape(x))
        _check("state", after, state, lambda x: (jnp.shape(x), str(jnp.result_type(x))))
        return optax.apply_updates(params, updates), after

    return step


def _check(what: str, returned: Tree, due: Tree, describe: Callable) -> None:
    """Raise ValueError unless a transform's updates have the structure, shapes and dtypes of its inputs."""
    if jax.tree.map(describe, returned) != jax.tree.map(describe, due):
        raise ValueError(
            f"{_NAME}: the transform returned {what} of another structure, shape or dtype. "
            "Use one whose update returns what its init made."
        )


def _rate(state: Tree) -> Any:  # an array, or None
    """Return the learning rate of `optax.inject_hyperparams` in a state, or None."""
    candidates = [
        value
        for path, value in optax.tree.get_all_with_path(state, "learning_rate")
        if any(getattr(key, "name", None) == "hyperparams" for key in path)
    ]
    return candidates[0] if len(candidates) == 1 else None


def _with_rate(state: Tree, rate: float) -> Tree:
    old = _rate(state)
    return optax.tree.set(state, learning_rate=jnp.asarray(float(rate), old.dtype))
