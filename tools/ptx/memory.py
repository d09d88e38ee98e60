"""Memory of a GPU: arrays of bytes at addresses, and nothing between them."""

import bisect

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
# Of memory that nothing was written to: a number that shows in any result.
POISON = 0xA5


def poisoned(size: int) -> np.ndarray:
    """Return so many bytes that nothing was written to."""
    return np.full(size, POISON, np.uint8)


class Memory:
    """Arrays of bytes at addresses. An access past them, or at an address that is not aligned, raises."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._arrays: list[np.ndarray] = []

    def add(self, start: int, array: np.ndarray) -> None:
        """Let bytes stand at an address; the array itself is read and written."""
        at = bisect.bisect(self._starts, start)
        before = at and self._starts[at - 1] + self._arrays[at - 1].size > start
        if before or (at < len(self._starts) and start + array.size > self._starts[at]):
            raise ValueError(f"two arrays at {start:#x}")
        self._starts.insert(at, start)
        self._arrays.insert(at, array)

    def load(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """Return the numbers of so many bits at addresses."""
        values = np.empty(addresses.shape, UNSIGNED[width])
        for chosen, array, places in self._places(addresses, width):
            values[chosen] = array[places]
        return values

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Write numbers at addresses, of which several may be the same if the numbers are too."""
        for chosen, array, places in self._places(addresses, 8 * values.itemsize):
            array[places] = values[chosen]
            if (array[places] != values[chosen]).any():
                raise RuntimeError("two threads write different numbers to one address")

    def _places(self, addresses: np.ndarray, width: int):
        """Yield, for each array that is met: which addresses, the array as numbers, where in it."""
        size = width // 8
        if (addresses % np.uint64(size)).any():
            raise RuntimeError(f"an address is not aligned to {size} bytes")
        starts = np.array(self._starts, np.uint64)
        which = np.searchsorted(starts, addresses, side="right") - 1
        # Most are all in the same.
        is_same = which.size > 0 and bool((which == which[0]).all())
        for region in which[:1] if is_same else np.unique(which):
            chosen = slice(None) if is_same else which == region
            places = (addresses[chosen] - starts[region]).astype(np.int64) if region >= 0 else None
            array = self._arrays[region]
            if places is None or (places + size > array.size).any() or self._starts[region] % size:
                raise RuntimeError(f"no memory at {addresses[chosen].min():#x}")
            yield chosen, array[: array.size // size * size].view(UNSIGNED[width]), places // size
