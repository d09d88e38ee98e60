"""The split of parameters between Muon and AdamW, by number of axes and by name, and its announcement."""

import fnmatch
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from halfstep.arrays import Array
from halfstep.rules.muon import MatrixAxes, matrices_of
from halfstep.text_table import text_table

Named = Sequence[tuple[str, Array]]
"""Leaf names ("layers/0/kernel"), each with its array."""
MatrixChoice = Callable[[str, Array], object] | Mapping[str, object] | None
"""Function of (name, array) or mapping from name patterns to True, False, `MatrixAxes` or None (default)."""

_LOG = logging.getLogger("halfstep")
# The rows of an embedding are looked up, and the columns of a head are classes. Neither maps between layers.
_BY_NAME = (
    (re.compile(r"embed|(^|[_\d])(wte|wpe)($|[_\d])", re.IGNORECASE), "an embedding, by its name"),
    (re.compile(r"(^|[_\d])heads?($|[_\d])", re.IGNORECASE), "a head, by its name"),
)

# In one layer these are vectors. With two axes they belong to a stack of layers.
_VECTORS = (
    (re.compile(r"(^|_)(bias(es)?|scale|gain|gamma|beta|offset)$", re.IGNORECASE), "a bias or scale"),
    (re.compile(r"norm([_\d]|$)|(^|_)ln([_\d]|$)", re.IGNORECASE), "of a norm"),
)


class Choice(NamedTuple):
    """The choice between Muon and AdamW for a parameter.

    Attributes:
        name: name of the leaf.
        shape: shape of the parameter.
        axes: the axes that span its matrices, or None if AdamW steps it.
        why: the reason, in words.
    """

    name: str
    shape: tuple[int, ...]
    axes: MatrixAxes | None
    why: str


def split(
    caller: str,
    named: Named,
    choose: MatrixChoice,
    output_axis: int,
    tied: Sequence = (),
) -> list[Choice]:
    """Return a choice between Muon and AdamW for every parameter.

    Args:
        caller: name for errors.
        named: leaf names ("layers/0/kernel") and arrays.
        choose: the user's choices for some parameters.
        output_axis: output axis of arrays with two axes.
        tied: names of parameters that the model uses in two places.

    Raises:
        TypeError: if `choose` is neither a function nor a mapping, or returns a wrong type.
        ValueError: if a pattern matches no name, no parameter is left to Muon, or a shape has no such
            matrices. Also for a kernel in a stack of layers without an entry in `choose`.
    """
    _check_patterns(caller, [name for name, _ in named], choose)
    choices = split_some(caller, named, choose, output_axis, tied)
    if not any(choice.axes for choice in choices):
        names = ", ".join(repr(name) for name, _ in named[:8])
        raise ValueError(
            f"{caller}: no parameter of {names} is a hidden matrix. Use adamw, or name one: "
            'matrices={"blocks/*": True}.'
        )
    return choices


def split_some(
    caller: str,
    named: Named,
    choose: MatrixChoice,
    output_axis: int,
    tied: Sequence = (),
) -> list[Choice]:
    """Return a choice for each parameter, even if none is a matrix. The arguments are as in `split`."""
    stacks = _stacks(named)
    return [
        _choice(caller, name, x, choose, output_axis, name in tied, stacks.get(name)) for name, x in named
    ]


def announce(caller: str, choices: Sequence[Choice]) -> None:
    """Log the split as a warning, once per process for each split."""
    rows = [
        (choice.name, str(list(choice.shape)), "Muon" if choice.axes else "AdamW", choice.why)
        for choice in choices
    ]
    _say(
        f"{caller}: matrices={{...}} changes this split.\n" + text_table(("leaf", "shape", "by", "why"), rows)
    )


@functools.cache
def _say(message: str) -> None:
    _LOG.warning(message)


