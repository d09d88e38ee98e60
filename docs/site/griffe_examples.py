"""A docstring's "Example:" becomes a section of code; Griffe knows the plural alone."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section in each docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename it in the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
