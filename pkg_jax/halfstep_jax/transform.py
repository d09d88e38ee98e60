"""An update rule as an Optax transform: trees to leaves, seeds to words, state in and out."""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from halfstep.makers import docstring_of, published
from halfstep.random_words import Role, leaf_id
from halfstep.recipes import takes_recipe
from halfstep.rule import Rule, declared, moments_of
from halfstep.step import updated
from halfstep.storage.moment_formats import (
    check_feedback,
    check_power_unit,
    check_saturation,
    check_slow_feedback,
    check_unit,
    kept_wide,
)
from halfstep_jax.leaf_calls import Tree, call_for_leaf, call_per_shape, may_wait, value_of, waiting_calls
from halfstep_jax.leaves import WITHOUT_PARAMS, Leaves, check_params, check_state, flatten_updates
from halfstep_jax.link_reports import report, say_what_is_not_checked
from halfstep_jax.meshes.placement import placed_as
from halfstep_jax.numbers.hyperparameters import check_static
from halfstep_jax.numbers.op import JaxOp
from halfstep_jax.numbers.random_words import LeafKeys, leaf_keys
from halfstep_jax.numbers.schedules import ScheduleState, next_count
from halfstep_jax.numbers.seeds import new_seed, seed_words
from halfstep_jax.numbers.shared_keys import share_keys, shared_zero, unshared_keys
from halfstep_jax.rule import (
    RoundedWeight,
    StepKeys,
    checked,
    numbers_at,
    schedules,
    state_type,
    static_form,
    step_moments,
    with_fields,
)
from halfstep_jax.storage.format_tag import check_tag, new_tag, tag_of
from halfstep_jax.storage.formats import Encoded
from halfstep_jax.storage.stored_moment import StoredMoment
from halfstep_jax.watched_updates import watched
from halfstep_jax.xla import passes
from halfstep_jax.xla.exact import opaque_bits, opaque_input, stored_with, zero_on_cpu
from halfstep_jax.xla.shards import (
    known_shards,
    manual_axes,
    refuse_other_axes,
    refuse_other_shards,
    shards,
)

_LOG = logging.getLogger("halfstep_jax")
_TRIAL_SHAPE = (8, 16)

P = ParamSpec("P")
R = TypeVar("R", bound=Rule)