def _check_patterns(caller: str, names: Sequence[str], choose: MatrixChoice) -> None:
    if choose is None or callable(choose):
        return
    if not isinstance(choose, Mapping):
        raise TypeError(
            f"{caller}: matrices={choose!r} is neither a function of (name, array) nor a mapping of "
            'patterns. Use {"embed/*": False}.'
        )
    for pattern in choose:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"{caller}: matrices has {pattern!r}, which matches no name of "
                f"{', '.join(map(repr, names[:8]))}. Use such a name, or a pattern as in a shell."
            )


def _stacks(named: Named) -> dict[str, str]:
    """Return the parameters in stacked layers, as scans keep them, each with the name that shows the stack.

    A stack is shown by a parameter with two axes that is a vector by its name, if the first axis of all
    parameters beside and below it has the same size.
    """
    found: dict[str, str] = {}
    for name, x in named:
        if len(x.shape) != 2 or not _vector_by_name(name):
            continue
        parts = name.split("/")
        for k in range(len(parts)):
            below = [(other, y) for other, y in named if other.split("/")[:k] == parts[:k]]
            if all(len(y.shape) > 1 and y.shape[0] == x.shape[0] for _, y in below):
                found |= {other: found.get(other, name) for other, _ in below}
                break
    return found


def _vector_by_name(name: str) -> str:
    """Return the kind of vector that a parameter is by its name, or "" if it is not a vector."""
    *_, last = parts = name.split("/")
    (by_last, what), (by_part, of_norm) = _VECTORS
    if by_last.search(last):
        return what
    return of_norm if any(map(by_part.search, parts[-2:])) else ""


def _choice(
    caller: str, name: str, x: Array, choose: MatrixChoice, output_axis: int, tied: bool, stack: str | None
) -> Choice:
    shape: tuple[int, ...] = tuple(x.shape)
    answer: Any = None  # the user's
    if callable(choose):
        answer = choose(name, x)
    elif choose is not None:
        answer = next((a for pattern, a in choose.items() if fnmatch.fnmatchcase(name, pattern)), None)
    if hasattr(answer, "reduction_axis") and hasattr(answer, "output_axis"):
        axes = MatrixAxes(answer.reduction_axis, answer.output_axis)
        matrices_of(f"{caller}: '{name}'", shape, *axes)
        return Choice(name, shape, axes, "as matrices says")
    if answer not in (True, False, None):
        raise TypeError(
            f"{caller}: matrices gives {answer!r} for '{name}'. Use True, False, MatrixAxes(...) or None."
        )
    if answer is not None:
        axes = None
        if answer:
            matrices_of(f"{caller}: '{name}'", shape, None, output_axis)
            axes = MatrixAxes(1 - output_axis, output_axis)
        return Choice(name, shape, axes, "as matrices says")
    if stack and len(shape) > 2:
        axes = f"MatrixAxes({2 - output_axis}, {1 + output_axis})"
        raise ValueError(
            f"{caller}: '{name}' {list(shape)} is in a stack of {shape[0]} layers, as '{stack}' shows, and "
            f"which axes span its matrices is not known. Say matrices={{'{name}': {axes}}}, inputs and "
            "outputs, or False for AdamW."
        )
    if why := _why_not(name, shape, tied, stack):
        return Choice(name, shape, None, why)
    return Choice(name, shape, MatrixAxes(1 - output_axis, output_axis), "a matrix between layers")


def _why_not(name: str, shape: tuple[int, ...], tied: bool, stack: str | None) -> str:
    """Return why an unlabeled parameter is left to AdamW, or "" if Muon steps it."""
    if len(shape) != 2:
        axis = "axis" if len(shape) == 1 else "axes"
        return f"{len(shape)} {axis}" + (": declare MatrixAxes for Muon" if len(shape) > 2 else "")
    if 0 in shape:
        return "no elements"
    if tied:
        return "tied: it stands in two places"
    if what := _vector_by_name(name):
        return f"{what}, by its name"
    if stack:
        return f"a vector of each of {shape[0]} layers, as '{stack}' is"
    return next((why for pattern, why in _BY_NAME if any(map(pattern.search, name.split("/")))), "")
