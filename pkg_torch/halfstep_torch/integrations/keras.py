"""Optimizers of this package in Keras. Importing this imports Keras, with its torch backend."""

import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import torch

from halfstep.hyperparameters import Arguments
from halfstep.keras_optimizer import check_arguments, load_bytes, state_bytes
from halfstep_torch.checkpoint.save_state import load_state, save_state
from halfstep_torch.integrations.config import from_config


@keras.saving.register_keras_serializable("halfstep")
class KerasOptimizer(keras.optimizers.Optimizer):
    """A Keras optimizer that steps the weights by an optimizer of this package, inside an unchanged `fit`.

    Leaf names are the indices in the model's `trainable_variables`. A `.keras` file and `save_weights` store
    the state bit for bit, and `halfstep_jax.integrations.keras` resumes from it with Keras' JAX backend.

        model.compile(KerasOptimizer("adamw(recipe='one_pass')", learning_rate=1e-3), "mse")

    Args:
        transform: the config of an optimizer of this package without its learning rate, a text or a mapping
            (see `from_config`). The name of the argument is the same in the JAX package.
        learning_rate: a number or a schedule of Keras, which callbacks may change.
        name: the name of the optimizer.
        **options: options of `keras.optimizers.Optimizer` such as clipping, `gradient_accumulation_steps`,
            `loss_scale_factor` and moving averages, which Keras computes. `weight_decay` belongs to the
            config, because Keras would round it to the dtype of the weights.

    Raises:
        RuntimeError: if the backend of Keras is not torch.
        TypeError: if `weight_decay` is passed beside the config.
        ValueError: if `from_config` rejects the config.

    Source: ours.
    """

    def __init__(
        self,
        transform: str | Arguments,
        learning_rate: Any,  # a number, or a schedule of Keras
        name: str = "halfstep",
        **options: Any,  # of Keras
    ) -> None:
        check_arguments(keras.backend.backend(), "torch", options)
        make = from_config(transform)
        super().__init__(learning_rate, name=name, **options)
        self._source, self._make = transform, make

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make the optimizer of the weights."""
        if self.built:
            return
        super().build(variables)
        self._model = torch.nn.Module()
        for i, variable in enumerate(variables):
            self._model.register_parameter(str(i), variable.value)
        self._optimizer = self._make(self._model.named_parameters())

    def _backend_update_step(
        self,
        grads: Sequence,
        trainable_variables: Sequence,
        learning_rate: Any,  # of Keras
    ) -> None:
        """Step all weights that have a gradient at once."""
        for group in self._optimizer.param_groups:
            group["lr"] = float(learning_rate)
        own = [v.value.grad for v in self._trainable_variables]
        try:
            for variable in self._trainable_variables:
                variable.value.grad = None
            for variable, grad in zip(trainable_variables, grads, strict=True):
                variable.value.grad = grad
            self._optimizer.step()
        finally:
            for variable, grad in zip(self._trainable_variables, own, strict=True):
                variable.value.grad = grad

    def save_own_variables(self, store: Any) -> None:  # a mapping of Keras
        """Write Keras' own variables by their index, and the state as a state file without weights."""
        super().save_own_variables(store)
        store["state"] = state_bytes(self._save)

    def load_own_variables(self, store: Any) -> None:  # a mapping of Keras
        """Load the output of `save_own_variables` from either backend, or raise ValueError."""
        load_bytes(store["state"], self._save, lambda path: load_state(path, self._model, self._optimizer))
        for i, variable in enumerate(self.variables):
            variable.assign(store[str(i)])

    def _save(self, path: pathlib.Path) -> None:
        save_state(path, self._model, self._optimizer)

    def get_config(self) -> Arguments:
        """Return the arguments, for a `.keras` file."""
        config = super().get_config()
        config.pop("weight_decay")
        return {**config, "transform": self._source}
