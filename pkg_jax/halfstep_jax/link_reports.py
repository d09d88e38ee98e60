"""The links of this package in an Optax transform: each reports itself when its state is made.

An Optax transform is two functions and does not expose its parts. Functions that need them make the state
once, on shapes alone, and collect the reports.
"""

import contextlib
import contextvars
import functools
import logging
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import optax

from halfstep_jax.leaf_calls import Tree

_LOG = logging.getLogger("halfstep_jax")


class Link(NamedTuple):
    """A link, as it reported itself at `init`.

    Attributes:
        rule: with its options and numbers.
        params: the weights that it was given.
        state: the result; the same object is in the state of the whole transform.
        inside: of each moment how it is stored; of `store_state` the wrapped links, an `Inside`.
    """

    rule: Any  # a Rule, or a rule of weights, of a layer above
    params: Tree
    state: Tree
    inside: Tree


class Inside(NamedTuple):
    """The inside of `store_state`: links, their state before it is stored, and the format of every leaf."""

    links: list[Link]
    state: Tree
    formats: list


class StateMap(NamedTuple):
    """The state of a transform, and its parts that belong to links of this package.

    Attributes:
        links: a wrapper after the links inside it. `state` of each is the same object as in `state` here.
        state: on shapes alone.
        shapes: the same state as `jax.ShapeDtypeStruct`.
    """

    links: list[Link]
    state: Tree
    shapes: Tree


def state_map(tx: optax.GradientTransformation, params: Tree) -> StateMap:
    """Return the map of a transform's state for given weights. All reports use this one walk."""
    made: list[tuple[list[Link], Tree]] = []

    def init(params):
        with reported_links() as links:
            state = tx.init(params)
        made.append((links, state))
        return state

    shapes = jax.eval_shape(init, params)
    return StateMap(*made[0], shapes)


_LISTENER: contextvars.ContextVar[list[Link] | None] = contextvars.ContextVar("links", default=None)


@contextlib.contextmanager
def reported_links() -> Iterator[list[Link]]:
    """Collect the links that make states inside; a wrapper comes after the links that it wraps."""
    links: list[Link] = []
    token = _LISTENER.set(links)
    try:
        yield links
    finally:
        _LISTENER.reset(token)


def report(rule: object, params: Tree, state: Tree, inside: Tree = None) -> Tree:
    """Report a link to the collector, if there is one; return its state."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.append(Link(rule, params, state, inside))
    return state


_CHECKED: contextvars.ContextVar[bool] = contextvars.ContextVar("checked", default=False)


@contextlib.contextmanager
def checked_chain() -> Iterator[None]:
    """Log nothing about a chain with links that are checked, or that a report collects."""
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def say_what_is_not_checked(link: str) -> None:
    """Log once that a link stores weights, and that Optax's `chain` or `lookahead` goes on behind it.

    Found by the calls that lead to `init`: a transform of Optax calls the links inside without arguments of
    its own.
    """
    frame = None if _CHECKED.get() or _LISTENER.get() is not None else sys._getframe(1)
    made_by = None
    while frame is not None:
        file, values = pathlib.PurePath(frame.f_code.co_filename).name, frame.f_locals
        if file == "_combining.py" and frame.f_code.co_name == "<genexpr>":
            made_by = values.get("fn")
        elif file == "_combining.py" and "init_fns" in values and made_by is not values["init_fns"][-1]:
            _say_once(link, "optax.chain")
        elif file == "lookahead.py" and frame.f_code.co_name == "init_fn":
            _say_once(link, "optax.lookahead")
        frame = frame.f_back


@functools.cache
def _say_once(link: str, around: str) -> None:
    _LOG.warning(
        f"{link}: {around} goes on behind the link that stores weights, and updates that it changes are "
        "lost. This chain was not checked. Use halfstep_jax.chain, or call check_chain(tx, params)."
    )
