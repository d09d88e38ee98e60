"""The sharding of arrays that belong to a weight (codes, scales, further bits), from the weight's."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from halfstep_jax.leaf_calls import Tree


def placed_like(
    sharding: NamedSharding, weight_shape: tuple[int, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """Return the sharding of an array that belongs to a weight.

    An array shaped like the weight gets the weight's sharding. Other arrays keep the mesh axes of their
    leading axes that are equal to the weight's. The first axis of another size keeps the mesh axes of the
    weight's axis in its place, if they divide it. Blocks lie along trailing axes, so scales and packed codes
    are cut where the weight is. All further axes are replicated.

    Example:
        >>> mesh = jax.make_mesh((1, 1), ("x", "y"))
        >>> weight = NamedSharding(mesh, PartitionSpec("x", "y"))
        >>> tuple(placed_like(weight, (64, 512), (64, 4)).spec)
        ('x', 'y')
    """
    if shape == weight_shape:
        return sharding
    spec = tuple(sharding.spec) + (None,) * (len(weight_shape) - len(sharding.spec))
    cut: list = []
    for n, weight_size, axes in zip(shape, weight_shape, spec, strict=False):
        divides = axes is not None and n % _devices(sharding, axes) == 0
        cut.append(axes if divides else None)
        if n != weight_size:
            break  # The following axes do not belong to the weight.
    cut += [None] * (len(shape) - len(cut))
    return NamedSharding(sharding.mesh, PartitionSpec(*cut), memory_kind=sharding.memory_kind)


def _devices(sharding: NamedSharding, axes) -> int:
    """Return the number of devices over which mesh axes divide an axis."""
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(sharding.mesh.shape[name] for name in names)


def with_auto_axes(function: Callable, *arrays) -> Tree:
    """Return function(*arrays), called with explicit mesh axes made Auto.

    Explicit axes are part of an array's type, and blocks are cut by reshapes to which JAX would want to be
    told the type. Inside, XLA finds out where things lie, as on a mesh of other axes; the results are placed
    as the array with the most axes, to which they belong (`placed_like`).
    """
    explicit = [x for x in jax.tree.leaves(arrays) if _is_explicit(x)]
    if not explicit:
        return function(*arrays)
    like = max(explicit, key=lambda x: (x.ndim, sum(axes is not None for axes in _sharding(x).spec)))
    bare = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x, arrays
    )
    shapes = jax.eval_shape(function, *bare)
    sharding_of = functools.partial(placed_like, _sharding(like), like.shape)
    out = jax.tree.map(lambda x: sharding_of(x.shape), shapes)
    return jax.sharding.auto_axes(function, out_sharding=out)(*arrays)


def placed_as(like: Tree, function: Callable, *arrays) -> Tree:
    """Do as `with_auto_axes` with the results sharded as the arrays `like`."""
    explicit = [x for x in jax.tree.leaves(like) if _is_explicit(x)]
    if not explicit:
        return function(*arrays)
    whole = NamedSharding(_sharding(explicit[0]).mesh, PartitionSpec())
    out = jax.tree.map(lambda x: _sharding(x) if _is_explicit(x) else whole, like)
    return jax.sharding.auto_axes(function, out_sharding=out)(*arrays)


def whole_along(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Return an array that is not sharded along these axes by explicit mesh axes."""
    if not _is_explicit(x):
        return x
    spec = (*_sharding(x).spec, *(None,) * x.ndim)
    cut = [None if i in axes else spec[i] for i in range(x.ndim)]
    return jax.sharding.reshard(x, NamedSharding(_sharding(x).mesh, PartitionSpec(*cut)))


def cut_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return an array sharded as another of its shape on explicit mesh axes."""
    return jax.sharding.reshard(x, _sharding(like)) if _is_explicit(like) else x


def _is_explicit(x) -> bool:
    return hasattr(x, "dtype") and AxisType.Explicit in getattr(_sharding(x).mesh, "axis_types", ())


def _sharding(x) -> NamedSharding:
    return jax.typeof(x).sharding
