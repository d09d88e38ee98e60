"""What steps parameters that are whole in this process: nothing is exchanged with others."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.engine.run import run_batch
from halfstep_torch.engine.slots import Slot, count, whole_slot


class WholeStep:
    """How parameters are stepped; `ShardedStep` says what else is to be done where some are DTensors."""

    def slots_of(self, group: ReadGroup, name: str, param: Tensor) -> Sequence[Slot]:
        """Return the slots of a parameter of a group."""
        return [whole_slot(param, name, group.plan(name, param))]

    def agreed_batches(
        self, params: Iterable[Tensor], batches: Sequence[Batch]
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context that makes batches, for a step that all processes make."""
        return contextlib.nullcontext()

    def agreed(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context, with the last that can fail, that fails in all processes if it does in any."""
        return contextlib.nullcontext()

    def any_of(self, here: bool) -> bool:
        """Return whether it is so in any process."""
        return here

    def exchanged(self, batches: Sequence[Batch]) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which gradients are where weights are stepped."""
        return contextlib.nullcontext()

    def run(self, batches: Sequence[Batch]) -> None:
        """Step the batches, and count each as it ends: weights, state and counts change."""
        for batch in batches:
            run_batch(batch)
            count(batch.slots)
