"""Public names of a package, as pickles, safe-loading lists and messages have them."""

from collections.abc import Iterable, MutableMapping
from typing import Any


def name_by_package(members: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Let the classes of a package name it as their module, in place of a private one.

    Args:
        members: of the package: its `globals()`.
        names: of what is public.
    """
    package = members["__name__"]
    for name in names:
        if isinstance(kind := members[name], type) and kind.__module__.startswith(f"{package}."):
            kind.__module__ = package
