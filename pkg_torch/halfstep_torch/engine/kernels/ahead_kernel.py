"""The launch before a step on a device, which makes counts, random keys and numbers there."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.kernels.graph import ROWS, NoGeneratedForm
from halfstep.kernels.simplify import simplified
from halfstep.kernels.triton_numbers import COMING, triton_numbers
from halfstep.kernels.triton_process import module_of
from halfstep_torch.engine.kernels.trace import traced
from halfstep_torch.engine.kernels.triton_kernel import OPTIONS, is_exact_by_ptx, on_device
from halfstep_torch.engine.plan import Stream
from halfstep_torch.leaves.checks import LAST_STEP
from halfstep_torch.links.link import Link
from halfstep_torch.numbers.tensor_numbers import tensor_keys

_LANES, _LANES_COMING = 128, 8
"""Parameters of a program, and of one that reads numbers of coming steps."""

Inputs = dict[str, Tensor]


class AheadKernel:
    """The kernel for parameters with the same chain.

    Args:
        links: the active links of the chain, in order.
        fields: the names of each link's hyperparameters.
        streams: the streams of random words.
        arrays: the number of a parameter's arrays in a row of the step's kernel.

    Raises:
        NoGeneratedForm: if the numbers of a link need the host.
    """

    def __init__(
        self, links: Sequence[Link], fields: Sequence[Sequence[str]], streams: Sequence[Stream], arrays: int
    ) -> None:
        self._links, self._fields, self._streams, self._arrays = links, fields, streams, arrays
        count = sum(map(len, fields))
        column = ROWS, 1
        given = {"count": (column, torch.int64), "coming": ((ROWS, COMING), torch.float32)}
        given |= {f"number.{i}": ((), torch.float32) for i in range(count)}
        of_streams = [f"{name}.{i}" for i in range(len(streams)) for name in ("leaf", "high", "low")]
        given |= {name: (column, torch.int32) for name in of_streams}
        graph = simplified(traced(self._words, given))
        text = triton_numbers(
            graph,
            arrays=arrays,
            streams=len(streams),
            numbers=count,
            last_step=LAST_STEP,
            exact_by_ptx=is_exact_by_ptx(),
        )
        self.text, self._module = text, module_of(text)
        self._lanes = _LANES_COMING if "coming" in graph.inputs else _LANES

    def _words(self, inputs: Inputs) -> list[Tensor]:
        """Return the words of parameters: keys and numbers."""
        words = []
        for i, stream in enumerate(self._streams):
            seed, steps = (inputs[f"high.{i}"], inputs[f"low.{i}"]), inputs["count"] - int(stream.before)
            words += tensor_keys(seed, steps, inputs[f"leaf.{i}"], stream.roles)
        numbers = (inputs[f"number.{i}"] for i in range(sum(map(len, self._fields))))
        for link, names in zip(self._links, self._fields, strict=True):
            values = {name: next(numbers) for name in names}
            if "peak_lr" in values:  # a rate on the device may be the largest yet
                values["peak_lr"] = torch.maximum(values["peak_lr"], values["learning_rate"])
            try:
                words += link.tensor_numbers(values, inputs["count"], inputs["coming"])
            except (NotImplementedError, TypeError) as error:
                raise NoGeneratedForm(f"the numbers of {link.name}: {error}") from error
        return words

    def __call__(self, tables: Sequence[Tensor], parameters: int) -> None:
        """Launch it, given its tables in order."""
        with on_device(tables[1].device):
            self._launch(-(-parameters // self._lanes), (*tables, parameters))

    def _launch(self, programs: int, arguments: Sequence[object]) -> None:
        self._module.ahead[(programs,)](*arguments, R=self._lanes, **OPTIONS)


@functools.cache
def ahead_kernel_of(
    links: tuple[Link, ...], fields: tuple[tuple[str, ...], ...], streams: tuple[Stream, ...], arrays: int
) -> AheadKernel:
    """Return the kernel of a chain, without seeds and prefixes. Tracing it takes a second."""
    return AheadKernel(links, fields, streams, arrays)
