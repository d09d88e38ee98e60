"""Advice that is logged once in a process."""

import dataclasses
import functools
import logging

_LOG = logging.getLogger("halfstep_torch")


@dataclasses.dataclass(frozen=True)
class Advice:
    """Advice with numbers that differ between steps, logged once for all of them.

    Attributes:
        about: the topic, unique to this advice.
        text: the logged text.
    """

    about: str
    text: str = dataclasses.field(compare=False)


@functools.cache
def say_once(message: str | Advice) -> None:
    """Log a message at warning level, once in a process."""
    _LOG.warning(message.text if isinstance(message, Advice) else message)
