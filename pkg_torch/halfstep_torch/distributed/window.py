"""Windows: the box of an array's elements that a process holds. Shapes only."""

import dataclasses
import functools
import math

from torch import Tensor

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """A box of an array. The window of an array that is not sharded is the whole array.

    Attributes:
        whole: the shape of the array.
        offset: of the box, along each axis.
        shape: of the box.

    Example:
        >>> import torch
        >>> window = Window((4, 6), offset=(2, 3), shape=(2, 3))
        >>> window.run, window.indices(torch.arange(6)).tolist()
        (3, [15, 16, 17, 21, 22, 23])
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
        """Whether no element is here."""
        return not math.prod(self.shape)

    @functools.cached_property
    def run(self) -> int:
        """The number of elements in a run that is contiguous in window and array; 0 in an empty window."""
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
