"""A check for required packages, with an install command in the error."""

import importlib.util


def needs(package: str, extra: str, *modules: str) -> None:
    """Raise ModuleNotFoundError with an install command if a required module is missing."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(
                f'{package} needs {name}, which is not installed. Write: pip install "halfstep[{extra}]"',
                name=name,
            )
