"""The right word for one that is nearly right."""

import difflib
from collections.abc import Iterable
from typing import Any

_SHORT = {
    **{"bf16": "bfloat16", "bfloat": "bfloat16", "fp16": "float16", "half": "float16", "f16": "float16"},
    **{"fp32": "float32", "f32": "float32", "float": "float32", "single": "float32"},
    **{"fp8": "float8_e4m3fn", "float8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"},
    **{"4bit": "four_bit", "8bit": "eight_bit", "16bit": "sixteen_bit", "32bit": "full_precision"},
}


def did_you_mean(given: Any, names: Iterable[str]) -> str:
    """Return a question with a space behind it, or "" where no name is near.

    Example:
        >>> did_you_mean("one-pass", ["one_pass"]), did_you_mean("8-bit", ["eight_bit"])
        ('Did you mean "one_pass"? ', 'Did you mean "eight_bit"? ')
        >>> did_you_mean("x", ["one_pass"])
        ''
    """
    if not isinstance(given, str):
        return ""
    known, word = list(names), given.lower().replace("-", "_").replace(" ", "_")
    short = _SHORT.get(word.replace("_", ""))
    near = [short] if short in known else difflib.get_close_matches(word, known, 1, 0.6)
    return f'Did you mean "{near[0]}"? ' if near else ""
