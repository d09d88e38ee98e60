"""One program for all leaves of one shape, which a step traces and lowers once, and calls that wait.

Inside `waiting_calls` the calls of leaves wait, so that one kernel may compute all of them (`kernels`).
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
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
    arrays = jax.tree.map(value_of, arrays)
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays))
    if not is_traced or _places.get() is not None or not _is_hashable(static):
        return function(static, *arrays)
    return _jitted(function)(static, *arrays)


def call_for_leaf(
    function: Callable[..., Tree], static, given: tuple, arrays: tuple, like: Tree, cuts: tuple = ()
) -> Tree:
    """Return function(static, *given, *arrays), elementwise but for blocks; inside `waiting_calls` it waits.

    Args:
        function: see `call_per_shape`.
        static: likewise.
        given: what all elements share: keys, the index of the leaf, numbers, and a uint32 zero.
        arrays: of the leaf.
        like: the result, or arrays of `arrays` that the result replaces, or their shapes and dtypes.
        cuts: of each `Encoded` among the arrays, the length of a block and of a run; (0, 0) without scales.
    """
    calls = _waiting.get()
    is_traced = any(isinstance(x, Tracer | LaterArray) for x in jax.tree.leaves((given, arrays)))
    if calls is None or not is_traced or not _is_hashable(static):
        return call_per_shape(function, static, *given, *arrays)
    call = LeafCall(function, static, given, arrays, like, cuts)
    calls.append(call)
    return call.result


class LaterArray:
    """A result of a call that waits. What reads it as an array of JAX has the call run first."""

    def __init__(self, call: "LeafCall", shape: tuple[int, ...], dtype) -> None:
        self.call, self.shape, self.dtype = call, tuple(shape), np.dtype(dtype)
        self.value: jax.Array | None = None

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    def __jax_array__(self) -> jax.Array:
        if self.value is None:
            self.call.run()
        assert self.value is not None
        return self.value


class LeafCall:
    """A call of one leaf that waits.

    Attributes: the arguments of `call_for_leaf`, and
        result: a tree with a `LaterArray` for each array.
        has_run: whether their values are there.
        problem: why no kernel can compute it, or "".
    """

    def __init__(self, function: Callable, static, given: tuple, arrays: tuple, like: Tree, cuts: tuple):
        self.function, self.static, self.given, self.arrays = function, static, given, arrays
        self.like, self.cuts, self.has_run, self.problem = like, cuts, False, ""
        self.result = jax.tree.map(lambda x: LaterArray(self, x.shape, x.dtype), like)

    def run(self) -> None:
        """Compute the result by XLA."""
        arrays = jax.tree.map(value_of, self.arrays)
        self.set(jax.tree.leaves(call_per_shape(self.function, self.static, *self.given, *arrays)))

    def set(self, values: list[jax.Array]) -> None:
        """Note the values of the result."""
        for x, value in zip(jax.tree.leaves(self.result), values, strict=True):
            x.value = value
        self.has_run = True


_waiting: contextvars.ContextVar[list[LeafCall] | None] = contextvars.ContextVar("waiting", default=None)


@contextlib.contextmanager
def waiting_calls(calls: list[LeafCall] | None) -> Iterator[None]:
    """Let calls of leaves wait, and collect them; None lets none wait."""
    token = _waiting.set(calls)
    try:
        yield
    finally:
        _waiting.reset(token)


def may_wait(tx: Tree, parts: tuple = ()) -> Tree:
    """Return a transform, marked as one whose calls of leaves may wait; of a chain, with its links.

    Its links take arrays that wait for arrays: they compute by `call_for_leaf`, or ask for `value_of`.
    """
    tx.update.links_that_may_wait = parts or (tx,)
    return tx


def links_that_may_wait(tx: Tree) -> tuple:
    """Return the links of a marked chain, or the marked transform itself, or none."""
    return getattr(tx.update, "links_that_may_wait", ())


def value_of(x: Tree) -> Tree:
    """Return the value of an array that waits; others are returned as they are."""
    return x.__jax_array__() if isinstance(x, LaterArray) else x


class Places:
    """The row-major indices of elements, uint32, given to the trace of a kernel.

    Attributes:
        index: of each element.
        firsts: of the first element of each block, by the length of the block.
    """

    def __init__(self, index: jax.Array, firsts: dict[int, jax.Array]):
        self.index, self.firsts = index, firsts


_places: contextvars.ContextVar[Places | None] = contextvars.ContextVar("places", default=None)


@contextlib.contextmanager
def kernel_trace(places: Places) -> Iterator[None]:
    """Trace for a kernel inside: calls are inlined, indices are given, and no zero has to be opaque."""
    token, waiting = _places.set(places), _waiting.set(None)
    try:
        yield
    finally:
        _places.reset(token)
        _waiting.reset(waiting)


def given_places() -> Places | None:
    """Return the indices that are given inside `kernel_trace`; None elsewhere."""
    return _places.get()


@functools.cache
def _jitted(function: Callable):
    return jax.jit(function, static_argnums=0)


def _is_hashable(value) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
