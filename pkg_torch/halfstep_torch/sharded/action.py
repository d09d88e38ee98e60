"""Actions around the batches of a step, for arrays in other processes or on another device."""

from collections.abc import Sequence
from typing import Any

from halfstep_torch.engine.batches import Batch


class Action:
    """The base of actions; every method does nothing.

    Attributes:
        slots: for which there is something to do.
    """

    slots: Sequence[Any] = ()  # of parts, where a class deals with parts alone

    def stays(self) -> bool:
        """Whether the action still fits its launch."""
        return True

    def bring(self) -> None:
        """Bring what numbers depend on."""

    def begin(self) -> None:
        """Prepare for the batches: from here on weights and state change."""

    def before(self, batch: Batch) -> None:
        """Prepare for one batch."""

    def after(self, batch: Batch) -> None:
        """Finish one batch."""

    def end(self) -> None:
        """Copy results back."""

    def forget(self) -> None:
        """Drop what was brought, whether the step succeeded or not."""