def as_transform(rule: Rule) -> optax.GradientTransformationExtraArgs:
    """Return the Optax transform of an update rule, of this package or of your own.

    Args:
        rule: an instance of a class that derives from `halfstep.Rule`.

    Returns:
        An Optax transform. Its updates are float32, of float64 gradients float64. If the rule has moments,
        its state is the class's `State`, or a NamedTuple of `count`, `seed` and the moments. Without moments
        it is a count, or empty.

    Raises:
        TypeError: if a hyperparameter or dtype is of the wrong type; from `init` and `update`, if a leaf is
            not float32, bfloat16 or float16.
        ValueError: if a moment would freeze. Also if, in a trial step, the rule returns another shape or
            dtype, reads an undeclared moment, or leaves a moment unrounded. From `update`, if trees or shapes
            differ.

    Example:
        >>> from halfstep_jax import Rule, as_transform, decay_rate, moment
        >>> class Lookahead(Rule):
        ...     b1: float = decay_rate(0.9)
        ...     mu_dtype: str = "bfloat16"
        ...     mu_rounding: str = "auto"
        ...     mu = moment(rate="b1")
        ...
        ...     def update(self, g, p, n, m, op):
        ...         mu = m.mu.round(op.ema(m.mu.value, g, n.b1))
        ...         return g + n.b1 * mu
        >>> tx = as_transform(Lookahead(b1=0.5))
        >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))
        >>> print(updates["w"], state.mu["w"].dtype)
        [1.25 1.25] bfloat16

    Source: ours.
    """
    rule = checked(rule)
    stored = {name: StoredMoment.of(rule, field) for name, field in moments_of(rule).items()}
    _check_units(rule, stored)
    _check_numbers_now(rule)
    tag = tag_of({name: moment.asked_for for name, moment in stored.items()})
    _try(rule, stored)
    words = seed_words(rule.name, getattr(rule, "seed", 0))

    def init(params):
        if rule.rounds_weights:
            say_what_is_not_checked(rule.name)
        return report(rule, params, first_state(params), stored)

    def first_state(params):
        if not stored:
            return ScheduleState(jnp.zeros([], jnp.int32)) if schedules(rule) else optax.EmptyState()
        check_params(rule.name, params)
        _say_what_stays_wide(rule, stored, params)
        trees = {name: moment.init(params) for name, moment in stored.items()}
        return _state(rule, jnp.zeros([], jnp.int32), new_seed(words, params, trees), trees, new_tag(tag))

    def update(updates, state, params=None, **extra_args):
        del extra_args
        leaves = flatten_updates(rule.name, updates)
        _check_shards(rule, leaves)
        weights = _weights(rule, leaves, params)
        if stored or schedules(rule):
            check_state(rule.name, state, state_type(type(rule)) if stored else ScheduleState)
            check_tag(rule.name, state, tag)
        before = state.count if stored or schedules(rule) else None
        count = None if before is None else next_count(before)
        numbers = numbers_at(rule, before, count)
        if not stored:
            after = state if count is None else ScheduleState(count)
            return leaves.widened(_without_moments(rule, leaves, weights, numbers)), after
        dtypes = leaves.weight_dtypes(params)
        us, trees = _with_moments(rule, stored, leaves, weights, dtypes, numbers, state, count)
        if rule.rounds_weights:
            us = watched(rule.name, leaves, weights, leaves.widened(us, params))
        else:
            us = leaves.widened(us)
        return us, _state(rule, count, state.seed, trees, state.formats)

    return may_wait(optax.GradientTransformationExtraArgs(init, update))


def transform_of(
    rule: Callable[P, R], make: Callable[[R], optax.GradientTransformationExtraArgs] = as_transform
) -> Callable[P, optax.GradientTransformationExtraArgs]:
    """Return the function that makes transforms of a class of rules: its arguments and its docstring."""
    signature, numbers = inspect.signature(rule), declared(rule).numbers
    name = getattr(rule, "name", rule.__name__)
    static = [field for field, x in signature.parameters.items() if x.annotation in (int, float)]

    def transform(*args: P.args, **options: P.kwargs) -> optax.GradientTransformationExtraArgs:
        check_static(name, options, static)
        return make(rule(*args, **options))

    published(transform, name, docstring_of(rule))
    # Optax's tools look for schedules by this annotation.
    given = {
        name: optax.ScalarOrSchedule if name in numbers and numbers[name].schedule else field.annotation
        for name, field in signature.parameters.items()
    }
    fields = [field.replace(annotation=given[name]) for name, field in signature.parameters.items()]
    transform.__signature__ = signature.replace(parameters=fields)  # pyright: ignore[reportFunctionMemberAccess]
    transform.__annotations__ = given | {"return": optax.GradientTransformationExtraArgs}
    return takes_recipe(declared(rule).moments.values(), stores_weights=False)(transform)


def _check_shards(rule: Rule, leaves: Leaves) -> None:
    """Inside `jax.shard_map`, refuse a rule that would take a shard for the whole array."""
    if rule.scope == "elementwise" or not manual_axes():
        return
    found = shards(rule.name, leaves.names, leaves.values)
    axis_names = getattr(rule, "axis_names", None)
    if not hasattr(rule, "axis_names"):
        refuse_other_shards(rule.name, leaves.names, found, rule.axes_read)
    elif axis_names is not None:
        refuse_other_axes(rule.name, leaves.names, found, axis_names)


