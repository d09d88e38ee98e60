"""An average of the weights over steps, in their own dtype, that does not stall. Contract: G3."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from halfstep.hyperparameters import check_decay_rate
from halfstep.random_words import leaf_id, role_of
from halfstep_jax.leaf_calls import call_per_shape
from halfstep_jax.leaves import check_params, check_state, flatten_updates
from halfstep_jax.numbers.hyperparameters import as_number
from halfstep_jax.numbers.moments import ema
from halfstep_jax.numbers.random_words import LeafKeys, leaf_keys
from halfstep_jax.numbers.rounding import round_and_cast
from halfstep_jax.numbers.schedules import next_count
from halfstep_jax.numbers.seeds import new_seed, seed_words
from halfstep_jax.xla.exact import opaque_input
from halfstep_jax.xla.shards import shards

_FUNCTION, _ROLE = "ema_params", role_of("ema")


class EmaParamsState(NamedTuple):
    """State of `ema_params`.

    Attributes:
        count: int32 scalar, averages taken.
        seed: uint32[2], (high, low).
        ema: the average, in the tree and the dtypes of the params.
    """

    count: jax.Array
    seed: jax.Array
    ema: optax.Params


def ema_params(
    decay: jax.typing.ArrayLike, seed: jax.typing.ArrayLike = 0
) -> optax.GradientTransformationExtraArgs:
    """Average the weights over steps: average <- stochastic((decay average) + ((1 - decay) p)).

    It is used as `optax.ema` is for this: `update` is given the new params, and returns their average.

        average, ema_state = ema.update(params, ema_state)

    The average starts as the params and stays in their dtype, so that nothing needs debiasing. Rounded to
    nearest in bfloat16, as by `optax.incremental_update`, an average does not move while (1 - decay) |p -
    average| is below 2^-9 of it. Rounds once, to the dtype of the params; float32 is not rounded.

    Args:
        decay: rate of the average, in [0, 1): 0.999 averages about a thousand steps.
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        An Optax transform of params; not a link of a chain.

    Raises:
        TypeError: if an argument is of the wrong type; from `init` and `update`, if a leaf is not float32,
            bfloat16 or float16.
        ValueError: if `decay` or `seed` is out of range; from `update`, if trees, shapes or dtypes differ.

    Example:
        >>> ema = ema_params(0.999)
        >>> state = ema.init({"w": jnp.ones(1000, jnp.bfloat16)})
        >>> for _ in range(100):
        ...     average, state = ema.update({"w": jnp.full(1000, 2.0, jnp.bfloat16)}, state)
        >>> print(f"{average['w'].astype(jnp.float32).mean():.1f}, due {2 - 0.999**100:.1f}")
        1.1, due 1.1

    Source: B. Polyak and A. Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J.
    Control Optim. 30(4), 1992, for averages of weights; contract G3.
    """
    rate = as_number(_FUNCTION, "decay", decay, check_decay_rate)
    words = seed_words(_FUNCTION, seed)

    def init(params):
        check_params(_FUNCTION, params, wide=False)
        start = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
        return EmaParamsState(jnp.zeros([], jnp.int32), new_seed(words, params), start)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        check_state(_FUNCTION, state, EmaParamsState)
        leaves = flatten_updates(_FUNCTION, updates)
        averages = leaves.match(state.ema, "average", "Pass the tree that init saw.")
        for name, p, average in zip(leaves.names, leaves.values, averages, strict=True):
            if p is not None and p.dtype != average.dtype:
                raise ValueError(
                    f"{_FUNCTION}: '{name}' is {p.dtype}, its average {average.dtype}. "
                    "Pass params of the dtypes that init saw."
                )
        count = next_count(state.count)
        keys = leaf_keys(state.seed, count, [leaf_id(name) for name in leaves.names], (_ROLE,))
        indices = keys.indices(shards(_FUNCTION, leaves.names, leaves.values))
        rows = zip(indices, leaves.values, averages, strict=True)
        made = [
            x if p is None else call_per_shape(_average, None, keys, index, rate, p, x)
            for index, p, x in rows
        ]
        average = leaves.treedef.unflatten(made)
        return average, EmaParamsState(count, state.seed, average)

    return optax.GradientTransformationExtraArgs(init, update)


def _average(_, keys: LeafKeys, index, decay, p: jax.Array, average: jax.Array) -> jax.Array:
    """Return the new average of one leaf."""
    key = keys.of_leaf(index)
    zero = key.zero
    wide = ema(opaque_input(average, zero), opaque_input(p, zero), decay, zero)
    return round_and_cast(wide, p.dtype.name, key.words(_ROLE, p.shape))
