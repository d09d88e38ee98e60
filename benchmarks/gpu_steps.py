"""Steps of ours and of peers on a device, for `gpu.py` and `tests/gpu`: their bits and their bytes."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import torch

import halfstep_jax
import halfstep_torch
from backends.devices import jax_device

_RATE, _DECAY = 1e-3, 0.1


def settings(hs: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the steps: the name of an optimizer and its options; `hs` is either package."""
    fp8 = {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")}
    tables = {"mu_dtype": hs.codebook("dynamic8"), "nu_dtype": hs.codebook("udynamic8")}
    return {
        "AdamW, bfloat16 (default)": ("AdamW", {}),
        "AdamW, one_pass": ("AdamW", dict(hs.recipes.one_pass)),
        "AdamW, eight_bit": ("AdamW", dict(hs.recipes.eight_bit)),
        "AdamW, fp8": ("AdamW", fp8),
        "AdamW, split16": ("AdamW", {"param_storage": "split16"}),
        "AdamW, 8-bit codebooks": ("AdamW", tables),
        "Lion": ("Lion", {}),
        "LAMB": ("Lamb", {}),
    }


class JaxSteps:
    """Steps of an alias of `halfstep_jax`, or of another Optax transform, on one device."""

    def __init__(self, tx: Any, weights: list[np.ndarray], device: Any) -> None:
        self._device = device
        self.params = self._tree(weights)
        self.state = jax.device_put(jax.jit(tx.init)(self.params), device)

        def step(params, state, gradients):
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def _tree(self, arrays: list[np.ndarray]) -> dict[str, jax.Array]:
        return {
            f"w{i}": jax.device_put(x.astype(ml_dtypes.bfloat16), self._device) for i, x in enumerate(arrays)
        }

    def give(self, gradients: list[np.ndarray]) -> None:
        """Take gradients for the steps to come."""
        self._gradients = self._tree(gradients)

    def step(self) -> None:
        """Take a step."""
        self.params, self.state = self._step(self.params, self.state, self._gradients)

    def wait(self) -> None:
        """Return when all steps are done."""
        jax.block_until_ready((self.params, self.state))

    def bits(self) -> dict[str, np.ndarray]:
        """Return weights and state, as patterns."""
        arrays = jax.tree_util.tree_leaves_with_path(self.state)
        named = {jax.tree_util.keystr(path): x for path, x in arrays} | self.params
        return {name: _patterns(np.asarray(x)) for name, x in named.items()}

    @property
    def compilations(self) -> int:
        """How many programs the step has."""
        return self._step._cache_size()

    @property
    def moved(self) -> int:
        """The bytes that a step must move: weights and state in and out, gradients in."""
        weights, state = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (self.params, self.state))
        return 2 * state + 3 * weights


class TorchSteps:
    """Steps of an optimizer of torch's kind on one device."""

    def __init__(self, make: Callable[..., Any], weights: list[np.ndarray], device: str) -> None:
        self._device = device
        self._named = [(f"w{i}", torch.nn.Parameter(x)) for i, x in enumerate(self._tensors(weights))]
        self._optimizer = make(self._named)

    def _tensors(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        narrow = (np.ascontiguousarray(x.astype(ml_dtypes.bfloat16)).view(np.int16) for x in arrays)
        return [torch.from_numpy(x).to(self._device, copy=True).view(torch.bfloat16) for x in narrow]

    def give(self, gradients: list[np.ndarray]) -> None:
        """Take gradients for the steps to come."""
        for (_, p), g in zip(self._named, self._tensors(gradients), strict=True):
            p.grad = g

    def step(self) -> None:
        """Take a step."""
        self._optimizer.step()

    def wait(self) -> None:
        """Return when all steps are done."""
        if self._device != "cpu":
            torch.accelerator.synchronize()

    def bits(self) -> dict[str, np.ndarray]:
        """Return weights and state, as patterns."""
        named = dict(self._named)
        named |= {f"{key}/{w}": x for w, p in self._named for key, x in self._optimizer.state[p].items()}
        widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return {
            name: _patterns(x.detach().cpu().contiguous().view(widths[x.element_size()]).numpy())
            for name, x in named.items()
        }

    @property
    def compilations(self) -> int:
        """How many graphs Dynamo has made in this process."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    @property
    def moved(self) -> int:
        """The bytes that a step must move: weights and state in and out, gradients in."""
        state = sum(_bytes(x) for entry in self._optimizer.state.values() for x in _tensors_in(entry))
        return 2 * state + 3 * sum(_bytes(p) for _, p in self._named)


def jax_steps(name: str, weights: list[np.ndarray], device: Any) -> JaxSteps:
    """Return the steps of a setting in JAX."""
    alias, options = settings(halfstep_jax)[name]
    tx = getattr(halfstep_jax, alias.lower())(_RATE, weight_decay=_DECAY, **options)
    return JaxSteps(tx, weights, device)


def torch_steps(
    name: str, weights: list[np.ndarray], device: str, compiled: bool, **others: Any
) -> TorchSteps:
    """Return the steps of a setting in torch."""
    alias, options = settings(halfstep_torch)[name]
    options = {**options, **others}
    make = getattr(halfstep_torch, alias)
    return TorchSteps(
        lambda named: make(named, lr=_RATE, weight_decay=_DECAY, compile=compiled, **options), weights, device
    )


def _tensors_in(entry: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors of a parameter's state, those of wrappers and of dicts in it too."""
    if isinstance(entry, dict):
        for x in entry.values():
            yield from _tensors_in(x)
    elif isinstance(entry, torch.Tensor) and hasattr(entry, "__tensor_flatten__"):
        for name in entry.__tensor_flatten__()[0]:  # pyright: ignore[reportAttributeAccessIssue]
            yield from _tensors_in(getattr(entry, name))
    elif isinstance(entry, torch.Tensor):
        yield entry


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size() if x.dim() else 0


def _patterns(array: np.ndarray) -> np.ndarray:
    return array.view(f"uint{8 * array.itemsize}")


_PEERS = {
    "torch.optim.AdamW, fused": ("torch.optim", "AdamW", {"fused": True}),
    "torch.optim.AdamW, foreach": ("torch.optim", "AdamW", {"foreach": True}),
    "bitsandbytes.optim.AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
    "torchao.optim.AdamW8bit": ("torchao.optim", "AdamW8bit", {}),
    "torchao.optim.AdamWFp8": ("torchao.optim", "AdamWFp8", {}),
    "flashoptim.FlashAdamW": ("flashoptim", "FlashAdamW", {}),
}


def peers(weights: list[np.ndarray], device: str) -> dict[str, Callable[[], Any]]:
    """Return what makes the steps of others; ImportError where one is absent."""

    def peer(module: str, name: str, options: dict[str, Any]) -> TorchSteps:
        kind = getattr(importlib.import_module(module), name)
        return TorchSteps(
            lambda named: kind([p for _, p in named], lr=_RATE, weight_decay=_DECAY, **options),
            weights,
            device,
        )

    tx = optax.adamw(_RATE, weight_decay=_DECAY)
    made: dict[str, Callable[[], Any]] = {
        name: lambda arguments=arguments: peer(*arguments) for name, arguments in _PEERS.items()
    }
    return {**made, "optax.adamw": lambda: JaxSteps(tx, weights, jax_device(device))}
