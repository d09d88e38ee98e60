"""What a step does around its batches, where not all of it is in this process, or on this device."""

from collections.abc import Sequence
from typing import Any

from halfstep_torch.engine.batches import Batch


class Action:
    """One of them, of a launch: it does nothing but what a class says.

    Attributes:
        slots: for which there is something to do.
    """

    slots: Sequence[Any] = ()

    def stays(self) -> bool:
        """Whether it still holds what it was made of."""
        return True

    def bring(self) -> None:
        """Bring what is read before numbers are known."""

    def begin(self) -> None:
        """Prepare for what changes weights and state from here on."""

    def before(self, batch: Batch) -> None:
        """Prepare for one batch."""

    def after(self, batch: Batch) -> None:
        """Take from a batch what is done with it."""

    def end(self) -> None:
        """Bring what was stepped to where it belongs."""

    def forget(self) -> None:
        """Let go of what was brought, whether the step was made or not."""
