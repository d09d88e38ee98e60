"""The choice of weights that are cast to 16 bits, and of dtypes for norms and embeddings."""

import re

from halfstep.did_you_mean import did_you_mean

CHOICES = ("bfloat16", "float32", "split16")
"""Choices for a kind of weight: cast, left in float32, or cast with 16 further bits in the optimizer."""
_KINDS = {"norms": re.compile(r"norm|^ln(_|\d|$)|^bn\d*$"), "embeddings": re.compile(r"embed|^w[tp]e$")}


def checked_choices(caller: str, **choices: str) -> dict[str, str]:
    """Return the choices for norms and embeddings, and raise ValueError for an unknown choice."""
    for name, choice in choices.items():
        if choice not in CHOICES:
            meant = did_you_mean(choice, CHOICES)
            raise ValueError(
                f'{caller}: {name}={choice!r} is no choice. {meant}Use "bfloat16", "float32" or "split16".'
            )
    return choices


def kind_of(words: list[str]) -> str:
    """Return "norms", "embeddings" or "", given the names of a weight's modules, with the innermost last.

    Example:
        >>> kind_of(["layers_0", "LayerNorm_1"]), kind_of(["wte"]), kind_of(["attention", "query"])
        ('norms', 'embeddings', '')
    """
    for word in reversed(words):
        for kind, pattern in _KINDS.items():
            if pattern.search(word.lower()):
                return kind
    return ""
