"""The operations of a rule in torch, on bare tensors in a step and on guarded numbers in the trial.

torch rounds every operation once, in eager mode and in compiled code, so a step needs no wrapper. In the
trial, operations that would fail in JAX or in a later step raise an error.
"""

import math
import operator
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from halfstep.arrays import Array
from halfstep.hyperparameters import Scalar, Values
from halfstep.means import mean
from halfstep.numbers import Number, Operand
from halfstep.op import Op
from halfstep_torch.numbers import exact, moments
from halfstep_torch.numbers.global_norm import global_norms
from halfstep_torch.numbers.moments import DecayRate
from halfstep_torch.numbers.norms import in_range, norms
from halfstep_torch.numbers.schedules import Scheduled

BareOperand: TypeAlias = Tensor | float
"""Operand in a step, where nothing is wrapped."""
T = TypeVar("T")


class TorchOp:
    """The operations of `halfstep.op.Op` on float32 tensors. A step's numbers are floats or 0-d tensors."""

    sqrt = staticmethod(exact.sqrt)
    sign = staticmethod(exact.sign)
    abs = staticmethod(torch.abs)
    where = staticmethod(torch.where)
    matmul = staticmethod(torch.matmul)
    isfinite = staticmethod(torch.isfinite)

    @staticmethod
    def ema(average: Tensor, value: Tensor, rate: Array) -> Tensor:
        """Return (rate average) + ((1 - rate) value)."""
        return moments.ema(average, value, rate if isinstance(rate, DecayRate) else DecayRate(rate, 1 - rate))

    @staticmethod
    def maximum(x: BareOperand, y: BareOperand) -> Tensor:
        """Return the larger of both."""
        return _extremum(torch.maximum, "min", x, y)

    @staticmethod
    def minimum(x: BareOperand, y: BareOperand) -> Tensor:
        """Return the smaller of both."""
        return _extremum(torch.minimum, "max", x, y)

    @classmethod
    def clamp(cls, x: Tensor, low: BareOperand, high: BareOperand) -> Tensor:
        """Return minimum(maximum(x, low), high)."""
        if isinstance(low, float) and isinstance(high, float):
            return torch.clamp(x, low, high)
        return cls.minimum(cls.maximum(x, low), high)

    @staticmethod
    def power(x: Tensor, y: BareOperand) -> Tensor:
        """Return x^y. For numbers, such as norms, the bits are the same everywhere."""
        if isinstance(y, float) and y == 1:
            return x
        return torch.pow(x, y) if x.dim() else exact.power(x, y)

    @staticmethod
    def mean(x: Tensor, axis: int | None = None) -> Tensor:
        """Return the mean along an axis, or the mean of all elements, by halves."""
        return mean(x, axis, torch.cat)

    def norms_of(self, x: Tensor, exact: bool) -> Tensor:
        """Return the norm of the whole array, and the norm of 2^-64 times it."""
        return global_norms([x], exact=True) if exact else norms(x)

    def norm(self, x: Tensor, exact: bool = False) -> Tensor:
        """Return the norm of the whole array."""
        return self.norms_of(x, exact)[0]

    def norm_in_range(self, x: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
        """Return the norm of s x, and s."""
        return in_range(self.norms_of(x, exact))

    @staticmethod
    def scaled(x: Tensor, ratio: BareOperand, scale: BareOperand = 1.0) -> Tensor:
        """Return ratio (scale x)."""
        return (x if _is_one(scale) else x * scale) * ratio

    @staticmethod
    def is_zero(field: object) -> bool:
        """Return False, because a param group may change any number."""
        return False

    @staticmethod
    def apply(function: Callable[..., T], *xs: BareOperand) -> T:
        """Return function(*xs)."""
        return function(*xs)


class InPlaceOp(TorchOp):
    """The same for whole parameters, writing into the memory of the incoming update."""

    @staticmethod
    def scaled(x: Tensor, ratio: BareOperand, scale: BareOperand = 1.0) -> Tensor:
        """Return ratio (scale x) in the memory of x, without a second array of the parameter's size."""
        return (x if _is_one(scale) else x.mul_(scale)).mul_(ratio)


STEP_OPS = {"elementwise": TorchOp(), "parameter": InPlaceOp()}
"""Operations of `update` in a step, by the scope of its rule."""


def _is_one(scale: BareOperand) -> bool:
    """Whether a number is known to be 1 without waiting for a GPU."""
    if isinstance(scale, Tensor):
        return scale.device.type == "cpu" and bool((scale == 1).all())
    return scale == 1


def _extremum(function: Callable, bound: str, x: Array, y: Array) -> Tensor:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return function(x, y)
    array, number = (x, y) if isinstance(x, Tensor) else (y, x)
    return torch.clamp(array, **{bound: number})


class NumbersOp:
    """The operations of a rule's `numbers`: NumPy's, on float32 scalars on the host.

    Args:
        values: the values of the rule's fields, by name, with schedules.
        step: the count of the step.
    """

    def __init__(self, values: Values = None, step: int = 0):
        self._values, self._step = values, step

    sqrt, abs, sign, isfinite = np.sqrt, np.abs, np.sign, np.isfinite
    maximum, minimum, power = np.maximum, np.minimum, np.power

    def where(self, mask: bool, x: Scalar, y: Scalar) -> np.float32:
        """Return x if the comparison holds, else y."""
        return np.float32(x if mask else y)

    def clamp(self, x: Scalar, low: Scalar, high: Scalar) -> np.float32:
        """Return minimum(maximum(x, low), high)."""
        return np.minimum(np.maximum(x, low), high)

    def unbias(self, *pairs: tuple[Scalar, int], steps: int = 1) -> tuple[np.ndarray | np.float32, ...]:
        """Return the bias correction 1 / (1 - rate^t) of each pair (rate, t) (contract M2)."""
        *inverses, last = [np.float32(1) / moments.bias_correction(rate, t) for rate, t in pairs]
        if steps > 1:
            rate, t = pairs[-1]
            last = np.float32(1) / np.array([moments.bias_correction(rate, t + k) for k in range(steps)])
        return (*inverses, last)

    def coming(self, field: str, steps: int) -> np.ndarray | None:
        """Return the numbers of a scheduled field in the next steps, or None without a schedule."""
        value = getattr(self._values, field, None)
        return value.ahead(self._step, steps) if isinstance(value, Scheduled) else None

    def steps(self, steps: int) -> np.ndarray:
        """Return 1, 2, ... up to a number of steps."""
        return np.arange(1, steps + 1, dtype=np.float32)

    def halves(self, x: np.ndarray) -> tuple[np.ndarray | np.float32, np.ndarray | np.float32]:
        """Return every second number from the first on, and the others. Two numbers give two scalars."""
        return (x[0], x[1]) if len(x) == 2 else (x[::2], x[1::2])

    def float32(self, x: Scalar) -> np.float32:
        """Return a count as a number, and a comparison as 0 or 1."""
        return np.float32(x)


class GuardedOp(Op):
    """The same on guarded numbers, for the trial of a rule."""

    framework = torch
    norms_of = TorchOp.norms_of  # pyright: ignore[reportAssignmentType]
    in_range = staticmethod(in_range)  # pyright: ignore[reportAssignmentType]
    root = staticmethod(exact.sqrt)  # pyright: ignore[reportAssignmentType]
    quotient = staticmethod(operator.truediv)  # pyright: ignore[reportAssignmentType]

    def as_scalar(self, x: object) -> Tensor | None:
        """Return a number of Python, NumPy or torch as a float32 0-d tensor, or None for other objects."""
        if isinstance(x, (int, float, np.integer, np.floating)):
            return torch.tensor(float(x), dtype=torch.float32)
        return x if isinstance(x, Tensor) and x.dtype == torch.float32 and not x.shape else None

    def divide(self, x: Operand, y: Operand) -> Number:
        """Return x / y. Raise for a constant, for which eager torch rounds an inverse first."""
        for constant in (x, y):
            # Eager torch computes c / x as c (1 / x), and on GPUs x / c likewise, exact for powers of two.
            if isinstance(constant, (int, float, np.number)) and abs(math.frexp(constant)[0]) != 0.5:
                raise TypeError(
                    f"{self.rule}: update has the constant {constant} in a quotient, which eager torch does "
                    f'not round correctly. Return it from numbers: {{"c": {constant}}}, and use n.c.'
                )
        return super().divide(x, y)

    def ema(self, average: Operand, value: Operand, rate: Operand) -> Number:
        """Return (rate average) + ((1 - rate) value)."""
        return self.wrap(TorchOp.ema(*map(self.bare, (average, value, rate))))

    def sign(self, x: Operand) -> Number:
        """Return the sign."""
        return self.wrap(exact.sign(self.bare(x)))

    def power(self, x: Operand, y: Operand) -> Number:
        """Return x^y."""
        return self.wrap(TorchOp.power(*self._bare_pair(x, y, "power")))


def tensor_numbers(numbers: Values, device: torch.device) -> Values:
    """Return the numbers of a step as float32 tensors, with the rate of each `DecayRate`."""
    rates = (x.b if isinstance(x, DecayRate) else x for x in numbers)
    return type(numbers)(
        *(
            x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float32, device=device)
            for x in rates
        )
    )