def _without_moments(rule: Rule, leaves: Leaves, weights: list, numbers):
    zero, form = shared_zero(), static_form(rule)
    if rule.scope == "all":
        here = [i for i, g in enumerate(leaves.values) if g is not None]
        gs, ps = (tuple(value_of(column[i]) for i in here) for column in (leaves.values, weights))
        made = dict(zip(here, _update_all(form, zero, numbers, gs, ps), strict=True))
        return leaves.treedef.unflatten([made.get(i) for i in range(len(leaves.values))])
    if rule.scope != "elementwise":
        return leaves.map(lambda g, p: call_per_shape(_update, form, zero, numbers, g, p), weights)
    return leaves.map(
        lambda g, p: call_for_leaf(_update, form, (zero, numbers), (g, p), _in_float32(g)), weights
    )


def _with_moments(
    rule: Rule, stored: dict[str, StoredMoment], leaves: Leaves, weights, dtypes, numbers, state, count
):
    columns = [
        moment.read(leaves, getattr(state, name), getattr(state, f"{name}_scale"), dtypes)
        for name, moment in stored.items()
    ]
    ids = [leaf_id(name) for name in leaves.names]
    roles = sorted(
        {moment.key_role for moment in stored.values()} | ({Role.PARAM} if rule.rounds_weights else set())
    )
    keys, before = leaf_keys(state.seed, count, ids, roles), None
    if any(moment.dithered for moment in stored.values()):
        before = leaf_keys(state.seed, state.count, ids, roles)
    static = static_form(rule), tuple(stored.items())
    share_keys(ids, keys)
    indices = keys.indices(shards(rule.name, leaves.names, leaves.values))
    rows = [
        (None, *encoded)
        if g is None
        else _called(static, (keys, before, index, numbers), (g, p, tuple(encoded)))
        for index, g, p, *encoded in zip(indices, leaves.values, weights, *columns, strict=True)
    ]
    us, *columns = leaves.unzip(1 + len(stored), rows)
    trees = zip(stored.items(), columns, strict=True)
    return us, {name: moment.split_tree(column) for (name, moment), column in trees}


def _called(static: tuple, given: tuple, arrays: tuple) -> tuple:
    """Return the step of a leaf, which may wait for that of the others."""
    rule, stored = static
    if rule.scope != "elementwise" or any(moment.field.shape is not None for _, moment in stored):
        return call_per_shape(_step, static, *given, *arrays)
    g, _, encoded = arrays
    cuts = tuple(moment.cut_of(old, g.shape) for (_, moment), old in zip(stored, encoded, strict=True))
    return call_for_leaf(_step, static, given, arrays, (_in_float32(g), *encoded), cuts)


def _in_float32(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32)


def _op(rule: Rule, zero: jax.Array) -> JaxOp:
    return JaxOp(rule.name, zero, getattr(rule, "axis_names", None))


def _update(rule: Rule, zero: jax.Array, numbers, g: jax.Array, p) -> jax.Array:
    """Take the step of a rule without moments on one leaf."""

    def update(zero, numbers, g, p):
        g, p = opaque_input(g, zero), None if p is None else opaque_input(p, zero)
        return updated(rule, numbers, g, p, _op(rule, zero), {})

    return _of_whole(rule, g, update, zero, numbers, g, p)


def _of_whole(rule: Rule, like: Tree, update: Callable, *arrays) -> Tree:
    """Return update(*arrays); a rule that reads whole arrays gets them whole on explicit mesh axes too."""
    is_whole = rule.scope == "parameter" and rule.needs != "norms"
    return placed_as(like, update, *arrays) if is_whole else update(*arrays)


def _update_all(rule: Rule, zero: jax.Array, numbers, gs: tuple, ps: tuple) -> tuple:
    """Take the step of a rule of scope "all"."""
    gs = tuple(opaque_input(g, zero) for g in gs)
    ps = tuple(None if p is None else opaque_input(p, zero) for p in ps)
    return updated(rule, numbers, gs, ps, _op(rule, zero), {})


def _step(
    static: tuple, keys: LeafKeys, before: LeafKeys | None, index, numbers, g: jax.Array, p, encoded: tuple
) -> tuple:
    """Take the step of a rule with moments on one leaf; return its update and stored moments."""
    step = functools.partial(_step_here, static)
    return _of_whole(static[0], (g, *encoded), step, keys, before, index, numbers, g, p, encoded)


