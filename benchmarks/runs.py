"""Runs of an optimizer with one weight, stepped alike in torch, in JAX and in float64.

A run takes gradients, and gives its weight and its second moment, decoded as its own library does.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

BETAS = (0.9, 0.999)


class TorchRun:
    """An optimizer of torch with one weight."""

    def __init__(self, entry: Any, weight: np.ndarray, numbers: dict, dtype=torch.bfloat16, compiled=None):
        """Begin; `compiled` True or False forces what None leaves to the library."""
        self.entry, self.steps = entry, 0
        self.param = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float32).to(dtype))
        forced = {} if compiled is None else entry.arguments[0 if compiled else 1]
        self.optimizer = entry.make([self.param], **numbers, **forced)
        self._step, self._context = self.optimizer.step, contextlib.nullcontext
        if compiled and not entry.compiles:
            self._step = torch.compile(lambda: self.optimizer.step() and None)
        if compiled is False and entry.compiles and not forced:
            self._context = lambda: torch.compiler.set_stance("force_eager")

    def native(self, gradient: np.ndarray) -> torch.Tensor:
        """Return a gradient as `step` takes it."""
        return torch.tensor(gradient, dtype=torch.float32).to(self.param.dtype)

    def step(self, gradient: torch.Tensor) -> None:
        """Take a step; the gradient is copied, as some libraries write to it."""
        self.param.grad = gradient.clone()
        with self._context():
            self._step()
        self.steps += 1

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of the weight."""
        return self.optimizer.state[self.param]

    @property
    def stored(self) -> torch.Tensor:
        """The weight of the model."""
        return self.param.detach()

    @property
    def debiased(self) -> float:
        """The divisor of a second moment that is kept with its bias corrected: 1 - b2^t."""
        return 1 - BETAS[1] ** self.steps

    def weight(self) -> np.ndarray:
        """Return the weight with what is kept beside it, in float64."""
        return self.entry.weight(self).to(torch.float64).numpy().copy()

    def second_moment(self) -> np.ndarray:
        """Return the second moment, in float64."""
        return self.entry.second(self).to(torch.float64).numpy().copy()

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the state that have an axis; of a tensor subclass those within."""
        return [x for x in tensors_in(list(self.optimizer.state.values())) if x.ndim]


class JaxRun:
    """A transform of Optax's kind with one weight."""

    def __init__(self, entry: Any, weight: np.ndarray, numbers: dict, compiled=None, device=None):
        """Begin; `device` is where arrays are put, a sharding for instance."""
        self.entry, self.steps, self._device = entry, 0, device
        init, self._update = entry.make(**numbers)
        self.params = {"w0": jax.device_put(jnp.asarray(weight, jnp.bfloat16), device)}
        self.held = init(self.params)
        self._context = jax.disable_jit if compiled is False else contextlib.nullcontext
        if compiled is not False:
            self._update = jax.jit(self._update)

    def native(self, gradient: np.ndarray) -> jax.Array:
        """Return a gradient as `step` takes it."""
        return jax.device_put(jnp.asarray(gradient, jnp.bfloat16), self._device)

    def step(self, gradient: jax.Array) -> None:
        """Take a step."""
        with self._context():
            self.params, self.held = self._update(self.params, self.held, {"w0": gradient})
        self.steps += 1

    @property
    def stored(self) -> jax.Array:
        """The weight of the model."""
        return self.params["w0"]

    def weight(self) -> np.ndarray:
        """Return the weight with what is kept beside it, in float64."""
        return np.asarray(self.entry.weight(self)).astype(np.float64)

    def second_moment(self) -> np.ndarray:
        """Return the second moment, in float64."""
        return np.asarray(self.entry.second(self)).astype(np.float64)

    def tensors(self) -> list[jax.Array]:
        """Return the arrays of the state that have an axis and are as long as a weight is."""
        return [x for x in jax.tree.leaves(self.held) if x.ndim and jnp.issubdtype(x.dtype, jnp.number)]


class Float32Run:
    """AdamW without rounding, in float64: what the others are held against."""

    def __init__(self, weight: np.ndarray, lr: float = 1e-3, eps: float = 1e-8, weight_decay: float = 0.0):
        """Begin with a weight."""
        self._numbers, self.steps = (lr, eps, weight_decay), 0
        self._w = np.asarray(torch.tensor(weight).to(torch.bfloat16).to(torch.float64))
        self._m, self._v = np.zeros_like(self._w), np.zeros_like(self._w)

    def native(self, gradient: np.ndarray) -> np.ndarray:
        """Return a gradient as `step` takes it: with the bits that bfloat16 has."""
        return torch.tensor(gradient, dtype=torch.float32).to(torch.bfloat16).to(torch.float64).numpy()

    def step(self, gradient: np.ndarray) -> None:
        """Take a step."""
        (lr, eps, weight_decay), (b1, b2) = self._numbers, BETAS
        self.steps += 1
        self._m = b1 * self._m + (1 - b1) * gradient
        self._v = b2 * self._v + (1 - b2) * gradient**2
        root = np.sqrt(self._v / (1 - b2**self.steps)) + eps
        self._w = self._w - lr * (self._m / (1 - b1**self.steps) / root + weight_decay * self._w)

    def weight(self) -> np.ndarray:
        """Return the weight."""
        return self._w

    def second_moment(self) -> np.ndarray:
        """Return the second moment."""
        return self._v


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, of a tensor subclass those within."""
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        yield from tensors_in([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)
