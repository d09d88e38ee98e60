"""A rule that multiplies an update by one number computed from norms, such as LAMB's trust ratio.

Plain steps keep a parameter's update until its norm is computed. Kernels keep no update, and compute it
twice, first for the norms and then for the weights.

    measure   the rules before, and `NORMS`: nothing is written but sums of squares
    apply     all rules, with `SCALED` in the place of the one that scales
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.moments import Moments
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.numbers import exact
from halfstep_torch.numbers.op import BareOperand, TorchOp, tensor_numbers
from halfstep_torch.storage.stored_moment import Arrays, Words

WEIGHTS = "weights"
"""Name of an array that `NORMS` adds to a stage, the float32 weights as the scaling rule gets them."""


Norms = Tensor | tuple[Tensor, Tensor]
"""Norms of arrays, or a pair with the norms of 2^-64 times the arrays."""


class Asked(NamedTuple):
    """A norm that a rule needs, of its update or of the weights."""

    of_update: bool
    exact: bool


class Scale(NamedTuple):
    """The numbers of `SCALED`, which returns ratio (scale u)."""

    # Any: tensors, or operands of a graph while a kernel is traced.
    ratio: Any
    # Any: as `ratio`.
    scale: Any


@dataclasses.dataclass(frozen=True)
class _Scaled:
    name = "scaled"
    late = Scale._fields
    scope = "elementwise"
    needs = "update"

    def update(self, g, p, n, m, op):
        """Return ratio (scale u)."""
        return op.scaled(g, n.ratio, n.scale)


@dataclasses.dataclass(frozen=True)
class _Norms(_Scaled):
    name = "norms"
    late = ()


class _BoundNorms(BoundRule):
    def update(
        self,
        u: Tensor,
        p: Tensor,
        state: Arrays,
        numbers: Values,
        words: Sequence[Words],
        op: TorchOp | None = None,
    ) -> tuple[Tensor, Arrays]:
        return u, {WEIGHTS: p}


SCALED, NORMS = BoundRule(_Scaled(), wide_weights=False), _BoundNorms(_Norms())


def may_scale(rule: BoundRule) -> bool:
    """Whether a rule may multiply its update by a number from norms, as `scale_of` then finds out."""
    return rule.scope == "parameter" and rule.rule.needs == "norms" and not rule.moments


class NotScaling(Exception):
    """Raised if a rule does more than multiply its update by a number."""


def scale_of(
    rule: BoundRule, numbers: Values, norms: Callable[[Asked], Norms], device: torch.device
) -> Scale:
    """Return the numbers of `SCALED` for parameters on a device, given the `norms` of each, in columns.

    Raises:
        NotScaling: if the rule does more than that.
    """
    op = _ScaleOp(norms)
    if rule.tensor_numbers:
        numbers = tensor_numbers(numbers, device)
    try:
        left = rule.rule.update(op.update, op.weights, numbers, Moments(rule.rule.name, {}), op)
    except Exception as error:  # from an operation that these arrays do not support
        raise NotScaling(str(error)) from error
    if op.left is None or left is not op.left or op.shape is None:
        raise NotScaling("an update that is not op.scaled(g, ...)")
    numbers = (x if isinstance(x, Tensor) else torch.full((), x, device=device) for x in op.left)
    return Scale(*(x.to(torch.float32).expand(op.shape) for x in numbers))


def asked_norms(rule: BoundRule, numbers: Values) -> list[Asked]:
    """Return the norms that a rule needs, in its order.

    Raises:
        NotScaling: if the rule does more than multiply its update by a number from these norms.
    """
    asked: list[Asked] = []

    def norms(of: Asked) -> Tensor:
        asked.append(of)
        return torch.ones(2, 1)

    scale_of(rule, numbers, norms, torch.device("cpu"))
    return asked


class _ScaleOp(TorchOp):
    """The operations of a rule on numbers of many parameters, with names in place of arrays."""

    def __init__(self, norms: Callable[[Asked], Norms]) -> None:
        self.update, self.weights = object(), object()
        self.left: Scale | None = None
        self._norms, self.shape = norms, None

    def norms_of(self, x: object, exact: bool) -> Norms:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the known norms."""
        if x is not self.update and x is not self.weights:
            raise NotScaling("the norm of another array")
        found = self._norms(Asked(x is self.update, exact))
        self.shape = found[0].shape
        return found

    def scaled(self, x: object, ratio: BareOperand, scale: BareOperand = 1.0) -> object:  # pyright: ignore
        """Record the factors of the update."""
        if x is not self.update:
            raise NotScaling("another array than the update")
        self.left = Scale(ratio, scale)
        return self.left

    @staticmethod
    def power(x: Tensor, y: BareOperand) -> Tensor:
        """Return x^y, with the bits of single numbers."""
        return x if isinstance(y, float) and y == 1 else exact.power(x, y)

    @staticmethod
    def apply(function: Callable, *xs: BareOperand) -> Tensor:
        """Return function(*xs), computed for each parameter separately on 0-d tensors."""
        shape = torch.broadcast_shapes(*(x.shape for x in xs if isinstance(x, Tensor)))
        if not shape:
            return function(*xs)
        columns = [x.expand(shape).unbind() if isinstance(x, Tensor) else [x] * shape[0] for x in xs]
        return torch.stack([function(*of_one) for of_one in zip(*columns, strict=True)])
