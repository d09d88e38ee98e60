"""The requirements of a package, and what to install if one is missing."""

import importlib.util


def needs(package: str, extra: str, *modules: str) -> None:
    """Raise ModuleNotFoundError, with the line to write, unless a package finds what it needs."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(
                f'{package} needs {name}, which is not installed. Write: pip install "halfstep[{extra}]"',
                name=name,
            )
