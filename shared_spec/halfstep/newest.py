"""The newest tested versions of frameworks, and the message for newer ones.

A newer framework usually works. But steps in JAX use its points of extension, which any release may change.
"""

import functools
import logging
import re

from halfstep.version import __version__

NEWEST = {"jax": "0.10.2", "torch": "2.13.0"}
"""By framework; `constraints.txt` pins the same."""


def note(framework: str, version: str) -> str:
    """Return what to know of a version of a framework: "" unless it is newer than what the tests ran with.

    Example:
        >>> note("torch", "2.13.0+cpu"), note("torch", "2.14.0")[:32]
        ('', 'torch 2.14.0 is newer than 2.13.')
    """
    newest = NEWEST[framework]
    if _parts(version) <= _parts(newest):
        return ""
    return (
        f"{framework} {version} is newer than {newest}, the newest that halfstep {__version__} was tested "
        "with. `python -m halfstep` compares steps here with the reference."
    )


@functools.cache
def say_if_newer(framework: str, version: str) -> None:
    """Log the note of a version, if it has one, once in a process and at the level of warnings."""
    if said := note(framework, version):
        logging.getLogger(f"halfstep_{framework}").warning(said)


def _parts(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; of "2.14.0a1+cu130" (2, 14, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
