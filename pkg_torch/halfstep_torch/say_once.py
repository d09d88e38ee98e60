"""Advice that is logged once in a process."""

import dataclasses
import functools
import logging

_LOG = logging.getLogger("halfstep_torch")


@dataclasses.dataclass(frozen=True)
class Advice:
    """Advice with numbers that change from step to step: it is logged once, whatever they are.

    Attributes:
        about: what it is about, as no other advice.
        text: what is logged.
    """

    about: str
    text: str = dataclasses.field(compare=False)


@functools.cache
def say_once(message: str | Advice) -> None:
    """Log a message at warning level, once in a process."""
    _LOG.warning(message.text if isinstance(message, Advice) else message)
