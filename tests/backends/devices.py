"""Where both frameworks keep their arrays: on the CPU, or on a GPU that both see."""

import contextlib
from collections.abc import Iterator

import jax
import torch


def jax_device(device: str) -> jax.Device:
    """Return JAX's own first device, given what torch calls it."""
    return jax.local_devices(backend="cpu" if device == "cpu" else None)[0]


def why_absent(device: str) -> str | None:
    """Return why steps cannot be taken on a device, or None."""
    if device == "cpu":
        return None
    if jax.default_backend() == "cpu":
        return "JAX sees no GPU. Install its build for one, and leave JAX_PLATFORMS unset."
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != torch.device(device).type:
        return f"torch sees no {device} (but {found}). Install its build for that."
    return None


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    """Make arrays on a device, those of the backends too."""
    with jax.default_device(jax_device(device)), torch.device(device):
        yield