def _step_here(
    static: tuple, keys: LeafKeys, before: LeafKeys | None, index, numbers, g: jax.Array, p, encoded: tuple
) -> tuple:
    rule, stored = static
    key = keys.of_leaf(index)
    step_keys = StepKeys(key, None if before is None else before.of_leaf(index), key.zero)
    formats = {name: moment.format_of(old) for (name, moment), old in zip(stored, encoded, strict=True)}
    feeds = any(moment.feeds_back(formats[name]) for name, moment in stored)
    # Op by op nothing is kept that was not computed.
    in_passes = passes.ARE_THERE and isinstance(key.zero, Tracer) and (feeds or rule.rounds_weights)
    if in_passes:
        old = {name: formats[name].unpacked(x) for (name, _), x in zip(stored, encoded, strict=True)}
        # XLA on a GPU has two passes of its own where only one moment has scales, and one where none has.
        on_gpu = feeds and sum(fmt.scaled for fmt in formats.values()) > 1
        u, new = _in_passes(static, step_keys, numbers, g, p, old, formats, on_gpu=on_gpu)
        new = {name: formats[name].packed_up(new[name]) for name, _ in stored}
    else:
        u, moments = _take(static, step_keys, numbers, g, p, dict(zip(formats, encoded, strict=True)))
        new = {name: moments[name].encoded for name, _ in stored}
    if rule.rounds_weights or (not feeds and any(fmt.has_inverse_root for fmt in formats.values())):
        # Made before moments are stored, u would have a pass of its own on a TPU.
        for name, moment in stored:
            codes, early = new[name].codes, rule.rounds_weights and moment.field.signed
            if (moment.field.unit or early) and codes.shape == u.shape:  # codes of 4 bits are packed
                u = stored_with(u, codes, key.zero)
    return u, *(new[name] for name, _ in stored)


def _take(static: tuple, keys: StepKeys, numbers, g: jax.Array, p, old: dict[str, Encoded], **new):
    """Take the step of one leaf with inputs made opaque by a zero; return its update and moments."""
    rule, stored = static
    op = _op(rule, keys.zero)
    moments = step_moments(dict(stored), [old[name] for name, _ in stored], keys, op, numbers, **new)
    dtype = None if p is None else p.dtype
    g, p = opaque_input(g, keys.zero), None if p is None else opaque_input(p, keys.zero)
    weight = {"param": RoundedWeight(p, dtype, keys.now, op)} if rule.rounds_weights and p is not None else {}
    return updated(rule, numbers, g, p, op, moments | weight), moments


def _in_passes(
    static: tuple, keys: StepKeys, numbers, g: jax.Array, p, old: dict[str, Encoded], formats, *, on_gpu: bool
):
    """Take the step of one leaf in passes; return its update and stored moments, not packed."""
    in_passes = {name: x for name, x in old.items() if not formats[name].has_inverse_root}

    def take(zero, new):
        before = zero_on_cpu(zero) if static[0].rounds_weights else zero
        again = jax.tree.map(lambda x: opaque_bits(x, before), old)
        u, moments = _take(static, keys._replace(zero=zero), numbers, g, p, again, new=new)
        others = {name: moment.encoded for name, moment in moments.items() if name not in new}
        return (u, others), {name: moments[name].made for name in new}

    (u, others), new = passes.step_in_passes(take, in_passes, keys.zero, on_gpu=on_gpu)
    return u, new | others


def _weights(rule: Rule, leaves: Leaves, params) -> list[Tree]:
    """Return the weight of every leaf; None if the rule reads no weights."""
    if not rule.reads_params:
        return [None] * len(leaves.values)
    if params is None:
        hint = f" {WITHOUT_PARAMS}" if rule.rounds_weights else ""
        raise ValueError(
            f"{rule.name}: params is None; {rule.reads_params}. "
            f"Pass params to update(updates, state, params).{hint}"
        )
    return leaves.weights(params)


