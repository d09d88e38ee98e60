"""Actions around the batches of a step, for arrays in other processes or on another device."""

from collections.abc import Sequence
from typing import Any


class Action:
    """The base of actions; every method does nothing.

    Attributes:
        slots: for which there is something to do.
    """

    slots: Sequence[Any] = ()  # of parts, where a class deals with parts alone

    def bring(self) -> None:
        """Bring the tensors that numbers depend on."""

    def end(self) -> None:
        """Copy results back."""

    def forget(self) -> None:
        """Drop the tensors that were brought, whether the step succeeded or not."""
