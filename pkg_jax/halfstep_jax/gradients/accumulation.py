"""Gradients of micro-batches, added up in 16 bits without losing small gradients. Contract: G1, G2."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

from halfstep.random_words import Role, leaf_id
from halfstep_jax.leaf_calls import Tree, call_per_shape
from halfstep_jax.leaves import HELD_BY_FLOAT32, Leaves, check_params, check_state, flatten_updates
from halfstep_jax.numbers.random_words import LeafKeys, leaf_keys
from halfstep_jax.numbers.rounding import round_and_cast
from halfstep_jax.numbers.schedules import next_count
from halfstep_jax.numbers.seeds import new_seed, seed_words
from halfstep_jax.xla.exact import opaque, opaque_input, opaque_zero
from halfstep_jax.xla.shards import shards

_FUNCTION = "accumulate_gradients"


class AccumulateGradientsState(NamedTuple):
    """State of `accumulate_gradients`.

    Attributes:
        outer_count: int32 scalar, micro-batches seen. The names are as in `SplitParamsState`.
        mini_step: int32 scalar, micro-batches in the sum; 0 where a step has just been taken.
        outer_seed: uint32[2], (high, low).
        acc_grads: the sum of the gradients, in the tree of the params.
        inner_state: of the wrapped transform.
    """

    outer_count: jax.Array
    mini_step: jax.Array
    outer_seed: jax.Array
    acc_grads: Tree
    inner_state: optax.OptState


def accumulate_gradients(
    inner: optax.GradientTransformation,
    every_k: int,
    dtype: jax.typing.DTypeLike = "bfloat16",
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Add gradients up over `every_k` micro-batches, and step by their mean.

        sum <- stochastic(sum + g);  at every k-th: u = inner((1/k) sum), sum <- 0

    As `optax.MultiSteps`, with the sum in 16 bits: half the memory of its float32. Rounded to nearest in
    bfloat16, a sum of 64 equal gradients is off by 3 %, the same way every time. Once the sum is 512 times a
    gradient, another gradient changes nothing. Rounded stochastically, the sum is right on average. Rounds
    the sum once per micro-batch, and the mean to float32.

    Between the steps updates are -0.0, which moves no weight, and the state of `inner` stays as it is.
    `state.mini_step == 0` tells that a step was taken.

    Args:
        inner: any Optax transform.
        every_k: micro-batches of a step.
        dtype: of the sum: "bfloat16", "float16" or "float32". In float16 a sum past 65504 is infinite.
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Raises:
        TypeError: if `every_k` is no integer, `dtype` no dtype, or `seed` no seed. From `init` and `update`,
            if a leaf is not float32, bfloat16, float16 or float64.
        ValueError: if `every_k` is below 1, there is no such dtype, or `seed` is out of range. From `update`,
            if trees, shapes or the dtype of the sum differ.

    Example:
        >>> tx = accumulate_gradients(optax.sgd(1.0), every_k=2)
        >>> params = {"w": jnp.bfloat16(1.0)}
        >>> state = tx.init(params)
        >>> for g in (0.5, 0.25):
        ...     updates, state = tx.update({"w": jnp.bfloat16(g)}, state, params)
        ...     print(updates["w"], state.mini_step)
        -0.0 1
        -0.375 0

    Source: the sum in 16 bits, Torchastic's `StochasticAccumulator`; contract G1, G2.
    """
    name = _plain_dtype(dtype)
    inverse = np.float32(1) / np.float32(_positive(every_k))
    words = seed_words(_FUNCTION, seed)
    inner_update = optax.with_extra_args_support(inner).update

    def init(params):
        check_params(_FUNCTION, params)
        sums = jax.tree.map(lambda p: jnp.full_like(p, -0.0, dtype=name), params)
        # Two arrays: one buffer cannot be donated twice.
        count, mini_step = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)
        return AccumulateGradientsState(
            count, mini_step, new_seed(words, params, sums), sums, inner.init(params)
        )

    def update(updates, state, params=None, **extra_args):
        check_state(_FUNCTION, state, AccumulateGradientsState)
        leaves = flatten_updates(_FUNCTION, updates)
        count, mini_step = next_count(state.outer_count), state.mini_step + 1
        keys = leaf_keys(state.outer_seed, count, [leaf_id(x) for x in leaves.names], (Role.ACCUMULATOR,))
        sums = _add(leaves, _sums(leaves, state.acc_grads, name), name, keys)

        def step(sums, inner_state):
            zero = opaque_zero()
            means = jax.tree.map(lambda x: opaque(x.astype(jnp.float32) * inverse, zero), sums)
            us, inner_state = inner_update(means, inner_state, params, **extra_args)
            return us, jax.tree.map(lambda x: jnp.full_like(x, -0.0), sums), inner_state

        def idle(sums, inner_state):
            like = jax.eval_shape(step, sums, inner_state)[0]
            return jax.tree.map(lambda u: jnp.full_like(u, -0.0), like), sums, inner_state

        due = mini_step == every_k
        us, sums, inner_state = _branch(due, step, idle, sums, state.inner_state)
        mini_step = jnp.where(due, 0, mini_step)
        after = AccumulateGradientsState(count, mini_step, state.outer_seed, sums, inner_state)
        return leaves.widened(us), after

    return optax.GradientTransformationExtraArgs(init, update)