def _state(rule: Rule, count, seed, trees: dict[str, tuple], formats: Tree) -> Tree:
    """Return the state from the trees of codes and scales of each moment."""
    codes = {name: tree for name, (tree, _) in trees.items()}
    scales = {f"{name}_scale": tree for name, (_, tree) in trees.items()}
    return state_type(type(rule))(count=count, seed=seed, **codes, **scales, formats=formats)


def _say_what_stays_wide(rule: Rule, stored: dict[str, StoredMoment], params) -> None:
    """Log once of a moment that stays float32 for want of axes."""
    shapes = [tuple(p.shape) for p in jax.tree.leaves(params)]
    for moment in stored.values():
        fmt = moment.asked_for
        if fmt is not None and (problem := kept_wide(rule.name, moment.field, fmt, shapes)):
            say_once(problem)


@functools.cache
def say_once(problem: str) -> None:
    """Log a problem unless it is empty, once in a process."""
    if problem:
        _LOG.warning(problem)


def _check_units(rule: Rule, stored: dict[str, StoredMoment]) -> None:
    """Refuse a moment with a unit that no other moment gives, or with codes too small for that unit."""
    formats = [(moment.field, moment.asked_for) for moment in stored.values()]
    for moment in stored.values():
        fmt, unit = moment.asked_for, stored.get(moment.field.unit)
        if fmt is not None:
            check_saturation(rule.name, moment.field, fmt, formats)
            check_slow_feedback(rule.name, moment.field, fmt, moment.rounding, moment.rate)
        if unit is None or fmt is None or not fmt.relative or fmt.scaled:
            continue
        check_power_unit(rule.name, moment.field, fmt, unit.field, unit.asked_for)
        check_feedback(rule.name, moment.field, moment.rounding, unit.field, unit.asked_for)
        # Rates that are arrays are not known; numbers past the codes then make steps shorter.
        if moment.rate is None or unit.rate is None:
            continue
        rates, names = (moment.rate, unit.rate), (moment.field.rate, unit.field.rate)
        check_unit(rule.name, moment.field, unit.field, rates, names)


def _check_numbers_now(rule: Rule) -> None:
    """Check formats for rates that are arrays, such as of `inject_hyperparams`, with the values of now.

    Traced ones are not known, and roundings are chosen without, so that they do not depend on `jax.jit`.
    """
    numbers = {name: getattr(rule, name) for name in declared(type(rule)).numbers}
    known = {
        name: np.float32(x)
        for name, x in numbers.items()
        if isinstance(x, jax.Array) and not isinstance(x, Tracer)
    }
    if known:
        rule = with_fields(rule, known)
        _check_units(rule, {name: StoredMoment.of(rule, field) for name, field in moments_of(rule).items()})


def _try(rule: Rule, stored: dict[str, StoredMoment]) -> None:
    """Take one step on shapes only, so that a broken rule is refused when it is built."""
    x = jax.ShapeDtypeStruct(getattr(rule, "trial_shape", _TRIAL_SHAPE), jnp.float32)
    weight = x if rule.reads_params else None
    # No number is a constant to it: not by schedules, which may be for numbers alone that are known.
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    given = dict.fromkeys(declared(type(rule)).numbers, scalar)
    counted = bool(stored or schedules(rule))

    def trial(count, g, p, given):
        count = count if counted else None
        leaves, tried = Leaves(rule.name, [""], [g], jax.tree.structure(0)), with_fields(rule, given)
        numbers = numbers_at(tried, count, count)
        if not stored:
            return _without_moments(tried, leaves, [p], numbers)
        trees = {name: moment.init(g) for name, moment in stored.items()}
        state = _state(rule, count, jnp.zeros(2, jnp.uint32), trees, optax.EmptyState())
        return _with_moments(tried, stored, leaves, [p], [None], numbers, state, count)

    # The rule may be made inside `jax.shard_map`, or an alias.
    with known_shards({}), unshared_keys(), waiting_calls(None):
        jax.eval_shape(trial, jax.ShapeDtypeStruct((), jnp.int32), x, weight, given)
