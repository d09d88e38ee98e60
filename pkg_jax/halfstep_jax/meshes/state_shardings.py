"""Shardings of a state on a mesh, from the shardings of the weights."""

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import named_leaves, with_prefix
from halfstep_jax.meshes.placement import placed_like


def state_shardings(tx: optax.GradientTransformation, params: Tree, shardings: Tree) -> Tree:
    """Return the sharding of every array of the state of any Optax transform.

    All arrays of a weight are placed like the weight. These are moments, their codes and scales in any
    format, further bits of the weight, and copies and averages of other transforms. Scales and packed codes
    have fewer columns than the weight. They are cut along the same mesh axes if these divide them, and are
    replicated otherwise. Counts, seeds and all else are on every device.

    An array belongs to the weight with the name that ends its own: `0/mu/encoder/kernel` to `encoder/kernel`.
    If the params are one array without a name, arrays with its shape or as many rows belong to it.

        shardings = state_shardings(tx, params, param_shardings)
        state = jax.jit(tx.init, out_shardings=shardings)(params)

    Args:
        tx: any Optax transform.
        params: the weights, or their shapes and dtypes.
        shardings: a `jax.sharding.NamedSharding` per weight, in the tree of `params` or a prefix of it; other
            shardings only if they leave arrays whole.

    Raises:
        TypeError: if something in `shardings` is none of these; or whatever `tx.init` raises.
        ValueError: if trees differ.

    Example:
        >>> from halfstep_jax import adamw, scaled
        >>> params = {"w": jax.ShapeDtypeStruct((256, 512), "bfloat16")}
        >>> mesh = jax.make_mesh((1, 1), ("x", "y"))
        >>> tx = adamw(1e-3, nu_dtype=scaled("ufloat8_e5m3"))
        >>> placed = state_shardings(tx, params, {"w": NamedSharding(mesh, PartitionSpec(None, "y"))})
        >>> [tuple(s.spec) for s in (placed[0].nu["w"], placed[0].nu_scale["w"], placed[0].count)]
        [(None, 'y'), (None, 'y'), ()]

    Source: ours.
    """
    weights = _weights(params, shardings)
    shapes = jax.eval_shape(tx.init, params)
    whole = next((_whole(s) for _, s in weights.values()), None)
    placed = [_placed(weights, whole, name, x) for name, x in named_leaves(shapes)]
    return jax.tree.structure(shapes).unflatten(placed)


def _weights(params, shardings) -> dict[str, tuple[tuple[int, ...], Sharding]]:
    """Return shape and sharding of every weight, by its name."""
    cuts = {}
    for name, p, sharding in with_prefix("state_shardings", "shardings", shardings, params, _is_sharding):
        whole = _is_sharding(sharding) and sharding.is_fully_replicated
        if not whole and not isinstance(sharding, NamedSharding):
            raise TypeError(
                f"state_shardings: '{name}' has {sharding!r}, which does not say how axes are "
                "cut. Use jax.sharding.NamedSharding(mesh, spec)."
            )
        cuts[name] = p.shape, sharding
    return cuts


def _placed(weights, whole: Sharding | None, name: str, x) -> Sharding | None:
    """Return the sharding of one array of the state."""
    parts = name.split("/")
    for k in range(len(parts) + 1):
        shape, sharding = weights.get("/".join(parts[k:]), (None, None))
        if shape is None or sharding is None or (k == len(parts) and not _of_bare_array(parts, shape, x)):
            continue
        if x.shape == shape:
            return sharding
        if x.ndim == 0:
            break
        return placed_like(sharding, shape, x.shape) if isinstance(sharding, NamedSharding) else sharding
    return whole


def _of_bare_array(parts: list[str], shape: tuple[int, ...], x) -> bool:
    """Whether a state array belongs to a bare array of `shape` with an empty name."""
    return parts[-1] == "" or x.shape == shape or (x.ndim == len(shape) > 1 and x.shape[0] == shape[0])


def _whole(sharding: Sharding) -> Sharding:
    """Return the sharding of an array that is whole on every device of another."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _is_sharding(x) -> bool:
    return isinstance(x, Sharding)
