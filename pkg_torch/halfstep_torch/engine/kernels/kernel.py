"""The kernel of a stage, which is traced, generated for a device, and compared with plain steps before use.

stage ── trace ──▶ graph ── simplify ──▶ graph ─┬─ c_source ──────▶ compiler, a process of its own ──▶ library
                                                └─ triton_source ─▶ Triton
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.kernels.c_driver import FIELDS
from halfstep.kernels.c_source import c_source
from halfstep.kernels.graph import Graph, NoGeneratedForm
from halfstep.kernels.simplify import simplified
from halfstep.kernels.triton_process import Request
from halfstep.kernels.triton_source import triton_source
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.kernels.c_kernel import CKernel
from halfstep_torch.engine.kernels.trace import measured, trace
from halfstep_torch.engine.kernels.triton_kernel import TritonKernel, in_powers_of_two
from halfstep_torch.engine.number_places import flat, unflat
from halfstep_torch.engine.plain import step_pieces
from halfstep_torch.engine.stage import Stage

_TRIAL_STEPS = 3


class Kernel:
    """The kernel of a stage on a device, without numbers, seeds or lengths, so that equal stages share it.

    Attributes:
        missing: the operation without a generated form, or "".
    """

    def __init__(self, stage: Stage, places: Values, incoming: torch.dtype, device: torch.device) -> None:
        self._stage, self._places, self._incoming, self._device = stage, places, incoming, device
        self._made: CKernel | TritonKernel | None = None
        self.missing, self._problem, self._is_checked = "", "", False
        try:
            self._made = self._generated()
        except NoGeneratedForm as error:
            self.missing = str(error)

    def _generated(self) -> CKernel | TritonKernel:
        return generated(self._stage, self._places, self._incoming, self._device)

    @property
    def request(self) -> Request | None:
        """The request to compile a new Triton kernel for an NVIDIA GPU in a process, or None."""
        if not isinstance(self._made, TritonKernel) or self._is_checked:
            return None
        if self._device.type != "cuda" or torch.version.hip:
            return None
        major, minor = torch.cuda.get_device_capability(self._device)
        return self._made.request(("cuda", 10 * major + minor, 32))

    @property
    def problem(self) -> str:
        """The reason why there is no kernel, or "" if there is one or it is being built."""
        if self.missing:
            return f"there is no generated form of {self.missing}"
        return self._problem or (self._made.problem if self._made else "")

    @property
    def on_device(self) -> TritonKernel | None:
        """The kernel that a device launches, or None on a CPU."""
        return self._made if isinstance(self._made, TritonKernel) else None

    @property
    def reads_late(self) -> bool:
        """Whether it reads numbers written by another kernel."""
        return self.on_device is not None and self.on_device.reads_late

    def is_ready(self, *, wait: bool) -> bool:
        """Whether the kernel can be called, after the compiler ends if `wait`."""
        if self._made is None or self._problem or not self._made.is_built(wait=wait):
            return False
        if not self._is_checked:
            try:
                same = self._has_same_bits()
            except Exception as error:  # Triton raises many kinds of them
                same, self._problem = False, f"{type(error).__name__}: {str(error)[-300:]}"
            if not same:
                self._problem = self._problem or "its bits differ from those of plain steps"
                return False
            self._is_checked = True
        return True

    def takes(self, stage: Stage, window: Window) -> bool:
        """Whether the kernel can update a window, given the parameter's own stage (with short blocks)."""
        return window.skip is not None and (
            not isinstance(self._made, TritonKernel) or self._made.takes(stage, window)
        )

    def __call__(
        self,
        table: np.ndarray,
        keys: np.ndarray,
        numbers: np.ndarray,
        which: np.ndarray | None,
        *,
        late: tuple[int, Tensor] | None = None,
        totals: Tensor | None = None,
    ) -> None:
        """Update the parameters of a table, or add up their squares.

        Args:
            table: int64, a row for each parameter (`tables.py`). A kernel of norms has the addresses of sums
                in place of the update, one sum for each piece (`numbers/norms.py`).
            keys: uint32, the keys of its random words, a column for each parameter.
            numbers: float32, the numbers of the step, a row for each count.
            which: int32, the row of numbers of each parameter, or None if there is one row.
            late: the first place of numbers that differ by parameter, and these float32 numbers on the
                device, a row for each parameter.
            totals: the output of a kernel of norms, a column for each parameter (`graph.SUMS`).
        """
        assert self._made is not None
        self._made(table, keys, numbers, which, late=late, totals=totals)

    def _has_same_bits(self) -> bool:
        """Whether the kernel gives the bits of plain steps on scratch memory."""
        stage, trial = self._stage, Trial(self._stage, self._places, self._device)
        ours, theirs = ([trial.p.clone(), {name: x.clone() for name, x in trial.state.items()}] for _ in "ab")
        for _ in range(_TRIAL_STEPS):
            g = trial.gradient(self._incoming)
            u = [None if stage.applies else torch.zeros_like(g, dtype=torch.float32) for _ in "ab"]
            arrays = [ours[0], g, *(x for x in u[:1] if x is not None), *ours[1].values()]
            self(trial.table(arrays), trial.keys, trial.numbers, None)
            step_pieces(stage, theirs[0], g, u[1], theirs[1], trial.by_name, trial.of_leaf, torch.arange)
            pairs = [(ours[0], theirs[0]), *zip(ours[1].values(), theirs[1].values(), strict=True)]
            pairs += [(u[0], u[1])] if u[0] is not None else []
            if not all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs):
                return False
        return True


