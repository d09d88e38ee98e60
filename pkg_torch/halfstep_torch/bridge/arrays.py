"""Tensors as JAX arrays and back: over DLPack in the same memory where both frameworks can see it."""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.dlpack import from_dlpack
from torch import Tensor

_PLATFORMS = {"cpu": "cpu", "cuda": "cuda"}


def device_of(caller: str, name: str, tensor: Tensor) -> Any:  # a device of JAX, whose class its stubs hide
    """Return the JAX device that holds a tensor."""
    kind, index = tensor.device.type, tensor.device.index or 0
    try:
        devices = jax.devices(_PLATFORMS[kind])
    except (KeyError, RuntimeError):
        devices = []
    if index >= len(devices):
        raise ValueError(
            f"{caller}: the parameter {name!r} is on {tensor.device}, which JAX does not see here. "
            "Move the model to the CPU, or install JAX for that device."
        )
    return devices[index]


def to_jax(tensor: Tensor, device: object) -> tuple[jax.Array, bool]:
    """Return a tensor as an array, and whether in the same memory; other layouts are copied."""
    row_major = tensor.detach().contiguous()
    try:
        array = from_dlpack(row_major)
    except (RuntimeError, ValueError, TypeError, BufferError):
        # Memory that is not aligned as XLA wants it.
        array = from_dlpack(row_major.clone())
    return array, device == next(iter(array.devices())) and address(array) == tensor.data_ptr()


def own_copy(array: jax.Array) -> jax.Array:
    """Return an array in memory of its own, which no tensor writes to."""
    return jnp.array(array, copy=True)


def address(array: jax.Array) -> int:
    """Return where an array of one device is in memory."""
    return array.unsafe_buffer_pointer()


def copy_into(tensor: Tensor, array: jax.Array) -> None:
    """Write an array to a tensor of its shape and dtype."""
    if array.size:
        tensor.copy_(torch.from_dlpack(array))
