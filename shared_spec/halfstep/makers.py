"""Functions that are made of a rule or of another function: their names and modules."""

import sys
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def published(function: F, name: str, docstring: str | None) -> F:
    """Return a function as one of the module that asked its maker for it, so that a pickle finds it there.

    Its maker calls this, as `link = maker(...)` stands in that module; `name` is `link`.
    """
    function.__name__ = function.__qualname__ = name
    function.__doc__ = docstring
    function.__module__ = sys._getframe(2).f_globals["__name__"]  # as `collections.namedtuple` finds it
    return function


def docstring_of(rule: Callable) -> str | None:
    """Return the docstring of a link: that of its rule in `halfstep`, from which a framework may derive."""
    return next(cls.__doc__ for cls in rule.__mro__ if cls.__module__.startswith("halfstep."))
