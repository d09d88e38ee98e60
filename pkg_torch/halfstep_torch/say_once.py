"""What is said once: advice that no error and no warning should carry, in the log of this package."""

import functools
import logging

_LOG = logging.getLogger("halfstep_torch")


@functools.cache
def say_once(message: str) -> None:
    """Log a message at the level of warnings, unless that was done before in this process."""
    _LOG.warning(message)
