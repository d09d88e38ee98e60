"""Windows, the boxes of an array's elements in each process, from shapes only."""

import dataclasses
import functools
import math
from collections.abc import Sequence

from torch import Tensor

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """A box of an array. The window of an array that is not sharded is the whole array.

    Attributes:
        whole: the shape of the array.
        offset: the offset of the box along each axis.
        shape: the shape of the box.

    Example:
        >>> import torch
        >>> window = Window((4, 6), offset=(2, 3), shape=(2, 3))
        >>> window.run, window.skip, window.indices(torch.arange(6)).tolist()
        (3, 3, [15, 16, 17, 21, 22, 23])
    """

    whole: Shape
    offset: Shape
    shape: Shape

    @classmethod
    def full(cls, shape: Shape) -> "Window":
        """Return the window that is the whole array."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def is_full(self) -> bool:
        """Whether it is the whole array."""
        return self.shape == self.whole

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return not math.prod(self.shape)

    @functools.cached_property
    def first(self) -> int:
        """The row-major index in the array of the first element."""
        return self._index_of(self.offset)

    @functools.cached_property
    def last(self) -> int:
        """The row-major index in the array of the last element."""
        return self._index_of([start + size - 1 for start, size in zip(self.offset, self.shape, strict=True)])

    def _index_of(self, place: Sequence[int]) -> int:
        index = 0
        for i, whole in zip(place, self.whole, strict=True):
            index = index * whole + i
        return index

    @functools.cached_property
    def skip(self) -> int | None:
        """The number of elements in the array between two runs, or None if it differs."""
        cut = [i for i, (size, whole) in enumerate(zip(self.shape, self.whole, strict=True)) if size != whole]
        if not cut or math.prod(self.shape[: cut[-1]]) == 1:
            return 0
        if any(math.prod(self.shape[:i]) > 1 for i in cut[:-1]):
            return None
        return (self.whole[cut[-1]] - self.shape[cut[-1]]) * math.prod(self.whole[cut[-1] + 1 :])

    @functools.cached_property
    def run(self) -> int:
        """The number of elements in a run contiguous in window and array, 0 for an empty window."""
        run = 1
        for size, whole in zip(self.shape[::-1], self.whole[::-1], strict=True):
            run *= size
            if size != whole:
                break
        return run

    def indices(self, local: Tensor) -> Tensor:
        """Return the row-major indices in the array, int64, of elements given by indices in the window."""
        if self.is_full or self.is_empty:
            return local
        indices, rest, stride = local * 0, local, 1
        for size, whole, start in zip(self.shape[::-1], self.whole[::-1], self.offset[::-1], strict=True):
            indices = indices + (rest % size + start) * stride
            rest, stride = rest // size, stride * whole
        return indices

    @property
    def box(self) -> tuple[slice, ...]:
        """The index of the window in the array."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))
