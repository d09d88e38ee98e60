"""One adapter per backend: from a vector's op to the backend's own function, array in, array out.

A backend runs what its users run: public functions, transforms in a chain, optimizer classes.
"""

import importlib.util

from backends.protocol import Backend
from backends.spec import SpecBackend

__all__ = ["BACKENDS", "Backend", "SpecBackend", "make", "missing"]

BACKENDS = {
    "spec": None,
    "jax-eager": "jax",
    "jax-jit": "jax",
    "jax-sharded": "jax",
    "torch-eager": "torch",
    "torch-compile": "torch",
}
"""Backend names, and the framework that each needs."""


def missing(name: str) -> bool:
    """Tell whether the framework of a backend is not installed."""
    framework = BACKENDS[name]
    return framework is not None and importlib.util.find_spec(framework) is None


def make(name: str) -> Backend:
    """Return a backend by name; imports its framework."""
    if name == "spec":
        return SpecBackend()
    framework, mode = name.split("-")
    if framework == "jax":
        from backends.on_jax import JaxBackend

        return JaxBackend(mode)
    from backends.on_torch import TorchBackend

    return TorchBackend(mode)
