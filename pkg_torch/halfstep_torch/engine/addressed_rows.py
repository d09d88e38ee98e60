"""Rows of many parameters in their own memory, all stepped by one call, which is told where they are."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from halfstep_torch.engine.cpp_loop import LONGEST, Table
from halfstep_torch.engine.rows import Slot, kernel_dtype
from halfstep_torch.engine.stage import Stage

# Columns of addresses: weights, what comes in, and the update if the stage leaves one. State follows.
_P, _G, _U = range(3)


class AddressedRows:
    """Whole parameters, each as rows of a stage's width and what is left over.

    Attributes:
        table: for a loop in C++. What comes in and the updates are in it from `load` to the end of a step.
    """

    def __init__(
        self, stage: Stage, places: Sequence[int], slots: Sequence[Slot], grad_dtype: torch.dtype
    ) -> None:
        self._places = places
        own = [slots[place] for place in places]
        longest = LONGEST * stage.width
        pieces = [
            (row, place, first, min(longest, slots[place].param.numel() - first))
            for row, place in enumerate(places)
            for first in range(0, slots[place].param.numel(), longest)
        ]
        fixed = [[slot.param.data_ptr(), 0, *([] if stage.lands else [0])] for slot in own]
        state = [[slot.state[name].data_ptr() for name in stage.arrays] for slot in own]
        update = [] if stage.lands else [(torch.float32, True)]
        kept = [(spec.dtype, True) for spec in stage.arrays.values()]
        kinds = [(stage.dtype, stage.lands), (grad_dtype, False), *update, *kept]
        self.table = Table(
            pieces=_int64(pieces),
            addresses=_int64([[*a, *b] for a, b in zip(fixed, state, strict=True)]),
            itemsizes=_int64([dtype.itemsize for dtype, _ in kinds]),
            written=_int64([written for _, written in kinds]),
        )

    def load(self, incoming: Mapping[int, Tensor], outgoing: Mapping[int, Tensor] | None) -> None:
        """Note where everything is that is elsewhere at every step.

        Args:
            incoming: of each slot, its gradient or the update of the stage before.
            outgoing: of each slot, where the update of this stage goes; None where it changes the weights.
        """
        self._set(_G, incoming)
        if outgoing is not None:
            self._set(_U, outgoing)

    def _set(self, kind: int, arrays: Mapping[int, Tensor]) -> None:
        self.table.addresses[:, kind] = _int64([arrays[place].data_ptr() for place in self._places])

    def write_back(self, outgoing: Mapping[int, Tensor] | None) -> None:
        """Nothing was copied."""


def _int64(x: Sequence) -> Tensor:
    return torch.tensor(x, dtype=torch.int64, device="cpu")


def is_addressable(slot: Slot, stage: Stage) -> bool:
    """Return whether a parameter is rows in its own memory, as the kernel of a stage wants them.

    With scales it is not: they would be rows of another width. Nor is it from 2^32 elements on, whose indices
    have a high half.
    """
    specs = stage.arrays.values()
    return (
        0 < slot.param.numel() < 1 << 32
        and slot.param.is_contiguous()
        and slot.grad.is_contiguous()
        and not any(spec.scale_of or spec.packed_of for spec in specs)
        and all(kernel_dtype(spec.dtype, slot.param.device) == spec.dtype for spec in specs)
    )
