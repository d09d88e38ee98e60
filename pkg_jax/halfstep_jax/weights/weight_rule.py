"""The base of weight storages, and their transform: a last link, or a wrapper of a chain.

Contract: section P.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from halfstep.random_words import Role, leaf_id
from halfstep.seeds import Seed
from halfstep_jax.leaf_calls import Tree, call_for_leaf, may_wait
from halfstep_jax.leaves import WITHOUT_PARAMS, Leaves, check_params, check_state, flatten_updates
from halfstep_jax.link_reports import report, say_what_is_not_checked
from halfstep_jax.numbers.random_words import LeafKeys, leaf_keys
from halfstep_jax.numbers.schedules import next_count
from halfstep_jax.numbers.seeds import new_seed, seed_words
from halfstep_jax.numbers.shared_keys import shared_keys_of, shared_zero
from halfstep_jax.storage.format_tag import check_tag, new_tag
from halfstep_jax.watched_updates import is_wide, watched
from halfstep_jax.xla.exact import opaque_input, straight_through
from halfstep_jax.xla.shards import shards


@dataclasses.dataclass(frozen=True)
class WeightRule:
    """A way to store weights of 16 bits; float32 weights pass through. Subclasses are frozen dataclasses.

    Attributes:
        name: of the transform, for errors.
        why: it needs params, for the error without.
        State: the NamedTuple of its state: `count` and `seed`, in a wrapper `outer_count` and `outer_seed`,
            if it rounds stochastically, the field `extra_field`, if it keeps something beside the weights,
            and `inner_state`, if it is a wrapper.
        extra_field: the field of the array beside the weights; "" if there is none.
    """

    name: ClassVar[str]
    why: ClassVar[str]
    State: ClassVar[type]
    extra_field: ClassVar[str] = ""

    @classmethod
    def of_extra(cls, extra) -> "WeightRule":
        """Return the rule that fits a further array."""
        return cls()

    @property
    def extra_dtype(self) -> Tree:
        """The dtype of the further array; None if there is none."""
        return None

    @property
    def tag(self) -> str:
        """The tag of the state for its further array, if that holds bits and no numbers; "" otherwise."""
        return ""

    def first_extra(self, p) -> jax.Array:
        """Return the first further array of a weight: zeros."""
        return jnp.zeros_like(p, dtype=self.extra_dtype)

    def rounds(self, dtype) -> bool:
        """Whether weights of that dtype are rounded stochastically."""
        return False

    def join(self, p: jax.Array, extra) -> jax.Array:
        """Return the weights with their further bits, in float32."""
        return p.astype(jnp.float32)

    def store(self, w: jax.Array, dtype, words: jax.Array | None) -> tuple[jax.Array, Tree]:
        """Split float32 `w` into the model's weights, in float32 or `dtype`, and the further array.

        Without words, values are rounded to nearest.
        """
        raise NotImplementedError

    def apply(
        self, u: jax.Array, p: jax.Array, extra, words: jax.Array | None, zero: jax.Array
    ) -> tuple[jax.Array, Tree]:
        """Return the weights after an update, and the arrays beside them, as `store` does."""
        return self.store(self.join(p, extra) + u, p.dtype, words)


def update_between(p: jax.Array, q: jax.Array) -> jax.Array:
    """Return the update that takes the weight p to q: q - p in float32, and -0.0 where they are equal.

    -0.0 is the one number that moves no weight, neither an infinity nor a zero of either sign.
    """
    return lax.select(q == p, lax.full_like(q, -0.0), q - p)


def weight_transform(
    rule: WeightRule, inner: optax.GradientTransformation | None = None, seed: Seed = 0
) -> optax.GradientTransformationExtraArgs:
    """Return the transform that stores weights by a rule.

    `inner` sees and updates the weights as the rule knows them; it is None where the rule is a last link.
    """
    words = seed_words(rule.name, seed)
    inner_update = None if inner is None else optax.with_extra_args_support(inner).update

    def init(params):
        check_params(rule.name, params)
        say_what_is_not_checked(rule.name)
        wide = jax.tree.map(lambda p: jnp.asarray(p).astype(jnp.float32), params) if inner else None
        first = _first_extras(rule, params)
        mark = narrowest(params)
        state = _state(rule, jnp.zeros([], jnp.int32), new_seed(words, params), first, mark, inner, wide)
        return report(rule, params, state)

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                f"{rule.name}: params is None; {rule.why}. Pass params to update(updates, state, params). "
                f"{WITHOUT_PARAMS}"
            )
        check_state(rule.name, state, rule.State)
        check_tag(rule.name, state, rule.tag)
        # Of `optax.lookahead` both copies are stored, and gradients are of one.
        has_copies = inner is not None and isinstance(params, optax.LookaheadParams)
        leaves = given = flatten_updates(rule.name, params if has_copies else updates)
        weights = leaves.weights(params)
        if hasattr(state, "narrowest"):
            _check_narrowest(rule, params, state.narrowest)
        extras = _extras(rule, leaves, weights, state)
        after = {}
        if inner_update is not None:
            wide = leaves.treedef.unflatten(_wide(rule, leaves, weights, extras))
            updates, after["inner_state"] = inner_update(updates, state.inner_state, wide, **extra_args)
            leaves = flatten_updates(rule.name, updates)
        count = next((name for name in ("count", "outer_count") if name in rule.State._fields), "")
        if count:
            after[count] = next_count(getattr(state, count))
        seed = getattr(state, count.replace("count", "seed")) if count else None
        keys = None if seed is None else param_keys(leaves, seed, after[count])
        us, extras = apply_to_leaves(rule, leaves, weights, extras, keys)
        us = watched(rule.name, leaves, weights, given.widened(us, params))
        return us, state._replace(**after, **({rule.extra_field: extras} if rule.extra_field else {}))

    tx = optax.GradientTransformationExtraArgs(init, update)
    return may_wait(tx) if inner is None else tx


def param_keys(leaves: Leaves, seed: jax.Array | np.ndarray, count) -> LeafKeys:
    """Return the keys of the words that round the weights of `leaves`."""
    ids = [leaf_id(name) for name in leaves.names]
    return shared_keys_of(ids, Role.PARAM) or leaf_keys(seed, count, ids, (Role.PARAM,))


def apply_to_leaves(rule: WeightRule, leaves: Leaves, weights: list, extras: list, keys: LeafKeys | None):
    """Return the trees of the updates to the new weights and of their further arrays."""
    zero = shared_zero() if keys is None else None
    parts = shards(rule.name, leaves.names, leaves.values)
    indices = [None] * len(weights) if keys is None else keys.indices(parts)
    rows = [
        (None, extra)
        if u is None
        else call_for_leaf(_apply_to_leaf, rule, (zero, keys, index), (u, p, extra), (_in_float32(u), extra))
        for index, u, p, extra in zip(indices, leaves.values, weights, extras, strict=True)
    ]
    return leaves.unzip(2, rows)


def _apply_to_leaf(rule: WeightRule, zero, keys: LeafKeys | None, index, u: jax.Array, p: jax.Array, extra):
    """Return the update of one leaf and its further array."""
    key = None if keys is None else keys.of_leaf(index)
    zero = zero if key is None else key.zero
    u = opaque_input(u, zero)
    if is_wide(p):
        return u, extra
    words = key.words(Role.PARAM, u.shape) if key is not None and rule.rounds(p.dtype) else None
    q, extra = rule.apply(u, p, extra, words, zero)
    p32 = p.astype(jnp.float32)
    return straight_through(u, update_between(p32, q.astype(jnp.float32))), extra


def _wide(rule: WeightRule, leaves: Leaves, weights: list, extras: list) -> list:
    """Return the float32 weights that `inner` sees, for leaves with an update."""
    rows = zip(leaves.values, weights, extras, strict=True)
    join = type(rule).join
    return [
        p if u is None or is_wide(p) else call_for_leaf(join, rule, (), (p, extra), _in_float32(p))
        for u, p, extra in rows
    ]


def _in_float32(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32)


def _first_extras(rule: WeightRule, params):
    """Return the first further arrays of weights, in their tree; float32 weights have none."""
    if not rule.extra_field:
        return None
    return jax.tree.map(lambda p: optax.MaskedNode() if is_wide(p) else rule.first_extra(p), params)


def _extras(rule: WeightRule, leaves: Leaves, weights: list, state) -> list:
    """Return the further array of every weight; refuse one that `init` would not have made."""
    if not rule.extra_field:
        return [None] * len(weights)
    kept = getattr(state, rule.extra_field)
    arrays = leaves.match_any_shape(kept, "state", "Pass the tree that init saw.")
    for name, u, p, array in zip(leaves.names, leaves.values, weights, arrays, strict=True):
        nothing = isinstance(array, optax.MaskedNode)
        if u is None or (is_wide(p) and nothing):
            continue
        if is_wide(p):
            raise ValueError(
                f"{rule.name}: '{name}' is float32, and was of 16 bits when init made the state. Apply "
                "updates by optax.apply_updates, which keeps the dtype (eqx.apply_updates does not). If a "
                'library adds them, use param_storage="stochastic", and end the chain with cast_updates().'
            )
        if not nothing and (array.shape, array.dtype) == (p.shape, rule.extra_dtype):
            continue
        array_kept = "nothing" if nothing else f"{array.dtype}{list(array.shape)}"
        raise ValueError(
            f"{rule.name}: the state keeps {array_kept} beside '{name}', not "
            f"{jnp.dtype(rule.extra_dtype).name}{list(p.shape)}. Pass the state that init made."
        )
    return arrays


def narrowest(params) -> jax.Array:
    """Return a zero of the narrowest dtype among weights; float32 where there are none."""
    dtypes = [p.dtype for p in jax.tree.leaves(params) if hasattr(p, "dtype")]
    return jnp.zeros([], min(dtypes, key=lambda dtype: dtype.itemsize, default=jnp.float32))


def _check_narrowest(rule: WeightRule, params, mark: jax.Array) -> None:
    """Refuse weights that were all cast since `init` made the state."""
    now = narrowest(params)
    if is_wide(now) != is_wide(mark):
        raise ValueError(
            f"{rule.name}: the narrowest weight is {now.dtype}, and the state is of weights whose narrowest "
            f"is {mark.dtype}: weights or state were cast since init. Apply updates by optax.apply_updates, "
            "which keeps dtypes (eqx.apply_updates does not). If a library adds them, end the chain with "
            "cast_updates(). To cast weights, use set_float32_params, which casts the state too."
        )


def _state(
    rule: WeightRule, count, seed, extras, mark, inner: optax.GradientTransformation | None, wide
) -> Tree:
    """Return the state before the first step."""
    fields = {"count": count, "outer_count": count, "seed": seed, "outer_seed": seed, "narrowest": mark}
    fields |= {rule.extra_field: extras, "formats": new_tag(rule.tag)}
    if inner is not None:
        fields["inner_state"] = inner.init(wide)
    return rule.State(**{name: fields[name] for name in rule.State._fields})
