"""Names and modules for functions that are made from a rule or another function."""

import sys
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def published(function: F, name: str, docstring: str | None) -> F:
    """Return a function as a member of the module that called its maker, so that a pickle finds it there.

    The module has `link = maker(...)`, the maker calls this function, and `name` is "link".
    """
    function.__name__ = function.__qualname__ = name
    function.__doc__ = docstring
    function.__module__ = sys._getframe(2).f_globals["__name__"]  # as `collections.namedtuple` finds it
    return function


def docstring_of(rule: Callable) -> str | None:
    """Return a link's docstring from its rule in `halfstep`, of which a framework may have a subclass."""
    return next(cls.__doc__ for cls in rule.__mro__ if cls.__module__.startswith("halfstep."))
