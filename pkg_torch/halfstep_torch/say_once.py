"""Advice that is logged once in a process."""

import functools
import logging

_LOG = logging.getLogger("halfstep_torch")


@functools.cache
def say_once(message: str) -> None:
    """Log a message at warning level, once in a process."""
    _LOG.warning(message)
