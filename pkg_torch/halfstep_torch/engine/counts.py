"""The counts of an optimizer's parameters, in one array so that all are incremented at once.

    numbers   3 | 3 | 17 | ...       one int64 array of NumPy
              |   |    |
    state["step"] of each parameter: a 0-d tensor of torch in the memory of its number

Each tensor has its own storage of 8 bytes, so files, pickles and copies do not contain the whole array.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.leaves.checks import LAST_STEP

_BYTES = 8


class Counts:
    """The array of an optimizer, and the parameters with a number there."""

    def __init__(self) -> None:
        self._numbers, self._free = np.zeros(1, np.int64), 0
        self._start = self._numbers.ctypes.data

    def of(
        self, tensors: Mapping[int, Tensor], length: int, states: Iterable[object], room: int
    ) -> "SomeCounts":
        """Return the counts of some parameters, moved into the array if possible.

        A tensor stays the same object. A tensor that is read at its address elsewhere is not moved.

        Args:
            tensors: the counts, by the parameters' indices.
            length: the number of indices.
            states: the states of all parameters. If the array is full, their counts move to a new one too.
            room: the minimum length of a new array.
        """
        coming = [x for x in tensors.values() if self._place(x) < 0]
        coming = list({id(x): x for x in coming if _is_movable(x)}.values())
        if self._free + len(coming) >= len(self._numbers):
            held = (state.get("step") for state in states if isinstance(state, dict))
            coming = list({id(x): x for x in (*held, *coming) if _is_movable(x)}.values())
            self._numbers, self._free = np.zeros(max(room, len(coming)) + 1, np.int64), 0
            self._start = self._numbers.ctypes.data
        for place, count in enumerate(coming, self._free):
            self._numbers[place] = count.item()
            count.data = torch.from_numpy(self._numbers[place : place + 1].reshape(()))
        self._free += len(coming)
        places = np.full(length, -1, np.intp)
        places[[*tensors]] = [self._place(x) for x in tensors.values()]
        return SomeCounts(self._numbers, places, [(i, tensors[i]) for i in tensors if places[i] < 0])

    def _place(self, count: Tensor) -> int:
        """Return the place of a count in the array, or -1 if it is not there."""
        # Other tensors may have no address.
        distance = count.data_ptr() - self._start if type(count) is Tensor else -1
        return distance // _BYTES if 0 <= distance < self._numbers.nbytes else -1


class SomeCounts:
    """The counts of some parameters, by the parameters' indices."""

    def __init__(self, numbers: np.ndarray, places: np.ndarray, apart: Sequence[tuple[int, Tensor]]) -> None:
        # Counts outside of the array have the place of its last number.
        self._numbers, self._places, self._apart = numbers, places, apart

    def next(self) -> np.ndarray:
        """Return the counts after the next step, at most the last one (contract W5)."""
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
    """Whether a count is in its own CPU memory, read by this process only."""
    return (
        type(count) is Tensor
        and count.dtype == torch.int64
        and not count.dim()
        and count.device.type == "cpu"
        and count.untyped_storage().nbytes() == _BYTES
        and not (count.is_shared() or count.is_inference())
    )
