"""Tensors as JAX arrays and back, over DLPack in the same memory if both frameworks can read it."""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.dlpack import from_dlpack
from torch import Tensor

_PLATFORMS = {"cpu": "cpu", "cuda": "cuda"}


def device_of(caller: str, name: str, tensor: Tensor) -> Any:  # a device of JAX, hidden by its stubs
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
    """Return a tensor as an array, and whether it shares memory. Other layouts are copied."""
    row_major = tensor.detach().contiguous()
    try:
        array = from_dlpack(row_major)
    except (RuntimeError, ValueError, TypeError, BufferError):
        # The memory is not aligned for XLA.
        array = from_dlpack(row_major.clone())
    return array, device == next(iter(array.devices())) and address(array) == tensor.data_ptr()


def own_copy(array: jax.Array) -> jax.Array:
    """Return an array in its own memory, to which no tensor writes."""
    return jnp.array(array, copy=True)


def address(array: jax.Array) -> int:
    """Return the address of an array on one device."""
    return array.unsafe_buffer_pointer()


def copy_into(tensor: Tensor, array: jax.Array) -> None:
    """Write an array to a tensor of its shape and dtype."""
    if array.size:
        tensor.copy_(torch.from_dlpack(array))
