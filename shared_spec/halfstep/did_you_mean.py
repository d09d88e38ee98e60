"""Suggestions for misspelled words."""

import difflib
from collections.abc import Iterable

# Names in other libraries for a dtype, a recipe, or a weight storage.
_MEANT = {
    **dict.fromkeys(("bf16", "bfloat", "bfloat16"), ("bfloat16", "sixteen_bit")),
    **dict.fromkeys(("fp16", "f16", "half", "float16", "16bit"), ("float16", "sixteen_bit")),
    **dict.fromkeys(
        ("fp32", "f32", "float", "single", "float32", "32bit"), ("float32", "full_precision", "master")
    ),
    **dict.fromkeys(
        ("fp8", "float8", "e4m3", "e4m3fn", "8bit", "int8", "uint8", "mxfp8", "float8e4m3fn"),
        ("float8_e4m3fn", "ufloat8_e5m3", "eight_bit"),
    ),
    "e5m2": ("float8_e5m2", "eight_bit"),
    **dict.fromkeys(("4bit", "int4", "fp4", "nf4", "mxfp4", "nvfp4"), ("four_bit",)),
    **{"kahan": ("compensated",), "sr": ("stochastic",), "rne": ("nearest",)},
}


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """Return a question and a space, or "" if no name is similar.

    Example:
        >>> did_you_mean("one-pass", ["one_pass"]), did_you_mean("fp8", ["eight_bit"])
        ('Did you mean "one_pass"? ', 'Did you mean "eight_bit"? ')
        >>> did_you_mean("x", ["one_pass"])
        ''
    """
    if not isinstance(given, str):
        return ""
    known, word = list(names), given.lower().replace("-", "_").replace(" ", "_")
    near = [meant for meant in _MEANT.get(word.replace("_", ""), ()) if meant in known]
    near = near or difflib.get_close_matches(word, known, 1, 0.6)
    return f'Did you mean "{near[0]}"? ' if near else ""


def listed(names: Iterable[str]) -> str:
    """Return names as a sentence lists them."""
    *others, last = (f'"{name}"' for name in names)
    return f"{', '.join(others)} or {last}"
