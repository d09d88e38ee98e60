"""The counts of an optimizer's parameters: numbers of one array, so that all are incremented at once.

    numbers   3 | 3 | 17 | ...       one int64 array of NumPy
              |   |    |
    state["step"] of each parameter: a 0-d tensor of torch in the memory of its number

Each tensor has a storage of its own, of 8 bytes: files, pickles and copies hold no more of the array.
"""

from collections.abc import Iterable, Sequence
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.leaves.checks import LAST_STEP

_BYTES = 8


class Counts:
    """The array of an optimizer, and which parameters have a number there."""

    def __init__(self) -> None:
        self._numbers, self._free = np.zeros(1, np.int64), 0

    def of(self, tensors: Sequence[Tensor], states: Iterable[object], room: int) -> "SomeCounts":
        """Return the counts of some parameters, which are moved into the array if they can be.

        A tensor stays the same object. One that others may read at its address stays where it is.

        Args:
            tensors: the counts.
            states: of all parameters. Their counts too move into a new array if the old one is full.
            room: how many numbers a new array has at least.
        """
        coming = [x for x, place in zip(tensors, self._places(tensors), strict=True) if place is None]
        coming = list({id(x): x for x in coming if _is_movable(x)}.values())
        if self._free + len(coming) >= len(self._numbers):
            held = (state.get("step") for state in states if isinstance(state, dict))
            coming = list({id(x): x for x in (*held, *coming) if _is_movable(x)}.values())
            self._numbers, self._free = np.zeros(max(room, len(coming)) + 1, np.int64), 0
        for place, count in enumerate(coming, self._free):
            self._numbers[place] = count.item()
            count.data = torch.from_numpy(self._numbers[place : place + 1].reshape(()))
        self._free += len(coming)
        return SomeCounts(self._numbers, self._places(tensors), tensors)

    def _places(self, tensors: Iterable[Tensor]) -> list[int | None]:
        """Return where in the array each count is; None for one that is elsewhere."""
        start, stop = self._numbers.ctypes.data, self._numbers.ctypes.data + self._numbers.nbytes
        at = [x.data_ptr() if type(x) is Tensor else 0 for x in tensors]  # others may have no address
        return [(x - start) // _BYTES if start <= x < stop else None for x in at]


class SomeCounts:
    """The counts of some parameters, by the parameters' indices."""

    def __init__(self, numbers: np.ndarray, places: Sequence[int | None], tensors: Sequence[Tensor]) -> None:
        # Of those that have no number in the array, the last number takes the place.
        self._numbers, self._places = numbers, np.array([-1 if x is None else x for x in places], np.intp)
        self._apart = [(i, tensors[i]) for i, place in enumerate(places) if place is None]

    def next(self) -> np.ndarray:
        """Return the counts after the next step, which stop at the last (contract W5)."""
        counts = self._numbers[self._places]
        for i, tensor in self._apart:
            counts[i] = tensor.item()
        return np.minimum(counts + 1, LAST_STEP)

    def set(self, counts: np.ndarray, indices: np.ndarray) -> None:
        """Set the counts at some indices."""
        self._numbers[self._places[indices]] = counts[indices]
        for i, tensor in self._apart:
            if i in indices:
                tensor.fill_(int(counts[i]))


def _is_movable(count: object) -> TypeGuard[Tensor]:
    """Whether a count is in memory of its own, on the CPU, that only this process reads."""
    return (
        type(count) is Tensor
        and count.dtype == torch.int64
        and not count.dim()
        and count.device.type == "cpu"
        and count.untyped_storage().nbytes() == _BYTES
        and not (count.is_shared() or count.is_inference())
    )
