"""The numbers and keys of a step as functions of counts on a device, without the host.

They have the bits of `NumbersOp` and `leaf_keys`, which compute on the host. Each parameter has a row, so
tensors have the shape (parameters, 1), or (parameters, steps) for coming steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.numbers import LaterCount, Mask, Number, Operand
from halfstep.op import NumbersOp
from halfstep.random_words import threefry2x32
from halfstep_torch.numbers import exact
from halfstep_torch.numbers.arrays import XP
from halfstep_torch.numbers.moments import bias_corrections


class TensorNumbersOp(NumbersOp):
    """The operations of a rule's `numbers` on tensors.

    Args:
        rule: the name of the rule, for messages.
        coming: 1, 2, ... up to the largest number of coming steps that a rule reads, for each parameter.

    Raises:
        NotImplementedError: from an operation that only the host has, such as a power.
    """

    framework = torch
    root = staticmethod(exact.sqrt)  # pyright: ignore[reportAssignmentType]
    quotient = staticmethod(torch.div)  # pyright: ignore[reportAssignmentType]

    def __init__(self, rule: str, coming: Tensor) -> None:
        super().__init__(rule)
        self._coming = coming

    def as_scalar(self, x: object) -> Tensor | None:
        """Return a number of Python or NumPy as a float32 tensor, or None for other objects."""
        if isinstance(x, (int, float, np.integer, np.floating)):
            return torch.full((), float(x), dtype=torch.float32, device=self._coming.device)
        return None

    def power(self, x: Operand, y: Operand) -> Number:
        """Raise NotImplementedError, because no device has the host's bits."""
        raise NotImplementedError(f"{self.rule} takes a power on the host")

    def unbias(self, *pairs: tuple[Operand, "TensorCount"], steps: int = 1) -> tuple[Number, ...]:
        """Return 1 / (1 - rate^t) for each pair (rate, t), for the last pair at `steps` counts."""
        counts = [t.value for _, t in pairs]
        if steps > 1:
            counts[-1] = counts[-1] + (self._coming[:, :steps] - 1).to(torch.int64)
        of_rates = zip((self.bare(rate) for rate, _ in pairs), counts, strict=True)
        return tuple(1 / self.wrap(bias_corrections(*of_rate)) for of_rate in of_rates)

    def coming(self, field: str, steps: int) -> None:
        """Return None, because no field has a schedule."""
        return

    def steps(self, steps: int) -> Number:
        """Return 1, 2, ... up to a number of steps."""
        return self.wrap(self._coming[:, :steps])

    def halves(self, x: Number) -> tuple[Number, Number]:
        """Return every second number of a parameter from the first on, and the others."""
        array = self.bare(x)
        return self.wrap(array[:, ::2]), self.wrap(array[:, 1::2])

    def float32(self, x: Any) -> Number:  # an object with an array as its value
        """Return a count, or the truth of a comparison, as a number."""
        return self.wrap(x.value.to(torch.float32))


class TensorCount(LaterCount):
    """The counts of a step in `numbers`: t + 1, t - 1, t % 10, and comparisons.

    Attributes:
        value: int64.
    """

    def __init__(self, value: Tensor, op: TensorNumbersOp) -> None:
        self.value, self._op = value, op

    def __add__(self, k: int) -> "TensorCount":
        return TensorCount(self.value + k, self._op)

    def __mod__(self, k: int) -> "TensorCount":
        return TensorCount(self.value % k, self._op)

    def _compare(self, how: Callable, k: int) -> Mask:
        return Mask(how(self.value, k), self._op)


class _Words:
    """int32 patterns under the operations of uint32, as `threefry2x32` needs them."""

    __array_ufunc__ = None

    def __init__(self, bits: Tensor) -> None:
        self.bits = bits

    def __add__(self, other: object) -> "_Words":
        return _Words(self.bits + _bits(other))

    def __xor__(self, other: object) -> "_Words":
        return _Words(self.bits ^ _bits(other))

    def __or__(self, other: object) -> "_Words":
        return _Words(self.bits | _bits(other))

    def __lshift__(self, by: int) -> "_Words":
        return _Words(self.bits << int(by))

    def __rshift__(self, by: int) -> "_Words":
        return _Words(XP.shift(self.bits, int(by)))


def _bits(x: Any) -> Any:  # a tensor, or a number as int32
    return x.bits if isinstance(x, _Words) else int(np.uint32(x).view(np.int32))


def tensor_keys(seed: Sequence[Tensor], steps: Tensor, leaf: Tensor, roles: Sequence[int]) -> list[Tensor]:
    """Return the columns of `leaf_keys` as int32: k0, and k1 of each role (contract W4).

    Args:
        seed: the high and the low word of the seed, int32.
        steps: the counts, int64.
        leaf: the ids, int32.
        roles: the roles, the same for every leaf.
    """
    zero = _Words(torch.zeros_like(leaf))

    def fold(key: tuple[Any, Any], x: _Words) -> tuple[Any, Any]:  # words of the host or of the device
        return threefry2x32(key, (zero, x))

    high, low = map(_Words, seed)
    key = fold(fold((high, low), _Words(steps.to(torch.int32))), _Words(leaf))
    return [(key[0] | 1).bits, *(fold(key, zero | role)[1].bits for role in roles)]
