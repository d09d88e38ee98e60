"""A Keras optimizer that steps by an Optax transform. Importing this imports Keras, with its JAX backend."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import optax

from halfstep.config import read_config
from halfstep.hyperparameters import Arguments
from halfstep.keras_optimizer import CALLER, check_arguments, load_bytes, state_bytes
from halfstep_jax.checkpoint.save_state import load_state, save_state
from halfstep_jax.integrations.config import from_config
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.meshes.state_shardings import state_shardings


@keras.saving.register_keras_serializable("halfstep")
class KerasOptimizer(keras.optimizers.Optimizer):
    """Steps the weights of a Keras model by a transform, inside `fit` as it is.

    p + u is rounded once, by the transform's weight storage. The transform steps a list, the model's
    `trainable_variables`. A `.keras` file and `save_weights` hold its state to the bit, and
    `halfstep_torch.integrations.keras` continues from it with Keras' torch backend.

        model.compile(KerasOptimizer("adamw(recipe='one_pass')", learning_rate=1e-3), "mse")

    Args:
        transform: the config of an optimizer of this package without its learning rate, a text or a mapping
            (see `from_config`), or any Optax transform. A `.keras` file cannot hold a transform.
        learning_rate: beside a config: a number or a schedule of Keras, which callbacks may change. A
            transform has its own.
        name: of the optimizer.
        **options: of `keras.optimizers.Optimizer`: clipping, `gradient_accumulation_steps`,
            `loss_scale_factor` and moving averages, which Keras computes. `weight_decay` belongs to the
            config, because Keras would round it to the dtype of the weights.

    Raises:
        RuntimeError: if the backend of Keras is not JAX.
        TypeError: for `weight_decay`, a learning rate beside a transform, or a config without one.
        ValueError: for a config that `from_config` refuses.

    Source: ours.
    """

    def __init__(
        self,
        transform: optax.GradientTransformation | str | Arguments,
        learning_rate: Any = None,  # a number, or a schedule of Keras
        name: str = "halfstep",
        **options: Any,  # of Keras
    ) -> None:
        check_arguments(keras.backend.backend(), "jax", options)
        is_transform = isinstance(transform, optax.GradientTransformation)
        if is_transform and learning_rate is not None:
            raise TypeError(
                f"{CALLER}: learning_rate={learning_rate} beside a transform, which has its own rate. "
                "Leave it out, or pass a config, such as \"adamw(recipe='one_pass')\"."
            )
        if not is_transform and learning_rate is None:
            raise TypeError(f"{CALLER}: learning_rate is missing. Pass it beside the config.")
        super().__init__((lambda: math.nan) if is_transform else learning_rate, name=name, **options)
        self._source = transform
        self._of_rate(0.0)  # raises now for a config that names nothing

    def _of_rate(self, rate: Any) -> optax.GradientTransformation:  # a number, traced or not
        """Return the transform at a learning rate."""
        if isinstance(self._source, optax.GradientTransformation):
            return self._source
        name, arguments = read_config(CALLER, self._source)
        return from_config({**arguments, "name": name, "learning_rate": rate})

    @property
    def learning_rate(self) -> Any:  # a variable of Keras, or a number
        """The rate of this step; NaN beside a transform, which has its own."""
        return self._get_current_learning_rate()

    @learning_rate.setter
    def learning_rate(self, rate: object) -> None:
        if isinstance(self._source, optax.GradientTransformation):
            raise ValueError(
                f"{CALLER}: learning_rate={rate}, but the rate is that of the transform. Build the "
                "optimizer from a config, such as \"adamw(recipe='one_pass')\", whose rate Keras sets."
            )
        setter = keras.optimizers.Optimizer.learning_rate.fset
        assert setter is not None
        setter(self, rate)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make a variable of Keras for each array of the transform's state."""
        if self.built:
            return
        super().build(variables)
        params = self._params()
        self._others = len(self.variables)
        state = self._of_rate(0.0).init(params)
        leaves, self._structure = jax.tree.flatten(state)
        layouts = [None] * len(leaves)
        if keras.distribution.distribution() is not None:
            cuts = [x.sharding for x in params]
            layouts = jax.tree.leaves(state_shardings(self._of_rate(0.0), params, cuts))
        for i, (x, layout) in enumerate(zip(leaves, layouts, strict=True)):
            variable = self.add_variable(x.shape, dtype=str(x.dtype), layout=layout, name=f"state_{i}")
            variable.assign(x)

    def _backend_update_step(
        self,
        grads: Sequence,
        trainable_variables: Sequence,
        learning_rate: Any,  # of Keras
    ) -> None:
        """Step all weights at once, under Keras' own trace."""
        tx, params = self._of_rate(jnp.asarray(learning_rate, jnp.float32)), self._params()
        stepped = [self._get_variable_index(v) for v in trainable_variables]
        # Keras leaves out a weight without a gradient. It is not set below, and its moments are of zeros.
        all_grads = list(map(jnp.zeros_like, params))
        for i, g in zip(stepped, grads, strict=True):
            all_grads[i] = g
        updates, state = tx.update(all_grads, self._state(), params)
        new = jax.tree.leaves(optax.apply_updates(params, updates))
        for i, variable in zip(stepped, trainable_variables, strict=True):
            variable.assign(new[i])
        self._set_state(state)

    def _params(self) -> list[jax.Array]:
        return [v.value for v in self._trainable_variables]

    def _state(self) -> Tree:
        return self._structure.unflatten([v.value for v in self.variables[self._others :]])

    def _set_state(self, state: Tree) -> None:
        for variable, x in zip(self.variables[self._others :], jax.tree.leaves(state), strict=True):
            variable.assign(x)

    def save_own_variables(self, store: Any) -> None:  # a mapping of Keras
        """Write Keras' own variables by their index, and the state as a state file without weights."""
        for i, variable in enumerate(self.variables[: self._others]):
            store[str(i)] = variable.numpy()
        store["state"] = state_bytes(self._save)

    def load_own_variables(self, store: Any) -> None:  # a mapping of Keras
        """Continue from the output of `save_own_variables` of either backend, or raise ValueError."""
        params, tx = self._params(), self._of_rate(0.0)
        _, state = load_bytes(store["state"], self._save, lambda path: load_state(path, params, tx))
        self._set_state(state)
        for i, variable in enumerate(self.variables[: self._others]):
            variable.assign(store[str(i)])

    def _save(self, path: pathlib.Path) -> None:
        save_state(path, self._params(), self._state(), self._of_rate(0.0))

    def get_config(self) -> Arguments:
        """Return the arguments, for a `.keras` file."""
        if isinstance(self._source, optax.GradientTransformation):
            raise TypeError(
                f"{CALLER}: a .keras file cannot hold a transform. Build the optimizer from a config, "
                "such as \"adamw(recipe='one_pass')\", or use save_weights."
            )
        config = super().get_config()
        config.pop("weight_decay")
        return {**config, "transform": self._source}
