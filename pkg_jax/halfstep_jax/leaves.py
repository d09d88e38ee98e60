"""The leaves of a tree of updates: their names, and what belongs to each in other trees.

Contract: W7. Names come from key paths, never from positions: masks and partitions shift those.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_HELD = ("float32", "bfloat16", "float16")


class Leaves(NamedTuple):
    """A flattened tree of updates. None is a leaf here, and stays None.

    Attributes:
        names: one per leaf, key path joined with "/".
        values: the leaves.
        treedef: to unflatten.
    """

    names: list[str]
    values: list[Any]
    treedef: Any


def leaf_name(path) -> str:
    """Return the name of a leaf: its key path joined with "/", a trailing attribute `value` dropped.

    Flax nnx paths end in that attribute in some places and not in others.

    Example:
        >>> import jax
        >>> paths, _ = jax.tree_util.tree_flatten_with_path({"layer": [1.0]})
        >>> leaf_name(paths[0][0])
        'layer/0'
    """
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return "/".join(_part(key) for key in path)


def flatten_updates(function: str, updates) -> Leaves:
    """Flatten `updates` and check that float32 holds every leaf.

    Raises:
        TypeError: if a leaf is of another dtype.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(updates, is_leaf=_is_none)
    leaves = Leaves([leaf_name(path) for path, _ in paths], [value for _, value in paths], treedef)
    for name, value in zip(leaves.names, leaves.values, strict=True):
        if value is not None and _dtype(value) not in _HELD:
            raise TypeError(
                f"{function}: the update of '{name}' is {_dtype(value)}; updates are float32, bfloat16 or float16. "
                "Cast it, or mask the leaf out."
            )
    return leaves


def flatten_alike(function: str, leaves: Leaves, tree, owner: str, way_out: str) -> list[Any]:
    """Return what `tree` holds for every leaf of the updates, checked for its shape.

    Args:
        function: for the error.
        leaves: the updates.
        tree: of the same structure.
        owner: what `tree` is, for the error: "state" or "weight".
        way_out: the last sentence of the error.

    Raises:
        ValueError: if structure or shape differ.
    """
    try:
        values = leaves.treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"{function}: updates and {owner} are different trees ({error}). {way_out}"
        ) from None
    for name, update, value in zip(leaves.names, leaves.values, values, strict=True):
        if update is not None and jnp.shape(update) != getattr(value, "shape", None):
            raise ValueError(
                f"{function}: the update of '{name}' has shape {jnp.shape(update)}, its {owner} "
                f"{getattr(value, 'shape', None)}. {way_out}"
            )
    return values


def check_params(function: str, params) -> None:
    """Check the weights that `init` gets.

    Raises:
        TypeError: if one is not float32, bfloat16 or float16.
    """
    for path, p in jax.tree_util.tree_flatten_with_path(params)[0]:
        if _dtype(p) not in _HELD:
            raise TypeError(
                f"{function}: the weight '{leaf_name(path)}' is {_dtype(p)}; weights are float32, bfloat16 or float16. "
                "Cast it, or mask the leaf out."
            )


def _dtype(value) -> str:
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ if dtype is None else jnp.dtype(dtype).name


def _is_none(x) -> bool:
    return x is None


def _part(key) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
