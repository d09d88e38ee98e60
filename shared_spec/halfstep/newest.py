"""The newest tested versions of frameworks, and the message for newer ones.

A newer framework usually works. But steps in JAX use extension points, which any release may change.
"""

import functools
import logging
import re

from halfstep.version import __version__

NEWEST = {"jax": "0.10.2", "torch": "2.13.0"}
"""Versions by framework, as pinned in `constraints.txt`."""


def note(framework: str, version: str) -> str:
    """Return a note about a framework's version if it is newer than the tested versions, else "".

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
    """Log the note about a version as a warning, once in a process, if there is one."""
    if said := note(framework, version):
        logging.getLogger(f"halfstep_{framework}").warning(said)


def _parts(version: str) -> tuple[int, ...]:
    """Return the numbers in a release, such as (2, 14, 0) for "2.14.0a1+cu130"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
