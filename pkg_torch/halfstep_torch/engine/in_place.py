"""Rounding arrays in place that no rule steps: sums and clipped gradients, averages, float32 copies.

By one call of a generated kernel, or in plain torch in pieces. Either way no temporary of the size of an
array is made.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.random_words import leaf_id, word_role
from halfstep_torch.distributed.shards import PLAIN
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.kernels.kernel import Kernel, kernel_of
from halfstep_torch.engine.kernels.tables import row_of
from halfstep_torch.engine.number_places import flat, number_places
from halfstep_torch.engine.plain import piece_length, step_pieces
from halfstep_torch.engine.stage import Stage
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.op import TorchOp
from halfstep_torch.numbers.random_words import leaf_keys
from halfstep_torch.numbers.rounding import round_value
from halfstep_torch.weights.weight_rule import BoundWeights, NearestWeights

_AHEAD = 64
_NO_KEYS = np.zeros((0, 1), np.uint32)

New = Callable[..., Tensor]
"""From two float32 arrays, and numbers, to the float32 value that is to be rounded."""


@dataclasses.dataclass(frozen=True)
class Rounding(Stage):
    """The stage x <- stochastic(new(x, y, *numbers)), by R5, or to nearest; in float32 nothing is rounded.

    Attributes:
        new: a function of a module. Kernels of equal functions are shared.
    """

    new: New

    def __hash__(self) -> int:
        return self._hash

    def run(
        self,
        p: Tensor,
        u: Tensor,
        state: Mapping[str, Tensor],
        numbers: Sequence,
        words: Callable,
        op: TorchOp | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rounded value of p and u; arguments as in `Stage.run`."""
        value = self.new(p.to(torch.float32), u.to(torch.float32), *numbers)
        drawn = [words(*source)(p.shape) for (source,) in self.sources]
        return round_value(value, dtype_name(self.dtype), drawn[0] if drawn else None, saturate=False), {}

    def kernel(
        self, caller: str, choice: CompileChoice, numbers: Values, incoming: torch.dtype, device: torch.device
    ) -> Kernel | None:
        """Return the kernel for arrays y of a dtype, if the choice has one now."""
        if device.type == "meta" or not choice.wants(caller, device):
            return None
        kernel = kernel_of(self, number_places(numbers), incoming, device)
        return kernel if choice.has(caller, kernel) else None


@functools.cache
def rounding(new: New, role: int | None, dtype: torch.dtype) -> Rounding:
    """Return the stage for arrays x of a dtype, with the words of a role, or to nearest without one."""
    weights = BoundWeights(NearestWeights(), dtype=dtype_name(dtype))
    sources, roles = (), ()
    if role is not None and dtype != torch.float32:
        sources, roles = (((0, role, True),),), ((word_role(role),),)
    return Rounding((), sources, roles, weights, (), dtype, negates=False, applies=True, new=new)


def words_of(seed: int, steps: Sequence[int], leaves: Sequence[str], role: int) -> np.ndarray:
    """Return the keys of the words of leaves, each at a step: uint32, a column for each."""
    return leaf_keys(seed, list(steps), [leaf_id(leaf) for leaf in leaves], [role]).T


class LeafWords:
    """The keys of a leaf's words, for several steps at once: NumPy takes as long for one as for these."""

    def __init__(self, seed: int, leaf: str, role: int) -> None:
        self._source = seed, leaf, role
        self._first_and_made: tuple[int, np.ndarray] = 0, np.empty((2, 0), np.uint32)

    def at(self, step: int) -> np.ndarray:
        """Return the keys of a step in a column."""
        first, made = self._first_and_made
        if not first <= step < first + made.shape[1]:
            seed, leaf, role = self._source
            first, made = step, words_of(seed, range(step, step + _AHEAD), [leaf] * _AHEAD, role)
            self._first_and_made = first, made  # both or none: the handler of a signal may raise
        return made[:, step - first, None]


