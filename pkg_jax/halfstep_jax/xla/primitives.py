"""JAX primitives: operations that are one equation in a trace and are lowered by platform.

Contract: A2, A3. A `jax.lax.platform_dependent` holds the branches of all platforms in every trace, and a
`jax.custom_jvp` a program of its own; a primitive has neither, and is decided where it is lowered.

This, with `passes`, is the one place that reaches for JAX's points of extension. Where a version of JAX has
moved one, an operation is a plain function: the bits stay, and traces are longer.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from halfstep.newest import say_if_newer
from halfstep_jax.leaf_calls import Traced
from halfstep_jax.xla.shards import vary_together

_Operation = Callable[..., jax.Array]
# The errors of JAX if a name is gone, or has another meaning.
_MOVED = (ImportError, AttributeError, TypeError)


def type_of_first(*operands: Traced) -> Traced:
    """Return the abstract value of the first operand, and that it is no Python number."""
    return operands[0].update(weak_type=False) if hasattr(operands[0], "update") else operands[0]


def _tangent_of_first(primals: Sequence[Traced], tangents: Sequence[Traced]) -> Traced:
    return tangents[0]


def elementwise(
    name: str,
    default: _Operation,
    type_of_result: Callable = type_of_first,
    derivative: Callable = _tangent_of_first,
    in_hlo: Mapping[str | None, Callable | None] = MappingProxyType({}),
    op_by_op: _Operation | None = None,
    **platforms: _Operation,
) -> _Operation:
    """Return an elementwise operation on arrays, all of one shape or scalars beside the first.

    Op by op, unless `op_by_op` is given, and compiled for several platforms at once, it has the form of each
    platform.

    Args:
        name: of its equations.
        default: its form in operations of JAX.
        type_of_result: from the abstract values of its operands to that of its result.
        derivative: from the operands and their tangents to the tangent of the result.
        in_hlo: by platform, and by None, its result in StableHLO from operands there, which is faster than a
            trace of `default` or `platforms` for every shape; None if that is out of reach.
        op_by_op: its form there on every platform, if all give the same and need not be told apart.
        platforms: its form on other platforms.

    Source: ours.
    """

    def here(*operands):
        return (
            lax.platform_dependent(*operands, default=default, **platforms)
            if platforms
            else default(*operands)
        )

    try:
        primitive = _primitive(name, type_of_result, derivative, op_by_op or here)
        for platform, function in {None: default, **platforms}.items():
            _lower(primitive, platform, function, in_hlo.get(platform))
        bind = primitive.bind
    except _MOVED:
        bind = _plain(here, derivative)

    def operation(*operands):
        return bind(*vary_together(operands))

    return operation


def type_of(name: str) -> Callable:
    """Return the function for the abstract value of a result of `jax.lax`, such as that of "div"."""

    def type_of_result(*operands: Traced) -> Traced:
        try:
            return getattr(lax, f"{name}_p").abstract_eval(*operands)[0]
        except _MOVED:
            return type_of_first(*operands)

    return type_of_result


def stablehlo(name: str) -> Callable | None:
    """Return an operation of StableHLO, such as "sqrt"; None where JAX does not have it."""
    try:
        return getattr(importlib.import_module("jax.extend.mlir.dialects.stablehlo"), name)
    except _MOVED:
        return None


def _primitive(name: str, type_of_result, derivative, implementation: _Operation) -> Traced:
    """Return a new primitive that is not lowered yet."""
    say_if_newer("jax", jax.__version__)
    primitive = importlib.import_module("jax.extend.core").Primitive(name)
    ad, batching = (importlib.import_module(f"jax.interpreters.{part}") for part in ("ad", "batching"))
    instantiate_zeros = ad.instantiate_zeros

    def jvp(primals, tangents):
        tangents = tuple(map(instantiate_zeros, tangents))
        return primitive.bind(*primals), derivative(tuple(primals), tangents)

    def batch(operands, axes):
        operands, axis = _batched(operands, axes)
        return primitive.bind(*operands), axis

    primitive.def_impl(implementation)
    primitive.def_abstract_eval(type_of_result)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    return primitive


def _lower(primitive: Traced, platform: str | None, function: _Operation, in_hlo: Callable | None) -> None:
    """Register the lowering of a primitive on a platform; None means all others."""
    mlir = importlib.import_module("jax.interpreters.mlir")
    rule = mlir.lower_fun(function, multiple_results=False)
    if in_hlo is not None:
        rule = functools.partial(_lowered, in_hlo)
    mlir.register_lowering(primitive, rule, platform=platform)


def _plain(here: _Operation, derivative: Callable) -> _Operation:
    """Return an operation without a primitive: the same bits, longer traces."""

    @jax.custom_jvp
    def operation(*operands):
        return here(*operands)

    operation.defjvp(lambda primals, tangents: (operation(*primals), derivative(primals, tangents)))
    return operation


def _lowered(operation: Callable, _, *operands) -> list:
    return [operation(*operands)]


def _batched(operands: Sequence[ArrayLike], axes: Sequence[int | None]) -> tuple[list[jax.Array], int]:
    """Return the operands of a batch in one shape, and its batch axis."""
    rows = [(jnp.asarray(x), a, _without(a, jnp.shape(x))) for x, a in zip(operands, axes, strict=True)]
    shape = max((part for _, _, part in rows), key=len)
    size = next(x.shape[a] for x, a, _ in rows if a is not None)
    axis = next((a for _, a, part in rows if a is not None and part == shape), 0)
    whole = (*shape[:axis], size, *shape[axis:])
    return [_spread(x, a, axis, part, whole) for x, a, part in rows], axis


def _without(axis: int | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])


def _spread(x: jax.Array, place: int | None, axis: int, part: tuple[int, ...], whole: tuple[int, ...]):
    """Return an operand, of the shape `own` without its batch axis, as one of a batch."""
    if place is None:
        return jnp.broadcast_to(x if part == () else jnp.expand_dims(x, axis), whole)
    return lax.broadcast_in_dim(x, whole, (axis,)) if part == () else jnp.moveaxis(x, place, axis)
