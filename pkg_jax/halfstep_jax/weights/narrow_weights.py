"""Narrow weight storages: stochastic rounding, and Kahan compensation.

Contract: section P. Ways that keep more of a weight than the model sees for the links themselves are in
`wide_weights.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from halfstep.weights.compensation import compensation_of, compensation_of_step
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import flatten_updates
from halfstep_jax.numbers.arrays import JaxArrays
from halfstep_jax.numbers.rounding import round_and_cast, round_in_float32
from halfstep_jax.numbers.seeds import seed_words
from halfstep_jax.weights.weight_rule import WeightRule, apply_to_leaves, param_keys, weight_transform
from halfstep_jax.xla.exact import opaque


class RoundStochasticallyState(NamedTuple):
    """State of `round_stochastically`.

    Attributes:
        count: int32 scalar, steps taken.
        seed: uint32[2], (high, low).
        narrowest: a zero of the narrowest dtype among the weights. It tells weights that were cast since.
    """

    count: jax.Array
    seed: jax.Array
    narrowest: jax.Array


class CompensateState(NamedTuple):
    """State of `compensate`.

    Attributes:
        compensation: the rounding errors of the weights so far, bfloat16, in their tree:
            `optax.MaskedNode()` for a float32 weight.
    """

    compensation: optax.Params


def round_stochastically(seed: jax.typing.ArrayLike = 0) -> optax.GradientTransformationExtraArgs:
    """Round params + update stochastically to the dtype of the params: the last link of a chain.

    With q = stochastic(float32(p) + u), the link returns q - p in float32, and -0.0 where q = p. Then
    `optax.apply_updates`, and with it Flax's `TrainState` and `nnx.Optimizer`, give q. Small updates, which
    nearest rounding would drop, survive on average. Rounds p + u to float32, then to the dtype of p. Updates
    of float32 weights pass as they are.

    `optax.apply_updates` gives nearest(p + (q - p)), which is q except in five corner cases (contract P2).
    These are |q| below about 2^-16 |p|; q - p past the range of float32; q - p or a weight that is subnormal;
    an infinite p; and q = -0.

    Under `jax.jit` a sharded array gets the bits of a single device. In `jax.shard_map`, where an array is a
    shard, it does so if `in_shard_map` says how the array is cut. The updates are float32. Wrappers around
    `jax.lax.cond`, such as `optax.apply_if_finite`, want updates in the dtype of the gradients. Under
    bfloat16 gradients put them around earlier links.

    Args:
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Raises:
        TypeError: if `seed` is no seed; from `init` and `update`, if a leaf is not float32, bfloat16 or
            float16.
        ValueError: if `seed` is out of range; from `update`, without `params`, or if trees or shapes differ.

    Example:
        >>> params = {"w": jnp.ones(1000, jnp.bfloat16)}
        >>> tx = round_stochastically(seed=0)
        >>> updates, state = tx.update({"w": jnp.full(1000, 2.0**-10)}, tx.init(params), params)
        >>> moved = optax.apply_updates(params, updates)["w"] != 1
        >>> print(f"{moved.mean():.2f}")
        0.12

    Source: ours (contract P2, P3); for the effect, P. Zamirai et al., "Revisiting BFloat16 training",
    arXiv:2010.06192, section 4.
    """
    return weight_transform(RoundStochastically(), seed=seed)


def compensate() -> optax.GradientTransformationExtraArgs:
    """Keep the rounding error of the weights, and add it to the next update: Kahan's sum, the last link.

    With c the compensation, in bfloat16, and s = u + c:

        n = nearest(float32(p) + s);  c <- nearest(s - (n - p))

    and the link returns n - p in float32, and -0.0 where n = p; `optax.apply_updates` gives n. Rounds u + c,
    p + s and c. A c above half a unit in the last place of p counts as 0: it is the error of the weight that
    was there before p was set.

    The error of rounding c is lost, and this sets a limit. Take bfloat16 and an equal update at every step.
    An update of at least 2^-12 of the weight moves it as far as it should, to within 2 %. Smaller updates
    move it less and less far, and below 2^-18 not at all. For such updates use `split_params`.
    Updates of float32 weights pass as they are, and nothing is kept for them.

    Errors are as in `round_stochastically`.

    Example:
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = compensate()
        >>> state = tx.init(params)
        >>> for _ in range(8):
        ...     updates, state = tx.update({"w": jnp.full(2, 2.0**-10)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"].tolist()
        [1.0078125, 1.0078125]

    Source: W. Kahan, "Further remarks on reducing truncation errors", CACM 8(1), 1965; for bfloat16 weights
    P. Zamirai et al., "Revisiting BFloat16 training", arXiv:2010.06192, section 4 (contract P4).
    """
    return weight_transform(Compensate())


def apply_updates(
    params: Tree,
    updates: Tree,
    seed: jax.typing.ArrayLike | None = None,
    step: jax.typing.ArrayLike | None = None,
) -> Tree:
    """Return params + updates, rounded stochastically to the dtype of the params.

    For custom training loops, and for Equinox; bit-identical to `round_stochastically` as the last link,
    followed by `optax.apply_updates`. Rounds p + u to float32, then to the dtype of p; float32 weights to
    float32 alone.

    Args:
        params: float32, bfloat16 or float16 leaves.
        updates: likewise; None leaves a weight as it is.
        seed: an integer in [0, 2^64) or two uint32 words (high, low). May be traced.
        step: 1 at the first update; each step needs its own. May be traced.

    Raises:
        TypeError: if a leaf is of another dtype, `seed` is no seed, or `seed` or `step` is missing.
        ValueError: if `seed` is out of range, or trees or shapes differ.

    Example:
        >>> params = apply_updates({"w": jnp.bfloat16(1.0)}, {"w": jnp.float32(0.5)}, seed=0, step=1)
        >>> print(params["w"], params["w"].dtype)
        1.5 bfloat16

    Source: ours (contract P1, P2).
    """
    caller = "apply_updates"
    if seed is None or step is None:
        raise TypeError(
            f"{caller}: {'seed' if seed is None else 'step'} is missing: stochastic rounding takes words of "
            "both. Pass seed and step, or use optax.apply_updates after a transform of this "
            "package, whose last link has rounded."
        )
    leaves = flatten_updates(caller, updates)
    weights = leaves.weights(params, wide=False)
    keys = param_keys(leaves, seed_words(caller, seed), step)
    us, _ = apply_to_leaves(RoundStochastically(), leaves, weights, [None] * len(weights), keys)
    pairs = zip(weights, leaves.treedef.flatten_up_to(us), strict=True)
    return leaves.treedef.unflatten([p if u is None else _nearest_sum(p, u) for p, u in pairs])


class RoundStochastically(WeightRule):
    """The rule of `round_stochastically`."""

    name = "round_stochastically"
    why = "the link rounds params + update"
    State = RoundStochasticallyState

    def rounds(self, dtype) -> bool:
        """Always."""
        return True

    def store(self, w, dtype, words):
        """Return stochastic(w), in float32, or nearest(w) without words (contract P2)."""
        return round_in_float32(w, jnp.dtype(dtype).name, words, quiet=words is not None), None


class Compensate(WeightRule):
    """The rule of `compensate`."""

    name = "compensate"
    why = "the link rounds params + update"
    State = CompensateState
    extra_field = "compensation"
    extra_dtype = jnp.bfloat16

    def join(self, p, extra):
        """Return p + c, c as far as it is of p."""
        p32 = p.astype(jnp.float32)
        return p32 + compensation_of(JaxArrays(), extra.astype(jnp.float32), p32, p.dtype.name)

    def store(self, w, dtype, words):
        """Return n = nearest(w), and c = nearest(w - n)."""
        n = round_in_float32(w, jnp.dtype(dtype).name, None)
        # Nothing is lost of an infinity.
        return n, _compensation(jnp.where(n == w, np.float32(0), w - n))

    def apply(self, u, p, extra, words, zero):
        """Return n = nearest(p + s), s = u + c; and c = nearest(s - (n - p)) (contract P4)."""
        p32 = p.astype(jnp.float32)
        s = u + compensation_of_step(JaxArrays(), extra.astype(jnp.float32), p32, u, p.dtype.name)
        n = round_in_float32(p32 + s, p.dtype.name, None)
        extra = _compensation(s - (n - p32))
        # XLA on TPU fuses one result that reads another, not two that read a third: one reads zero bits.
        return opaque(n, lax.bitcast_convert_type(extra, jnp.uint16).astype(jnp.uint32) & zero), extra


def _compensation(lost: jax.Array) -> jax.Array:
    return round_and_cast(lost, "bfloat16", None, saturate=True)


def _nearest_sum(p: jax.Array, u: jax.Array) -> jax.Array:
    """Return nearest(p + u) in the dtype of p: the stored weight (contract P1)."""
    return round_in_float32(p.astype(jnp.float32) + u, p.dtype.name, None).astype(p.dtype)