def _branch(due: jax.Array, step: Callable, idle: Callable, *args):
    """Return step(*args) or idle(*args); op by op without a conditional, to be compiled at every call."""
    if isinstance(due, Tracer):
        return lax.cond(due, step, idle, *args)
    return step(*args) if due else idle(*args)


def accumulate(dtype: str, keys: LeafKeys, index, g: jax.Array, total: jax.Array) -> jax.Array:
    """Return stochastic(total + g) of one leaf, in `dtype` (contract G1).

    `keys` are of role 3, at the step that counts the gradients. Values beyond the largest finite become
    infinity.
    """
    key = keys.of_leaf(index)
    wide = opaque_input(total, key.zero) + opaque_input(g, key.zero)
    return round_and_cast(wide, dtype, key.words(Role.ACCUMULATOR, g.shape))


def _add(leaves: Leaves, sums: list, dtype: str, keys: LeafKeys) -> Tree:
    """Return the tree of new sums; a leaf without a gradient keeps its sum."""
    indices = keys.indices(shards(_FUNCTION, leaves.names, leaves.values))
    rows = zip(indices, leaves.values, sums, strict=True)
    made = [x if g is None else call_per_shape(accumulate, dtype, keys, index, g, x) for index, g, x in rows]
    return leaves.treedef.unflatten(made)


def _sums(leaves: Leaves, tree, dtype: str) -> list[Tree]:
    """Return the sum of every leaf, and refuse one that `init` would not have made."""
    sums = leaves.match(tree, "state", "Pass the tree that init saw.")
    for name, g, x in zip(leaves.names, leaves.values, sums, strict=True):
        if g is not None and x.dtype != dtype:
            raise ValueError(
                f"{_FUNCTION}: the sum of '{name}' is {x.dtype}, dtype={dtype!r} makes it {dtype}. "
                "Pass the state that init made."
            )
    return sums


def _positive(every_k) -> int:
    if isinstance(every_k, bool) or not isinstance(every_k, int | np.integer):
        raise TypeError(f"{_FUNCTION}: every_k={every_k!r} is not an integer. Use how many make a step.")
    if every_k < 1:
        raise ValueError(f"{_FUNCTION}: every_k={every_k} is below 1. Use 1 for a step at every gradient.")
    return int(every_k)


def _plain_dtype(dtype) -> str:
    names = " or ".join(f'"{name}"' for name in HELD_BY_FLOAT32)
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        raise TypeError(f"{_FUNCTION}: dtype={dtype!r} is not a dtype. Use {names}.") from None
    if name not in HELD_BY_FLOAT32:
        raise ValueError(f"{_FUNCTION}: dtype={name} is not one that sums are kept in. Use {names}.")
    return name
