"""Which questions the golden vectors ask, and why.

One module per subject; inputs are chosen here and nowhere else. A module's function `x_cases` returns the
cases of x.json, and `cases` those of the file with the module's own name; `NOTES` explains their flags.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator

from halfstep_spec.vectors import Case

Cases = Callable[[], Iterable[Case]]


def _files() -> Iterator[tuple[str, tuple[dict[str, str], Cases]]]:
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        for function, make in vars(module).items():
            if re.fullmatch("([a-z].*_)?cases", function) and make.__module__ == module.__name__:
                yield function.removesuffix("cases").removesuffix("_") or entry.name, (module.NOTES, make)


FILES: dict[str, tuple[dict[str, str], Cases]] = dict(_files())
"""By file: the meaning of its flags, and the function that returns its cases."""
