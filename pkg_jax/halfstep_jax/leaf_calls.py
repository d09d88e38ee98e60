"""One program for all leaves of one shape, which a step traces and lowers once."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.core import Tracer

Tree: TypeAlias = Any
"""A pytree, such as params, updates and states: JAX has no type for it. Or a leaf of one."""
Traced: TypeAlias = Any
"""A part of a trace of JAX, which gives no public names to their classes."""


def call_per_shape(function: Callable[..., Tree], static, *arrays) -> Tree:
    """Return function(static, *arrays); under a trace as a `jax.jit` of its own.

    Leaves with arrays of the same shapes and dtypes then share one trace and one lowering; XLA inlines the
    calls, so that the compiled step does not change. Op by op nothing is compiled. `function`
    stands at module level, or JAX would trace it anew at every step; where `static` is not hashable nothing
    is shared. Numbers of the step and keys are among the arrays, so that these may differ.
    """
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays)) or not _is_hashable(static):
        return function(static, *arrays)
    return _jitted(function)(static, *arrays)


@functools.cache
def _jitted(function: Callable):
    return jax.jit(function, static_argnums=0)


def _is_hashable(value) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
