"""Weights kept to more bits than the model sees, which the links inside read and update.

Contract: P5, P6. Two ways to keep them, `split_params` and `keep_master_params`: wrappers of a whole chain.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from halfstep_jax.leaves import check_params, flatten_updates
from halfstep_jax.numbers.exact import opaque_input, opaque_zero
from halfstep_jax.numbers.random_words import Role, leaf_id, leaf_keys
from halfstep_jax.numbers.rounding import round_and_cast
from halfstep_jax.numbers.schedules import next_count
from halfstep_jax.numbers.seeds import seed_words
from halfstep_jax.weights.params import kept_arrays, landing, need_params, nothing_kept
from halfstep_jax.weights.split_weights import holds_float32, join, split


class SplitParamsState(NamedTuple):
    """State of `split_params`.

    Attributes:
        count: int32 scalar, steps taken.
        seed: uint32[2], (high, low).
        extra: the further bits of the weights, uint8 or uint16, in their tree; one that means nothing for a
            float32 weight.
        inner_state: of the wrapped transform.
    """

    count: jax.Array
    seed: jax.Array
    extra: optax.Params
    inner_state: optax.OptState


class KeepMasterParamsState(NamedTuple):
    """State of `keep_master_params`.

    Attributes:
        master: the float32 weights, in their tree; one number that means nothing for a float32 weight.
        inner_state: of the wrapped transform.
    """

    master: optax.Params
    inner_state: optax.OptState


class WeightRule(Protocol):
    """How a 16-bit weight and what is kept beside it make one number."""

    @property
    def dtype(self) -> Any:
        """The dtype of what is kept."""
        ...

    def first_kept(self, p) -> jax.Array:
        """Return what is kept beside a new weight."""
        ...

    def rounds(self, p) -> bool:
        """Whether `store` needs words."""
        ...

    def join(self, p: jax.Array, kept: jax.Array) -> jax.Array:
        """Return the float32 values of weights and what is kept beside them."""
        ...

    def store(self, w: jax.Array, dtype, words: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Return the weights and what is kept beside them, of float32 values. No words: to nearest."""
        ...


