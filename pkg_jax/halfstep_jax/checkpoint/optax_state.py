"""The state of an optimizer in the form of Optax: to move a run in and out."""

import jax
import jax.numpy as jnp
import optax

from halfstep.checkpoint.header_form import Header
from halfstep_jax.checkpoint.link_moments import LinkMoments, kinds_of, with_kinds
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import HELD_BY_FLOAT32, check_state, named_leaves
from halfstep_jax.numbers.schedules import ScheduleState
from halfstep_jax.rule import state_type
from halfstep_jax.storage.format_tag import check_tags

_OF_OPTAX: Header = {
    "scale_by_adam": optax.ScaleByAdamState,
    "scale_by_lion": optax.ScaleByLionState,
    "trace": optax.TraceState,
}
"""The state in which Optax keeps the moments of a link of ours."""

_NAMES = {state: name for name, state in _OF_OPTAX.items()}
_ALIKE = {"adamw_fed_back": "scale_by_adam", "sgd_fed_back": "trace"}
"""Rules that keep the moments of another; their first ones hold rounding errors of weights too."""
_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
_PARTS = (*_NAMES, *_INJECTED, optax.ScaleByScheduleState)


def from_optax(state: Tree, tx: optax.GradientTransformation, params: Tree) -> Tree:
    """Return the state of `tx` that continues from a state of Optax: to move a run in.

    Each moment is rounded once, to the format in which `tx` keeps it, stochastically if steps round it so.
    The words belong to the step of `state`. Counts come from `state`, 0 where it has none. Numbers, such
    as b1 and the learning rate, come from `tx`. Arrays beside the weights are as `tx.init` makes them;
    `set_float32_params` then takes the float32 weights.

    Args:
        state: of `optax.adamw`, `adam`, `lamb`, `lion` or `sgd`, or of a chain of their links, also within
            `optax.inject_hyperparams`, `masked` and `partition`.
        tx: a transform of this package for the same rule, with any formats.
        params: the weights, as `tx.init` takes them.

    Raises:
        TypeError: if a moment is not float32, bfloat16 or float16.
        ValueError: if `state` lacks a moment that `tx` keeps, holds something that `tx` has no place for, or
            a shape differs.

    Example:
        >>> from halfstep_jax import adamw
        >>> wide = {"w": jnp.ones((64, 64))}
        >>> theirs = optax.adamw(1e-3)
        >>> _, state = theirs.update(wide, theirs.init(wide), wide)
        >>> params = {"w": wide["w"].astype(jnp.bfloat16)}
        >>> adam, *_ = from_optax(state, adamw(1e-3, recipe="one_pass"), params)
        >>> adam.nu["w"].dtype, int(adam.count)
        (dtype('uint8'), 1)

    Source: ours.
    """
    treedef, kinds = kinds_of("from_optax", tx, params)

    def move(state, first):
        theirs = _Theirs(state)
        rows = zip(kinds, treedef.flatten_up_to(first), strict=True)
        made = [_filled(theirs, *row) for row in rows]
        theirs.check_taken()
        return treedef.unflatten(made)

    return jax.jit(move)(state, tx.init(params))


def to_optax(
    state: Tree, tx: optax.GradientTransformation, params: Tree, optax_tx: optax.GradientTransformation
) -> Tree:
    """Return the state of an Optax transform that continues from the state of `tx`: to move a run out.

    Decodes the moments, and rounds them to nearest if `optax_tx` keeps 16 bits. Counts are the counts of
    `state`. Weights are apart: `float32_params`.

    Args:
        state: of `tx`.
        tx: a transform of this package.
        params: the weights of the run.
        optax_tx: a transform of Optax for the same rule, for weights in float32.

    Raises:
        ValueError: if `optax_tx` keeps a moment that `tx` does not keep, or the other way round; or if
            `state` is not of `tx`.

    Example:
        >>> from halfstep_jax import adamw
        >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        >>> tx = adamw(1e-3, recipe="one_pass")
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> adam, *_ = to_optax(state, tx, params, optax.adamw(1e-3))
        >>> adam.nu["w"].dtype, int(adam.count)
        (dtype('float32'), 1)

    Source: ours.
    """
    caller = "to_optax"
    check_tags(caller, jax.eval_shape(tx.init, params), state)

    def move(state, params):
        ours = _Moments(caller, "tx", "optax_tx")
        for kind, x in with_kinds(caller, state, tx, params):
            if isinstance(kind, LinkMoments):
                check_state(caller, x, state_type(type(kind.rule)))
                ours.add(kind.rule.name, x.count, kind.decoded(x))
            elif kind:
                ours.counts[kind].append(x.count if kind == "schedule" else x)
        made = _in_optax(ours, optax_tx.init(jax.tree.map(lambda p: p.astype(jnp.float32), params)))
        ours.check_taken()
        return made

    return jax.jit(move)(state, params)


