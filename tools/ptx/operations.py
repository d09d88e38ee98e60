"""Which function executes an instruction: the one whose form is that of the whole opcode.

A form is a regular expression, modifiers included, so what is not known here is found out and nothing is
passed over. Its named groups are arguments of the function.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

_FORMS: list[tuple[re.Pattern, Callable]] = []
# Types, for forms.
INTEGER = r"(?P<kind>[us](?:16|32|64))"
PATTERN = r"(?P<kind>b(?:16|32|64))"
FLOAT = r"(?P<kind>f16|bf16|f32|f64)"


def operation(form: str) -> Callable[[Callable], Callable]:
    """Say of a function that it executes the instructions of a form.

    Args:
        form: a regular expression. The function is given the launch, the operands, and by name what the
            groups of the form matched.
    """

    def register(function: Callable) -> Callable:
        _FORMS.append((re.compile(form), function))
        return function

    return register


@functools.cache
def operation_of(opcode: str) -> Callable[..., Any]:
    """Return the function that executes an instruction; refuse one that is not known."""
    found = [(match, function) for form, function in _FORMS if (match := form.fullmatch(opcode))]
    if len(found) != 1:
        raise NotImplementedError(f"{opcode}: {len(found)} forms match it; write one, with its golden cases")
    ((match, function),) = found
    return functools.partial(function, **match.groupdict())
