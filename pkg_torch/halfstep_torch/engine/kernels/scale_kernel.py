"""The kernels of the factors of updates on a device, for each parameter or for all together."""

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
        problem: the difference that was found, or "".
    """

    is_checked, problem = False, ""

    def check(self, made: Tensor, expected: Tensor) -> None:
        """Compare the kernel's numbers with the results of plain operations."""
        self.is_checked = torch.equal(made.nan_to_num(), expected.nan_to_num())
        self.problem = "" if self.is_checked else "its bits differ from those of plain operations"


class ScaleKernel(_Checked):
    """The launch between the norms and the step.

    Raises:
        NoGeneratedForm: if an operation of the rule has no form in Triton.
    """

    def __init__(self, rule: BoundRule, places: Values, norms: int, device: torch.device) -> None:
        """Make the kernel for a rule that scales, given the `number_places` of its numbers."""
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
        """Write both numbers of each parameter into a row.

        Args:
            rows: the rows of the launch of norms.
            words: the words of the launch of norms.
            arrays: the number of addresses in a row.
            first: the place of the rule's numbers among a parameter's words.
            made: the output, float32.
        """
        params = len(made)
        sizes = arrays + len(ROW_FIELDS), arrays + ROW_FIELDS.index("elements"), words.numel() // params
        with on_device(self._device):
            self._module.scale[(params,)](rows, words, made, *sizes, first, **OPTIONS)


class MeasureKernel(_Checked):
    """The launch of a link's measure over all gradients, after the launch of their norms.

    Attributes:
        names: the names of the numbers that it writes.

    Raises:
        NoGeneratedForm: if an operation of the link has no form in Triton, or the norm is exact.
    """

    def __init__(self, link: Link, h: Values, device: torch.device) -> None:
        """Make the kernel for the values of a link."""
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
        """Write the numbers, a row for each array. Arguments are as in `ScaleKernel`."""
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
    """Return the kernel of a link's measure on a device."""
    return MeasureKernel(link, h, device)
