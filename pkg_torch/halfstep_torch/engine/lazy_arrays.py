"""Arrays that are computed in pieces when they are read, for rules with means of a whole parameter.

A mean reads the whole array once, in the order of contract M3, and keeps a piece for each level of its sum.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.means import mean
from halfstep_torch.numbers.op import TorchOp

Operand = Any
"""A lazy array, a tensor of one element, or a number."""


def piece_length(device: torch.device) -> int:
    """Return the number of elements read at once. On a CPU about ten such arrays fit a cache."""
    return 1 << 15 if device.type == "cpu" else 1 << 22


class NotLazy(Exception):
    """Raised if a rule needs a whole array at once."""


class LazyArray:
    """A float32 array with slices of the first axis computed when they are read.

    Small arrays, such as means along an axis, are computed at once.
    """

    __slots__ = ("_args", "_function", "_of_whole", "device", "known", "shape")

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        function: Callable,
        args: Sequence[Operand] = (),
        known: Tensor | None = None,
    ) -> None:
        self.shape, self.device, self.known = torch.Size(shape), device, known
        self._function, self._args = function, args

    def rows(self, start: int, stop: int, made: dict[int, Tensor] | None = None) -> Tensor:
        """Return a slice of the first axis, or all of it if its length is 1, as for each row."""
        made = {} if made is None else made
        if id(self) not in made:
            if self.known is not None:
                made[id(self)] = self.known if self.shape[0] == 1 else self.known[start:stop]
            elif not self._args:
                made[id(self)] = self._function(start, stop)
            else:
                args = (x.rows(start, stop, made) if isinstance(x, LazyArray) else x for x in self._args)
                made[id(self)] = self._function(*args)
        return made[id(self)]

    def flat(self, start: int, stop: int) -> Tensor:
        """Return a range of the array in row-major order."""
        width = math.prod(self.shape[1:])
        first = start // width
        return self.rows(first, -(-stop // width)).reshape(-1)[start - first * width : stop - first * width]

    def __getitem__(self, place: slice) -> Tensor:
        return self.flat(place.start, place.stop)

    def reshape(self, *_: int) -> "LazyArray":
        """Return the array, which is indexed in row-major order."""
        return self

    def __add__(self, other: Operand) -> "LazyArray":
        return lazily(torch.add, self, other)

    def __sub__(self, other: Operand) -> "LazyArray":
        return lazily(torch.sub, self, other)

    def __mul__(self, other: Operand) -> "LazyArray":
        return lazily(torch.mul, self, other)

    def __truediv__(self, other: Operand) -> "LazyArray":
        return lazily(lambda x, y: x / y, self, other)

    def __rsub__(self, other: Operand) -> "LazyArray":
        return lazily(lambda x, y: y - x, self, other)

    def __rtruediv__(self, other: Operand) -> "LazyArray":
        return lazily(lambda x, y: y / x, self, other)

    def __neg__(self) -> "LazyArray":
        return lazily(torch.neg, self)

    __radd__, __rmul__ = __add__, __mul__


def lazily(function: Callable[..., Tensor], *args: Operand) -> LazyArray:
    """Return an elementwise function of arrays and numbers."""
    arrays = [x for x in args if isinstance(x, LazyArray)]
    shape = torch.broadcast_shapes(*(x.shape for x in arrays))
    if all(x.known is not None for x in arrays) and shape in [x.shape for x in arrays]:
        known = function(*(x.known if isinstance(x, LazyArray) else x for x in args))
        return LazyArray(shape, arrays[0].device, function, known=known)
    return LazyArray(shape, arrays[0].device, function, args)


class LazyOp(TorchOp):
    """The operations of a rule on lazy arrays. Other operations raise `NotLazy`."""

    def __getattribute__(self, name: str) -> Any:  # an operation, or a field
        found = super().__getattribute__(name)
        if name.startswith("_") or name in ("mean", "is_zero", "clamp"):
            return found
        if name in ("matmul", "norm", "norms_of", "norm_in_range", "apply", "power"):
            raise NotLazy(name)

        def operation(*args: Operand) -> Any:  # as the operation
            is_lazy = any(isinstance(x, LazyArray) for x in args)
            return lazily(found, *args) if is_lazy else found(*args)

        return operation

    # Any: lazy if its operand is.
    def clamp(self, x: Operand, low: Operand, high: Operand) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return minimum(maximum(x, low), high)."""
        return self.minimum(self.maximum(x, low), high)

    def mean(self, x: LazyArray, axis: int | None = None) -> LazyArray | Tensor:  # pyright: ignore
        """Return the mean along an axis, or the mean of all elements, by halves."""
        if x.known is not None:
            made = TorchOp.mean(x.known, axis)
        elif axis is None:
            made = _mean(math.prod(x.shape), x.flat, piece_length(x.device))
            return made.reshape(())
        elif axis == 0:
            made = _mean(x.shape[0], x.rows, _rows_of(x))
        else:
            parts = [mean(x.rows(*of), axis, torch.cat) for of in _ranges(x)]
            made = torch.cat(parts)
        return made if axis is None else LazyArray(made.shape, x.device, torch.clone, known=made)


def _rows_of(x: LazyArray) -> int:
    return max(piece_length(x.device) // max(math.prod(x.shape[1:]), 1), 1)


def _ranges(x: LazyArray) -> list[tuple[int, int]]:
    step = _rows_of(x)
    return [(i, min(i + step, x.shape[0])) for i in range(0, x.shape[0], step)]


def _mean(count: int, read: Callable[[int, int], Tensor], most: int) -> Tensor:
    """Return the mean along the first axis, by halves, reading at most `most` entries at once."""
    sizes = [count]
    while sizes[-1] > most:
        sizes.append((sizes[-1] + 1) // 2)

    def summed(level: int, start: int, stop: int) -> Tensor:
        """Return entries after `level` halvings, each adding the second half to the first."""
        if not level:
            return read(start, stop).clone()
        made, half = summed(level - 1, start, stop), sizes[level]
        other = start + half, min(stop + half, sizes[level - 1])
        if other[0] < other[1]:
            added = summed(level - 1, *other)
            made[: len(added)] += added
        return made

    made = summed(len(sizes) - 1, 0, sizes[-1])
    while len(made) > 1:
        half = (len(made) + 1) // 2
        added = made[: len(made) - half] + made[half:]
        made = torch.cat([added, made[len(made) - half : half]])
    return made * float(torch.tensor(1.0) / torch.tensor(float(count))) if count > 1 else made