class Trial:
    """Scratch memory for the comparison of a kernel with plain steps.

    Attributes:
        p, state: the first weights and state arrays.
        keys, numbers: the inputs of kernels. `of_leaf` and `by_name` are the same for plain steps.
    """

    def __init__(self, stage: Stage, places: Values, device: torch.device) -> None:
        self._generator, self._device = torch.Generator().manual_seed(0), device
        n = 8 * stage.width + (0 if stage.blocks else 5)
        count, columns = len(flat(places)), sum(1 + len(roles) for roles in stage.roles)
        self.numbers = np.random.default_rng(0).uniform(0.25, 0.75, (1, count)).astype(np.float32)
        self.keys = np.arange(1, 2 * columns + 1, 2, dtype=np.uint32)[:, None].copy()
        self.by_name = unflat(places, self.numbers[0].tolist())
        self.of_leaf = self.keys[:, 0].view(np.int32).tolist()
        self.p = torch.randn(n, generator=self._generator).to(device, stage.dtype)
        self.state = {
            name: torch.full((spec.size(n),), spec.start, dtype=torch.float32, device=device).to(spec.dtype)
            for name, spec in stage.arrays.items()
        }

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """Return the gradient of the next step."""
        return torch.randn(self.p.shape, generator=self._generator).to(self._device, dtype)

    def table(self, arrays: Sequence[Tensor]) -> np.ndarray:
        """Return the table of one parameter."""
        n = self.p.numel()
        fields = {"elements": n, "run": 0, "first": 0, "window_run": n, "window_skip": 0}
        row = [*(fields[name] for name in FIELDS), *(x.data_ptr() for x in arrays)]
        return np.array([row], np.int64)


def generated(
    stage: Stage, places: Values, incoming: torch.dtype, device: torch.device, sums: str = ""
) -> CKernel | TritonKernel:
    """Trace a stage and generate its kernel for a device, for the update or for one of `SUMS`."""
    graph = _graph_of(stage, places, incoming, device, sums)
    return CKernel(graph) if device.type == "cpu" else TritonKernel(graph, stage, device)


def _graph_of(
    stage: Stage, places: Values, incoming: torch.dtype, device: torch.device, sums: str = ""
) -> Graph:
    graph = trace(stage if device.type == "cpu" else in_powers_of_two(stage), places, incoming)
    return simplified(measured(graph, sums) if sums else graph)


@functools.cache
def missing_form(stage: Stage, places: Values, incoming: torch.dtype, device: torch.device) -> str:
    """Return the operation of a stage without a generated form, or "". No compiler is started."""
    try:
        graph = _graph_of(stage, places, incoming, device)
        _ = c_source(graph) if device.type == "cpu" else triton_source(graph, exact_by_ptx=False)
    except NoGeneratedForm as error:
        return str(error)
    return ""


@functools.cache
def kernel_of(stage: Stage, places: Values, incoming: torch.dtype, device: torch.device) -> Kernel:
    """Return the kernel of a stage. If it is new, its compiler is started."""
    return Kernel(stage, places, incoming, device)
