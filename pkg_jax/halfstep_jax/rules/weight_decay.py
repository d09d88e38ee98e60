"""Weight decay as an Optax transform.

Contract: section D.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import optax

from halfstep.rules.weight_decay import AddDecayedWeights
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import with_prefix
from halfstep_jax.transform import as_transform

Mask: TypeAlias = Tree | Callable[[Tree], Tree] | None
"""Optax's: a tree of booleans, a prefix of the params' tree, or a function of the params that gives one."""


def add_decayed_weights(
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    *,
    absolute: bool = False,
    cautious: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Add the decayed weights to the updates: u + (weight_decay p).

    With `absolute`, u - (weight_decay p): the link then comes after `scale_by_learning_rate`, which does not
    scale the decay. In float32, whatever the dtype of the weights; product and sum are rounded once each.
    (Optax's own link forms the product in the dtype of the weights.)

    Args:
        weight_decay: a number >= 0, a float32 scalar array, or a schedule of the count before its increment.
        mask: a tree of booleans, a prefix of the params' tree, or a function of the params that gives one;
            False leaves a leaf alone. As in Optax.
        absolute: see above.
        cautious: decay a weight only where that does not oppose its step. u is unchanged where u and p are
            both nonzero and -u leads p away from 0 (with `absolute`, where u does). Compared by signs.

    Returns:
        An Optax transform that needs `params`. Its updates are float32. A `weight_decay` of the Python number
        0 adds nothing.

    Errors are as in `scale_by_adam`, and ValueError from `update` without `params`.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = add_decayed_weights(0.5)
        >>> updates, _ = tx.update({"w": jnp.float32(1.0)}, tx.init({}), {"w": jnp.bfloat16(4.0)})
        >>> float(updates["w"])
        3.0

    Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization", ICLR 2019; `absolute` is its
    equation in algorithm 2, with the schedule multiplier left to `weight_decay` (contract D1). L. Chen et
    al., "Cautious Weight Decay", arXiv:2510.12402, for `cautious` (contract D3).
    """
    link = as_transform(AddDecayedWeights(weight_decay, absolute, cautious))
    return link if mask is None else optax.masked(link, functools.partial(_tree_of_mask, mask))


def _tree_of_mask(mask: Tree, tree: Tree) -> Tree:
    """Return a mask for a tree.

    Raises:
        ValueError: if it is of another tree.
    """
    mask = mask(tree) if callable(mask) else mask
    list(with_prefix("add_decayed_weights", "mask", mask, tree, is_leaf=None))
    return mask
