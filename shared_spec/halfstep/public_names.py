"""Public module names for a package's classes, as in pickles, safe-loading lists and messages."""

from collections.abc import Iterable, Mapping


def name_by_package(members: Mapping[str, object], names: Iterable[str]) -> None:
    """Set the package as the module of its public classes, instead of a private module.

    Args:
        members: the package's `globals()`.
        names: the public names.
    """
    package = str(members["__name__"])
    for name in names:
        if isinstance(kind := members[name], type) and kind.__module__.startswith(f"{package}."):
            kind.__module__ = package