class _Moments:
    """Moments in float32 on their way from one state to another.

    Attributes:
        counts: of steps: of "schedule"s, and of the other links ("count").
    """

    def __init__(self, caller: str, source: str, target: str):
        self.caller, self.source, self.target = caller, source, target
        self.counts: dict[str, list] = {"count": [], "schedule": []}
        self._arrays: dict[tuple[str, str, str], list[tuple[Tree, Tree]]] = {}

    def add(self, rule: str, count, moments) -> None:
        """Add the moments (field, leaf, array) of a link, with its count."""
        if count is not None:
            self.counts["count"].append(count)
        for field, leaf, array in moments:
            self._arrays.setdefault((_ALIKE.get(rule, rule), field, leaf), []).append((array, count))

    def take(self, rule: str, field: str, leaf: str, shape: tuple[int, ...]) -> tuple[Tree, Tree]:
        """Return a moment and its count."""
        arrays = self._arrays.get((_ALIKE.get(rule, rule), field, leaf))
        what = f"{field} of '{leaf}'"
        if not arrays:
            raise ValueError(
                f"{self.caller}: {self.target} keeps {what} for {rule}, which {self.source} does not hold. "
                "Pass a transform of the same rule, for the same weights."
            )
        array, count = arrays.pop(0)
        if array.shape != shape:
            raise ValueError(
                f"{self.caller}: {what} has shape {array.shape}, expected {shape}. Pass the run's params."
            )
        if (dtype := str(array.dtype)) not in HELD_BY_FLOAT32:
            raise TypeError(
                f"{self.caller}: {what} is {dtype}; Optax keeps float32, bfloat16 or float16. Take a state "
                "of this package out by to_optax first."
            )
        return array, count

    def steps(self) -> Tree:
        """Return the count for links without one in the source."""
        counts = self.counts["count"] + self.counts["schedule"]
        return counts[0] if counts else jnp.zeros([], jnp.int32)

    def next_schedule(self) -> Tree:
        """Return the count of the next schedule."""
        return self.counts["schedule"].pop(0) if self.counts["schedule"] else self.steps()

    def check_taken(self) -> None:
        """Refuse moments that no link took."""
        left = [key for key, arrays in self._arrays.items() if arrays]
        if left:
            rule, field, leaf = left[0]
            raise ValueError(
                f"{self.caller}: {self.source} holds {field} of '{leaf}' for {rule}, which {self.target} "
                "does not keep. Pass a transform of halfstep with the same rule, such as adamw, for the same "
                "weights."
            )


class _Theirs(_Moments):
    """The moments of a state of Optax."""

    def __init__(self, state):
        super().__init__("from_optax", "the state", "tx")
        self._read(state, "")

    def _read(self, state, where: str) -> None:
        for name, x in named_leaves(state, lambda x: isinstance(x, _PARTS)):
            path = "/".join(filter(None, (where, name)))
            if isinstance(x, _INJECTED):
                self._read(x.inner_state, path)
            elif isinstance(x, optax.ScaleByScheduleState):
                self.counts["schedule"].append(x.count)
            elif type(x) in _NAMES:
                fields = [field for field in x._fields if field != "count"]
                moments = [(field, *named) for field in fields for named in named_leaves(getattr(x, field))]
                # Every tuple has a method of that name.
                self.add(_NAMES[type(x)], x.count if "count" in x._fields else None, moments)
            else:
                raise ValueError(
                    f"{self.caller}: tx has no place for '{path}' of the state. Pass the part of the state "
                    "that is of adam, lamb, lion or sgd, such as its inner_state."
                )


def _filled(theirs: _Theirs, kind: LinkMoments | str, x) -> Tree:
    """Fill a part of a new halfstep state."""
    if isinstance(kind, LinkMoments):
        return kind.encoded(theirs, x)
    if kind == "schedule":
        return ScheduleState(jnp.asarray(theirs.next_schedule()).astype(x.count.dtype))
    return jnp.asarray(theirs.steps()).astype(x.dtype) if kind else x


def _in_optax(ours: _Moments, state) -> Tree:
    """Fill a new Optax state."""
    parts, treedef = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, _PARTS))
    made = []
    for x in parts:
        if isinstance(x, _INJECTED):
            x = x._replace(count=ours.steps(), inner_state=_in_optax(ours, x.inner_state))
        elif isinstance(x, optax.ScaleByScheduleState):
            x = x._replace(count=ours.next_schedule())
        elif type(x) in _NAMES:
            x = _with_moments(ours, x)
        made.append(x)
    return treedef.unflatten(made)


def _with_moments(ours: _Moments, state) -> Tree:
    """Fill a new state of an Optax link with our moments."""
    after, counts = {}, []
    for field in state._fields:
        if field == "count":
            continue
        arrays = []
        for leaf, like in named_leaves(tree := getattr(state, field)):
            array, count = ours.take(_NAMES[type(state)], field, leaf, like.shape)
            arrays.append(array.astype(like.dtype))
            counts.append(count)
        after[field] = jax.tree.structure(tree).unflatten(arrays)
    if "count" in state._fields:
        after["count"] = counts[0] if counts else ours.steps()
    return state._replace(**after)
