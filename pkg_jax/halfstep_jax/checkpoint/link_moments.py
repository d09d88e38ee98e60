"""The moments that the links of a transform keep in its state, wherever they stand in it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from halfstep.checkpoint.header_form import Header
from halfstep.random_words import leaf_id
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import Leaves, check_state, named_leaves, without_values
from halfstep_jax.link_reports import Inside, Link, state_map
from halfstep_jax.numbers.op import JaxOp
from halfstep_jax.numbers.random_words import leaf_keys
from halfstep_jax.numbers.schedules import ScheduleState
from halfstep_jax.rule import StepKeys, StoredStepMoment, state_type, step_moments
from halfstep_jax.weight_averages import EmaParamsState


class LinkMoments(NamedTuple):
    """A link with moments within a transform.

    Attributes:
        rule: of the link.
        moments: how each is stored.
        leaves: the weights that it steps, as shapes.
    """

    rule: Any  # a Rule, with formats of JAX
    moments: Header
    leaves: Leaves

    def encoded(self, theirs: Tree, state):
        """Return a state of the link with moments of another, each rounded once."""
        rows = [
            {field: theirs.take(self.rule.name, field, leaf, x.shape) for field in self.moments}
            for leaf, x in zip(self.leaves.names, self.leaves.values, strict=True)
        ]
        counts = [count for row in rows for _, count in row.values() if count is not None]
        count = jnp.asarray(counts[0] if counts else theirs.steps()).astype(state.count.dtype)
        stored = []
        for row, moments in zip(rows, self._stepped(state, jnp.maximum(count, 1)), strict=True):
            for name, moment in moments.items():
                moment.round_array(row[name][0].astype(jnp.float32))
            stored.append(tuple(moments[name].encoded for name in self.moments))
        columns = self.leaves.unzip(len(self.moments), stored)
        after: Header = {"count": count}
        for (name, moment), column in zip(self.moments.items(), columns, strict=True):
            after[name], after[f"{name}_scale"] = moment.split_tree(column)
        return state._replace(**after)

    def decoded(self, state) -> Iterator[tuple[str, str, jax.Array]]:
        """Yield the moments in a state of the link: field, leaf, and the values in float32."""
        for leaf, moments in zip(self.leaves.names, self._stepped(state, state.count), strict=True):
            for name in self.moments:
                yield name, leaf, moments[name].value.value

    def _stepped(self, state, count) -> Iterator[dict[str, StoredStepMoment]]:
        """Yield the moments of every weight, under the words of the step that stored them."""
        read = [
            moment.read(
                self.leaves,
                getattr(state, name),
                getattr(state, f"{name}_scale"),
                [None] * len(self.leaves.names),
            )
            for name, moment in self.moments.items()
        ]
        roles = sorted({moment.key_role for moment in self.moments.values()})
        keys = leaf_keys(state.seed, count, [leaf_id(name) for name in self.leaves.names], roles)
        for index, *encoded in zip(keys.indices(), *read, strict=True):
            key = keys.of_leaf(index)
            op = JaxOp(self.rule.name, key.zero)
            yield step_moments(self.moments, encoded, StepKeys(key, key, key.zero), op, None)


def kinds_of(caller: str, tx, params) -> tuple[Tree, list[LinkMoments | str]]:
    """Return the tree of a state of `tx` with links with moments as its leaves, and these links.

    That is a `LinkMoments`, "count", "schedule", or "" for a leaf that stays as it is.
    """
    links, state, _ = state_map(tx, params)
    if stored := [link for link in links if isinstance(link.inside, Inside)]:
        raise ValueError(
            f"{caller}: {stored[0].rule.name} keeps the state of any transform, which is not moved. Use "
            "mu_dtype and nu_dtype of a transform of this package."
        )
    moved = {id(link.state): link for link in links if link.inside}
    paths, treedef = jax.tree_util.tree_flatten_with_path(
        state, lambda x: id(x) in moved or isinstance(x, ScheduleState | EmaParamsState)
    )
    return treedef, [_kind(moved.get(id(x)), path, x) for path, x in paths]


def decoded_moments(caller: str, rule: str, state, tx, params) -> dict[tuple[str, str], jax.Array]:
    """Return the moments of the links of a rule in float32, by field and leaf.

    Raises:
        ValueError: if `state` is not of `tx`, or of other params.
    """
    moments = {}
    try:
        for kind, x in with_kinds(caller, state, tx, params):
            if isinstance(kind, LinkMoments) and kind.rule.name == rule:
                check_state(caller, x, state_type(type(kind.rule)))
                moments |= {(field, leaf): values for field, leaf, values in kind.decoded(x)}
    except ValueError as error:
        raise ValueError(f"{caller}: the state is of other params: {error}") from None
    return moments


def with_kinds(caller: str, state, tx, params) -> list[tuple[LinkMoments | str, Tree]]:
    """Return pairs of a part of a state of `tx` and its kind (`kinds_of`)."""
    treedef, kinds = kinds_of(caller, tx, params)
    try:
        parts = treedef.flatten_up_to(state)
    except ValueError as error:
        raise ValueError(
            f"{caller}: the state is not of tx: {without_values(error)}. Pass the state and its tx."
        ) from None
    return list(zip(kinds, parts, strict=True))


def moments_of(link: Link) -> LinkMoments:
    """Return a link that has moments, with its weights as shapes."""
    named = named_leaves(link.params)
    shapes = [jax.ShapeDtypeStruct(p.shape, p.dtype) for _, p in named]
    names, treedef = [name for name, _ in named], jax.tree.structure(link.params)
    return LinkMoments(link.rule, link.inside, Leaves(link.rule.name, names, shapes, treedef))


def _kind(link: Link | None, path, x) -> LinkMoments | str:
    if link is not None:
        return moments_of(link)
    if isinstance(x, ScheduleState):
        return "schedule"
    is_count = path and getattr(path[-1], "name", "") in ("count", "outer_count")
    return "count" if is_count else ""
