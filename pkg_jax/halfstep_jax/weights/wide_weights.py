"""Weights kept to more bits than the model sees, which the links inside read and update.

Contract: P5, P6. Two ways to keep them, `split_params` and `keep_master_params`: wrappers of a whole chain.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from halfstep.weights.split_weights import SplitWeight
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.numbers.arrays import JaxArrays, as_int32
from halfstep_jax.numbers.rounding import round_and_cast
from halfstep_jax.weights.weight_rule import WeightRule, weight_transform
from halfstep_jax.xla.kept_on_cpu import keep_for_kernels


class SplitParamsState(NamedTuple):
    """State of `split_params`.

    Attributes:
        outer_count: int32 scalar, steps taken. A `count` or `seed` here would hide the counts or seeds of
            `inner_state` from `optax.tree.set`.
        outer_seed: uint32[2], (high, low).
        extra: the further bits of the weights, uint8 or uint16, in their tree: `optax.MaskedNode()`
            for a float32 weight.
        inner_state: of the wrapped transform.
        formats: a scalar with a key that names the dtype of `extra`.
    """

    outer_count: jax.Array
    outer_seed: jax.Array
    extra: optax.Params
    inner_state: optax.OptState
    formats: Tree


class KeepMasterParamsState(NamedTuple):
    """State of `keep_master_params`.

    Attributes:
        master: the float32 weights, in their tree: `optax.MaskedNode()` for a weight that is float32 itself.
        inner_state: of the wrapped transform.
    """

    master: optax.Params
    inner_state: optax.OptState


def split_params(
    inner: optax.GradientTransformation, extra_bits: int = 16, *, seed: jax.typing.ArrayLike = 0
) -> optax.GradientTransformationExtraArgs:
    """Store `extra_bits` more low-order bits of every 16-bit weight; `inner` sees and updates the full value.

    The weight w of `inner` is float32. The weight p of the model is w rounded to nearest, ties away from
    zero; the low bits of w are kept in the state:

        w = join(p, extra);  w <- store(w + u);  p <- nearest(w)

    bfloat16 and 16 bits are float32 itself, in four bytes and with no second copy: the bits of training in
    float32. Otherwise w has `extra_bits` more bits of mantissa than the weight's format, and is rounded to
    them stochastically, once in each step. float32 weights pass through.

    Applying the updates with `optax.apply_updates` gives exactly p. Moments inside default to
    float32, the dtype of w.

    Args:
        inner: any Optax transform: a whole chain, without a last link that rounds.
        extra_bits: 8 or 16.
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Errors are as in `round_stochastically`, and ValueError for other `extra_bits`.

    Example:
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = split_params(optax.sgd(2.0**-12))
        >>> state = tx.init(params)
        >>> for _ in range(16):
        ...     updates, state = tx.update({"w": jnp.ones(2)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"].tolist()
        [0.99609375, 0.99609375]

    Source: ours (contract P5); for the idea, P. Zamirai et al., "Revisiting BFloat16 training",
    arXiv:2010.06192, section 4, and the split in "FlashOptim", arXiv:2602.23349.
    """
    SplitWeight.check(extra_bits)
    return weight_transform(SplitParams(extra_bits), inner, seed)


def keep_master_params(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keep a float32 copy of every 16-bit weight, and let `inner` see and update that.

    The weight p of the model is the copy w rounded to nearest, ties away from zero:

        w <- w + u;  p <- nearest(w)

    The bits of training in float32, for float16 weights too. `split_params` does the same for bfloat16
    weights in two bytes less. float32 weights pass through. A weight that differs from the copy was
    written from outside, and the step goes on from the weight (contract P7).

    Applying the updates with `optax.apply_updates` gives exactly p. Moments inside default to
    float32, the dtype of w.

    Args:
        inner: any Optax transform: a whole chain, without a last link that rounds.

    Errors are as in `round_stochastically`.

    Example:
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = keep_master_params(optax.sgd(2.0**-12))
        >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
        >>> state.master["w"].tolist()
        [0.999755859375, 0.999755859375]

    Source: P. Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.1; the rounding is ours
    (contract P5).
    """
    return weight_transform(KeepMasterParams(), inner)


@dataclasses.dataclass(frozen=True)
class SplitParams(WeightRule):
    """The rule of `split_params`: 8 or 16 further bits."""

    name = "split_params"
    why = "the wrapper keeps further bits of params"
    State = SplitParamsState
    extra_field = "extra"

    extra_bits: int = 16

    @classmethod
    def of_extra(cls, extra) -> "SplitParams":
        """Return the rule for the number of bits."""
        return cls(8 * extra.dtype.itemsize)

    @property
    def extra_dtype(self) -> Tree:
        """The dtype of the further bits."""
        return jnp.uint8 if self.extra_bits == 8 else jnp.uint16

    @property
    def tag(self) -> str:
        """The number of bits."""
        return f"extra_{jnp.dtype(self.extra_dtype).name}"

    def rounds(self, dtype) -> bool:
        """Whether the wider format is not float32 itself."""
        return self._split(dtype).rounds

    def join(self, p, extra):
        """Return the weight of both parts."""
        bits = as_int32(lax.bitcast_convert_type(p, jnp.uint16))
        return self._split(p.dtype).join(JaxArrays(), bits, as_int32(extra))

    def store(self, w, dtype, words):
        """Return both parts of w, rounded to the wider format where they cannot hold it (contract P5)."""
        bits, low = self._split(dtype).split(JaxArrays(), w, as_int32(words))
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), dtype), low

    def _split(self, dtype) -> SplitWeight:
        return SplitWeight(jnp.dtype(dtype).name, self.extra_bits)

    def apply(self, u, p, extra, words, zero):
        """Return both parts of the weight and the update."""
        # A sum, and so not subnormal where subnormal numbers count as zero.
        w = lax.platform_dependent(self.join(p, extra) + u, cpu=keep_for_kernels, default=lambda w: w)
        return self.store(w, p.dtype, words)


@dataclasses.dataclass(frozen=True)
class KeepMasterParams(WeightRule):
    """The rule of `keep_master_params`: a float32 copy."""

    name = "keep_master_params"
    why = "the wrapper keeps further bits of params"
    State = KeepMasterParamsState
    extra_field = "master"
    extra_dtype = jnp.float32

    def first_extra(self, p) -> jax.Array:
        """Return the weight in float32."""
        return jnp.asarray(p).astype(jnp.float32)

    def join(self, p, extra):
        """Return the copy, or p where the copy does not round to p: p was set from outside (contract P7)."""
        return jnp.where(_nearest_away(extra, p.dtype) == p, extra, p.astype(jnp.float32))

    def store(self, w, dtype, words):
        """Return w rounded to nearest, ties away from zero, and w (contract P5)."""
        return _nearest_away(w, dtype), w


def _nearest_away(w: jax.Array, dtype) -> jax.Array:
    # A fraction of one half and this word carry: ties go away from zero.
    return round_and_cast(w, jnp.dtype(dtype).name, jnp.uint32(0x80000000))
