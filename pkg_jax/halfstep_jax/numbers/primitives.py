"""Operations of ours that are one equation of a trace each, whatever they are made of on a platform.

Contract: A2, A3. A `jax.lax.platform_dependent` holds the branches of all platforms in every trace, and a
`jax.custom_jvp` a program of its own; a primitive has neither, and says what it is where it is lowered.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from halfstep_jax.numbers.shards import vary_together


def elementwise(
    name: str,
    type_of_result: Callable[..., Any],
    derivative: Callable[..., Any],
    default: Callable[..., jax.Array],
    in_hlo: Mapping[str | None, Callable[..., Any]] = MappingProxyType({}),
    op_by_op: Callable[..., jax.Array] | None = None,
    **platforms: Callable[..., jax.Array],
) -> Callable[..., jax.Array]:
    """Return an elementwise operation on arrays, all of one shape or scalars beside the first.

    Op by op, unless that is said, and compiled for several platforms at once, it is what each of these has.

    Args:
        name: of its equations.
        type_of_result: from the abstract values of its operands to that of its result.
        derivative: from the operands and their tangents to that of the result.
        default: what it is, in operations of JAX.
        in_hlo: by platform, and by None, what a trace of `default` or `platforms` for every shape would take
            longer to find: its result in StableHLO, from operands there.
        op_by_op: what it is there on every platform, where all give the same and need not be told apart.
        platforms: what it is on platforms of which that is not so.

    Source: ours.
    """
    primitive = Primitive(name)

    def here(*operands):
        return (
            lax.platform_dependent(*operands, default=default, **platforms)
            if platforms
            else default(*operands)
        )

    def jvp(primals, tangents):
        return primitive.bind(*primals), derivative(
            tuple(primals), tuple(map(ad.instantiate_zeros, tangents))
        )

    def batch(operands, axes):
        operands, axis = _batched(operands, axes)
        return primitive.bind(*operands), axis

    primitive.def_impl(op_by_op or here)
    primitive.def_abstract_eval(type_of_result)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    for platform, function in {None: default, **platforms}.items():
        rule = mlir.lower_fun(function, multiple_results=False)
        if platform in in_hlo:
            rule = functools.partial(_lowered, in_hlo[platform])
        mlir.register_lowering(primitive, rule, platform=platform)

    def operation(*operands):
        return primitive.bind(*vary_together(operands))

    return operation


def _lowered(operation: Callable[..., Any], _, *operands) -> list:
    return [operation(*operands)]


def _batched(operands: Sequence[Any], axes: Sequence[Any]) -> tuple[list[jax.Array], int]:
    """Return the operands of a batch, all of one shape, and which of its axes counts the batch."""
    rows = [(jnp.asarray(x), a, _without(a, jnp.shape(x))) for x, a in zip(operands, axes, strict=True)]
    shape = max((own for _, _, own in rows), key=len)
    size = next(x.shape[a] for x, a, _ in rows if a is not None)
    axis = next((a for _, a, own in rows if a is not None and own == shape), 0)
    whole = (*shape[:axis], size, *shape[axis:])
    return [_spread(x, a, axis, own, whole) for x, a, own in rows], axis


def _without(axis: int | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])


def _spread(x: jax.Array, found: int | None, axis: int, own: tuple[int, ...], whole: tuple[int, ...]):
    """Return an operand, whose shape without its batch axis is `own`, as one of a batch."""
    if found is None:
        return jnp.broadcast_to(x if own == () else jnp.expand_dims(x, axis), whole)
    return lax.broadcast_in_dim(x, whole, (axis,)) if own == () else jnp.moveaxis(x, found, axis)
