"""The kernels of what updates are multiplied by, on a device: for each parameter, or for all together."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.kernels.graph import NoGeneratedForm
from halfstep.kernels.triton_process import module_of
from halfstep.kernels.triton_scale import triton_measure, triton_scale
from halfstep.kernels.triton_source import ROW_FIELDS
from halfstep_torch.engine.kernels.trace import traced
from halfstep_torch.engine.kernels.triton_kernel import OPTIONS, is_exact_by_ptx, on_device
from halfstep_torch.engine.number_places import flat, unflat
from halfstep_torch.engine.scaling import Asked, scale_of
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.links.link import Link

_NUMBER = (), torch.float32


class _Checked:
    """A kernel of numbers.

    Attributes:
        is_checked: whether it was compared with plain operations.
        problem: what was found then.
    """

    is_checked, problem = False, ""

    def check(self, made: Tensor, expected: Tensor) -> None:
        """Compare what it has made with the numbers of plain operations."""
        self.is_checked = torch.equal(made.nan_to_num(), expected.nan_to_num())
        self.problem = "" if self.is_checked else "its bits differ from those of plain operations"


class ScaleKernel(_Checked):
    """The launch between those of norms and of the step.

    Raises:
        NoGeneratedForm: if Triton has no form of an operation of the rule.
    """

    def __init__(self, rule: BoundRule, places: Values, norms: int, device: torch.device) -> None:
        """Make it for a rule that scales, given the `number_places` of its numbers."""
        count, self._device = len(flat(places)), device

        def scale(given: dict[str, Tensor]) -> Sequence[Tensor]:
            def norms_of(asked: Asked) -> tuple[Tensor, Tensor]:
                k = 0 if asked.of_update else 1
                return given[f"norm.{k}"], given[f"moved.{k}"]

            numbers = unflat(places, [given[f"number.{i}"] for i in range(count)])
            return scale_of(rule, numbers, norms_of, torch.device("meta"))

        inputs = {f"{name}.{k}": _NUMBER for k in range(2) for name in ("norm", "moved")}
        graph = traced(scale, inputs | {f"number.{i}": _NUMBER for i in range(count)})
        self._module = module_of(triton_scale(graph, norms, exact_by_ptx=is_exact_by_ptx()))

    def __call__(self, rows: Tensor, words: Tensor, arrays: int, first: int, made: Tensor) -> None:
        """Write both numbers of each parameter, a row.

        Args:
            rows: of the launch of norms.
            words: likewise.
            arrays: addresses in a row.
            first: the place of the rule's numbers among the words of a parameter.
            made: float32.
        """
        params = len(made)
        sizes = arrays + len(ROW_FIELDS), arrays + ROW_FIELDS.index("elements"), words.numel() // params
        with on_device(self._device):
            self._module.scale[(params,)](rows, words, made, *sizes, first, **OPTIONS)


class MeasureKernel(_Checked):
    """The launch of what a link measures over all gradients, after that of their norms.

    Attributes:
        names: of the numbers that it writes.

    Raises:
        NoGeneratedForm: if Triton has no form of an operation of the link, or the norm is exact.
    """

    def __init__(self, link: Link, h: Values, device: torch.device) -> None:
        """Make it for the values of a link."""
        self._device, self.names = device, [*link.measure(h, lambda exact: torch.ones(2))]

        def measured(given: dict[str, Tensor]) -> Sequence[Tensor]:
            def norms(exact: bool) -> Any:  # a pair, where plain steps have an array of two
                if exact:
                    raise NoGeneratedForm("an exact norm")
                return given["norm.0"], given["moved.0"]

            return [*link.measure(h, norms).values()]

        graph = traced(measured, {"norm.0": _NUMBER, "moved.0": _NUMBER})
        self._module = module_of(triton_measure(graph, exact_by_ptx=is_exact_by_ptx()))
        self._count = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, rows: Tensor, words: Tensor, arrays: int, made: Tensor) -> None:
        """Write the numbers, a row for each array; arguments are those of `ScaleKernel`."""
        parts = torch.empty(len(made), 2, dtype=torch.float32, device=self._device)
        sizes = arrays + len(ROW_FIELDS), arrays + ROW_FIELDS.index("elements")
        with on_device(self._device):
            self._module.measure[(len(made),)](rows, parts, made, self._count, *sizes, **OPTIONS)


@functools.cache
def scale_kernel_of(rule: BoundRule, places: Values, norms: int, device: torch.device) -> ScaleKernel:
    """Return the kernel of a rule's numbers on a device."""
    return ScaleKernel(rule, places, norms, device)


@functools.cache
def measure_kernel_of(link: Link, h: Values, device: torch.device) -> MeasureKernel:
    """Return the kernel of what a link measures on a device."""
    return MeasureKernel(link, h, device)
