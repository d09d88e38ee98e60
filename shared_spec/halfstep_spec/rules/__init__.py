"""The transforms. `RULES` lists all that keep moments: a new rule is a new file here and nothing else."""

import importlib
import pkgutil
from collections.abc import Iterator

from halfstep_spec.rule import Rule


def _rules() -> Iterator[tuple[str, type[Rule]]]:
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        for kind in vars(module).values():
            defined_here = isinstance(kind, type) and kind.__module__ == module.__name__
            if defined_here and issubclass(kind, Rule) and kind.declared():
                yield entry.name, kind


RULES: dict[str, type[Rule]] = dict(_rules())
"""By the name of its file: every rule that declares moments."""
