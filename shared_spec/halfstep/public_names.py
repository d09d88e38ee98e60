"""Public names of a package, as pickles, safe-loading lists and messages have them."""

from collections.abc import Iterable, Mapping


def name_by_package(members: Mapping[str, object], names: Iterable[str]) -> None:
    """Let the classes of a package name it as their module, in place of a private one.

    Args:
        members: of the package: its `globals()`.
        names: of what is public.
    """
    package = str(members["__name__"])
    for name in names:
        if isinstance(kind := members[name], type) and kind.__module__.startswith(f"{package}."):
            kind.__module__ = package
