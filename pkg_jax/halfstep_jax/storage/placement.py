"""Where an array that belongs to a weight lies, given where the weight lies: codes, scales, further bits."""

import math

from jax.sharding import NamedSharding, PartitionSpec


def placed_like(
    sharding: NamedSharding, weight_shape: tuple[int, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """Return the sharding of an array that belongs to a weight.

    An array of the weight's shape lies as the weight does. What has other axes keeps the leading ones that
    are equal as they are; an axis that stands where the weight has one keeps that one's mesh axes, if they
    divide it (blocks lie along trailing axes, so scales and packed codes are cut where the weight is); the
    rest is on every device.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1, 1), ("x", "y"))
        >>> weight = NamedSharding(mesh, PartitionSpec("x", "y"))
        >>> tuple(placed_like(weight, (64, 512), (64, 4)).spec)
        ('x', 'y')
    """
    if shape == weight_shape:
        return sharding
    spec = tuple(sharding.spec) + (None,) * (len(weight_shape) - len(sharding.spec))
    kept: list = []
    for n, own, axes in zip(shape, weight_shape, spec, strict=False):
        divides = axes is not None and n % _devices(sharding, axes) == 0
        kept.append(axes if divides else None)
        if n != own:
            break  # What follows is no axis of the weight.
    kept += [None] * (len(shape) - len(kept))
    return NamedSharding(sharding.mesh, PartitionSpec(*kept), memory_kind=sharding.memory_kind)


def _devices(sharding: NamedSharding, axes) -> int:
    """Return among how many devices mesh axes divide an axis of an array."""
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(sharding.mesh.shape[name] for name in names)