@dataclasses.dataclass(frozen=True)
class SplitWeights:
    """`split_params`: 8 or 16 further bits."""

    extra_bits: int

    @property
    def dtype(self) -> Any:
        """The dtype of the further bits."""
        return jnp.uint8 if self.extra_bits == 8 else jnp.uint16

    def first_kept(self, p) -> jax.Array:
        """Return zeros: the weight holds itself."""
        return jnp.zeros_like(p, dtype=self.dtype)

    def rounds(self, p) -> bool:
        """Whether the wider format is not float32 itself."""
        return not holds_float32(p.dtype, self.extra_bits)

    def join(self, p: jax.Array, kept: jax.Array) -> jax.Array:
        """Return the whole number."""
        return join(p, kept)

    def store(self, w: jax.Array, dtype, words: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Return the two parts."""
        return split(w, dtype, self.extra_bits, words)


class MasterWeights:
    """`keep_master_params`: a float32 copy."""

    dtype = jnp.float32

    def first_kept(self, p) -> jax.Array:
        """Return the weight in float32."""
        return jnp.asarray(p).astype(jnp.float32)

    def rounds(self, p) -> bool:
        """No: the copy is float32."""
        return False

    def join(self, p: jax.Array, kept: jax.Array) -> jax.Array:
        """Return the copy."""
        return kept

    def store(self, w: jax.Array, dtype, words: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Return the copy to nearest, ties away from zero, and the copy."""
        # A fraction of one half and this word carry: ties go away from zero.
        return round_and_cast(w, jnp.dtype(dtype).name, jnp.uint32(0x80000000)), w


def split_params(
    inner: optax.GradientTransformation, extra_bits: int = 16, *, seed=0
) -> optax.GradientTransformationExtraArgs:
    """Keep `extra_bits` further bits of every 16-bit weight, and let `inner` see and update the whole.

    The weight w that `inner` sees is float32. What the model sees, p, is w rounded to nearest, ties away from
    zero; the low bits of w are kept in the state:

        w = join(p, extra);  w <- store(w + u);  p <- nearest(w)

    bfloat16 and 16 bits are float32 itself, in four bytes and with no second copy: the bits of training in
    float32. Otherwise w is a number of the weight's format with `extra_bits` more bits of mantissa, and
    rounded to it stochastically, once each step. float32 weights pass through.

    The updates are those that `optax.apply_updates` lands on p with. Moments inside default to the dtype of
    what `inner` sees: float32.

    Args:
        inner: any Optax transform: a whole chain, without a last link that rounds.
        extra_bits: 8 or 16.
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        An Optax transform that needs `params`. Its updates are float32.

    Raises:
        TypeError: if `seed` is no seed; from `init` and `update`, if a leaf is not float32, bfloat16 or
            float16.
        ValueError: if `extra_bits` or `seed` is out of range; from `update`, without `params`, or if trees or
            shapes differ.

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
    caller = "split_params"
    if isinstance(extra_bits, bool) or extra_bits not in (8, 16):
        raise ValueError(
            f"{caller}: extra_bits={extra_bits!r} is not 8 or 16. "
            "Use 16 for all of float32, 8 for 24 bits in all."
        )
    rule = SplitWeights(extra_bits)
    seed = seed_words(caller, seed)

    def init(params):
        extra, inner_state = _init(caller, rule, inner, params)
        return SplitParamsState(jnp.zeros([], jnp.int32), seed, extra, inner_state)

    def update(updates, state, params=None, **extra_args):
        count = next_count(state.count)
        step = _Step(caller, rule, seed=state.seed, count=count)
        us, extra, inner_state = step.take(inner, updates, params, state.extra, state.inner_state, extra_args)
        return us, SplitParamsState(count, state.seed, extra, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def keep_master_params(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keep a float32 copy of every 16-bit weight, and let `inner` see and update that.

    What the model sees, p, is the copy w rounded to nearest, ties away from zero:

        w <- w + u;  p <- nearest(w)

    The bits of training in float32, for float16 weights too. `split_params` does the same for bfloat16
    weights in two bytes less. float32 weights pass through.

    The updates are those that `optax.apply_updates` lands on p with. Moments inside default to the dtype of
    what `inner` sees: float32.

    Args:
        inner: any Optax transform: a whole chain, without a last link that rounds.

    Returns:
        An Optax transform that needs `params`. Its updates are float32.

    Raises:
        TypeError: from `init` and `update`, if a leaf is not float32, bfloat16 or float16.
        ValueError: from `update`, without `params`, or if trees or shapes differ.

    Example:
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = keep_master_params(optax.sgd(2.0**-12))
        >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
        >>> state.master["w"].tolist()
        [0.999755859375, 0.999755859375]

    Source: P. Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.1; the rounding is ours
    (contract P5).
    """
    caller = "keep_master_params"
    rule = MasterWeights()

    def init(params):
        return KeepMasterParamsState(*_init(caller, rule, inner, params))

    def update(updates, state, params=None, **extra_args):
        step = _Step(caller, rule)
        us, master, inner_state = step.take(
            inner, updates, params, state.master, state.inner_state, extra_args
        )
        return us, KeepMasterParamsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def keeps_nothing(p) -> bool:
    """Whether a weight passes through every rule: a float32 one (contract P6)."""
    return p.dtype == jnp.float32


def _init(caller: str, rule: WeightRule, inner: optax.GradientTransformation, params):
    """Return what is kept beside the weights, and the state of `inner`, which sees them in float32."""
    check_params(caller, params)
    kept = jax.tree.map(lambda p: nothing_kept() if keeps_nothing(p) else rule.first_kept(p), params)
    return kept, inner.init(jax.tree.map(lambda p: jnp.asarray(p).astype(jnp.float32), params))


@dataclasses.dataclass(frozen=True)
class _Step:
    """One step of a wrapper.

    Attributes:
        caller: the wrapper, for errors.
        rule: how a weight is kept.
        seed: uint32[2] for random words; None where the rule needs none.
        count: int32 scalar, steps taken, this one counted.
    """

    caller: str
    rule: WeightRule
    seed: jax.Array | None = None
    count: Any = None

    def take(self, inner, updates, params, kept, inner_state, extra_args):
        """Return the updates, what is kept, and the state of `inner` after its step."""
        need_params(self.caller, params, "the wrapper keeps further bits of params")
        incoming = flatten_updates(self.caller, updates)
        weights = incoming.weights(params)
        kepts = kept_arrays(incoming, weights, kept, self.rule.dtype)
        rows = zip(incoming.values, weights, kepts, strict=True)
        wide = [p if u is None else self._join(p, k) for u, p, k in rows]
        update = optax.with_extra_args_support(inner).update
        us, inner_state = update(updates, inner_state, incoming.treedef.unflatten(wide), **extra_args)
        leaves = flatten_updates(self.caller, us)
        zero, words = opaque_zero(), self._words(leaves.names)
        rows = zip(leaves.values, weights, wide, kepts, words, strict=True)
        us, kept = leaves.unzip(2, [self._land(zero, *row) for row in rows])
        return us, kept, inner_state

    def _join(self, p: jax.Array, kept: jax.Array) -> jax.Array:
        return p if keeps_nothing(p) else self.rule.join(p, kept)

    def _words(self, names: list[str]):
        """Return, for every leaf, a function of its shape that makes its words."""
        if self.seed is None:
            return [None for _ in names]
        keys = leaf_keys(self.seed, self.count, [leaf_id(name) for name in names], (Role.PARAM,))
        return [functools.partial(keys.of_leaf(place).words, Role.PARAM) for place in keys.places]

    def _land(self, zero: jax.Array, u, p, w, kept, words):
        """Return the update that lands on the new weight, and what is kept beside that."""
        if u is None:
            return u, kept
        u = opaque_input(u, zero)
        if keeps_nothing(p):
            return u, kept
        made = words(p.shape) if words is not None and self.rule.rounds(p) else None
        shown, kept = self.rule.store(w + u, p.dtype, made)
        return landing(p.astype(jnp.float32), shown.astype(jnp.float32)), kept