def run_kernel(
    kernel: Kernel,
    stage: Rounding,
    pairs: Sequence[tuple[Tensor, Tensor]],
    keys: np.ndarray,
    numbers: Values | Tensor = (),
    windows: Sequence[Window] | None = None,
) -> None:
    """Round the first of each pair of row-major arrays by one call of a kernel.

    Numbers that are a float32 tensor stay on its device.
    """
    windows = windows or [Window.full(tuple(x.shape)) for x, _ in pairs]
    table = np.array(
        [row_of(stage, window, pair) for window, pair in zip(windows, pairs, strict=True)], np.int64
    )
    if isinstance(numbers, Tensor):
        late = 0, numbers.expand(len(pairs), -1)
        kernel(table, keys, np.zeros((1, len(numbers)), np.float32), None, late=late)
    else:
        kernel(table, np.ascontiguousarray(keys), np.array([flat(numbers)], np.float32), None)
    # A kernel writes to memory by its address: autograd must learn of it.
    torch.autograd.graph.increment_version([x for x, _ in pairs])


def round_in_place(
    caller: str,
    choice: CompileChoice,
    stage: Rounding,
    x: Tensor,
    y: Tensor,
    keys: np.ndarray,
    numbers: Values = (),
    window: Window | None = None,
) -> None:
    """Round an array in place, with the words of its row-major indices.

    Args:
        caller: named in messages.
        choice: whether a kernel rounds.
        stage: the operation.
        x: the array, in any order of memory.
        y: of its shape.
        keys: of its words (`words_of`).
        numbers: that `stage.new` reads.
        window: the part that x is of an array. Words are of the indices in the array.
    """
    window = window or Window.full(tuple(x.shape))
    if not x.numel():
        return
    if x.is_contiguous() and y.is_contiguous() and x.device == y.device:
        kernel = stage.kernel(caller, choice, numbers, y.dtype, x.device)
        if kernel is not None and kernel.takes(stage, window):
            run_kernel(kernel, stage, [(x, y)], keys, numbers, [window])
            return
    of_leaf = keys[:, 0].view(np.int32).tolist()
    for offset, part, other in _pieces(x, y):

        def indices(start: int, stop: int, offset: int = offset) -> Tensor:
            return window.indices(torch.arange(offset + start, offset + stop, device="cpu"))

        whole = part.contiguous()
        step_pieces(stage, whole, other.to(part.device), None, {}, numbers, of_leaf, indices)
        if whole is not part:
            part.copy_(whole)


def scale_in_place(caller: str, choice: CompileChoice, arrays: Sequence[Tensor], numbers: Tensor) -> None:
    """Scale arrays in place: x <- nearest(quotient (scale x)), given both numbers."""
    if numbers.device.type == "cpu" and bool((numbers == 1).all()):
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in arrays:
        kinds.setdefault((x.device, x.dtype), []).append(x)
    for (device, dtype), of_kind in kinds.items():
        stage, here = rounding(_scaled, None, dtype), numbers.to(device)
        kernel = stage.kernel(caller, choice, (1.0, 1.0), dtype, device)
        flat = [x for x in of_kind if type(x) in PLAIN and x.is_contiguous()]
        if kernel is not None and flat and _are_apart(flat):
            run_kernel(kernel, stage, [(x, x) for x in flat], _NO_KEYS, here)
            of_kind = [x for x in of_kind if type(x) not in PLAIN or not x.is_contiguous()]
        for x in of_kind:
            x.copy_(_scaled(x.to(torch.float32), x, *here))


def _scaled(x: Tensor, _: Tensor, quotient: Tensor, scale: Tensor) -> Tensor:
    return TorchOp.scaled(x, quotient, scale)


def _are_apart(arrays: Sequence[Tensor]) -> bool:
    """Whether no two row-major arrays share memory, as a gradient that is given twice does."""
    starts = np.array([x.data_ptr() for x in arrays], np.int64)
    order, ends = np.argsort(starts), starts + [x.nbytes for x in arrays]
    return bool((starts[order][1:] >= ends[order][:-1]).all())


def _pieces(x: Tensor, y: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (row-major index of the first element, pieces of both arrays), cut along the first axis."""
    if x.is_contiguous() or not x.dim():
        yield 0, x, y
        return
    width = math.prod(x.shape[1:])
    rows = max(piece_length(x.device) // width, 1)
    for start in range(0, len(x), rows):
        yield start * width, x[start : start + rows], y[start : start + rows]
