"""State that lies on the host: it comes to the device of its weights piece by piece while a step runs.

    host      state of piece 0 | piece 1 | piece 2 | ...
    arena A   in 0, step 0, out 0          in 2, step 2, out 2
    arena B        in 1,    step 1, out 1       in 3, ...

Pieces are some short parameters, or rows of a long one. The kernels are those that step state on the device,
and so are the bits. On CUDA each arena copies on a stream of its own, beside the kernels; that this overlaps
is unproven until `make gpu` has run.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.run import run_batch
from halfstep_torch.engine.slots import Slot, SlotColumns
from halfstep_torch.engine.whole_step import WholeStep

# Elements of a piece: enough for launching kernels to be a small part of running them.
_PIECE = 1 << 24
_ALIGNED = 64


def is_away(device: torch.device) -> bool:
    """Whether weights on a device have their state elsewhere, where that is kept on the host."""
    return device.type not in ("cpu", "meta")


def on_host(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the host, in memory from which a device of weights can copy while it computes."""
    x = x.to("cpu")
    return x.pin_memory() if device.type == "cuda" else x


@dataclasses.dataclass(eq=False)
class HostSlot(Slot):
    """A parameter whose state is on the host, or some rows of its first axis.

    Attributes:
        all_rows: the plan of the step of the whole parameter.
        rows: which are the slot's; None for all.
        host: of each state array what is the slot's, where it is kept; `state` is in an arena.
    """

    all_rows: Any = None
    rows: slice | None = None
    host: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def whole_plan(self) -> Plan:
        """That of the step of all elements."""
        return self.all_rows

    @property
    def home(self) -> torch.device:
        """Where the state is."""
        return torch.device("cpu")

    @property
    def grad(self) -> Tensor:
        """The gradient of the rows, detached."""
        return self._here(super().grad)

    def begin(self, step: int, index: int) -> None:
        """Have the weights of a step, its count, and the place of the parameter in it."""
        super().begin(step, index)
        self.param = self._here(self.owner.detach()) if self.rows else self.owner

    def attach(self, caller: str, state: MutableMapping[str, Any]) -> None:
        """Have the parameter's state, on the host."""
        super().attach(caller, state)
        self.host = {key: self._here(x) for key, x in self.arrays.items()}

    def new_arrays(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return some of the state arrays of a parameter that was never stepped: none is on its device."""
        specs = {key: self.whole_plan.arrays[key] for key in keys}
        copies = any(spec.copies_weights for spec in specs.values())
        like = self.owner.detach().to("cpu") if copies else torch.empty(self.owner.shape, device="cpu")
        return {key: on_host(spec.new(like), self.owner.device) for key, spec in specs.items()}

    def _here(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x[self.rows]


class Arena:
    """Memory on a device for the state of one piece at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, torch.empty(0, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def place(self, pieces: Sequence[Sequence[HostSlot]]) -> None:
        """Let the state of each piece be in the same memory."""
        size = max((sum(map(_bytes, _arrays(piece))) for piece in pieces), default=0)
        if size > self._memory.numel():
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        for piece in pieces:
            start = 0
            for slot in piece:
                slot.state = {}
                for key, x in slot.host.items():
                    part = self._memory[start : start + x.numel() * x.element_size()]
                    slot.state[key], start = part.view(x.dtype).view(x.shape), start + _bytes(x)

    def fetch(self, piece: Iterable[HostSlot]) -> None:
        """Bring the state of a piece here. `wait` before it is read."""
        with self._aside():
            for slot in piece:
                for key, x in slot.host.items():
                    slot.state[key].copy_(x, non_blocking=True)

    def wait(self) -> None:
        """Let what is launched from now on come after what was copied."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def put(self, piece: Iterable[HostSlot]) -> None:
        """Bring the state of a piece back, once what was launched is done."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._aside():
            for slot in piece:
                for key, x in slot.host.items():
                    x.copy_(slot.state[key], non_blocking=True)

    def fence(self) -> None:
        """Return once the host has all that was put."""
        if self._stream is not None:
            self._stream.synchronize()

    def _aside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _arrays(piece: Iterable[HostSlot]) -> Iterator[Tensor]:
    return itertools.chain.from_iterable(slot.host.values() for slot in piece)


def _bytes(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // _ALIGNED) * _ALIGNED


class StreamedStep(WholeStep):
    """The steps of an optimizer whose state is on the host."""

    arena: type[Arena] = Arena

    def __init__(self) -> None:
        self._arenas: dict[torch.device, tuple[Arena, Arena]] = {}
        self._turns: list[tuple[Batch, Arena | None]] = []

    def slots_of(self, group: ReadGroup, name: str, param: Tensor) -> Sequence[Slot]:
        """Return the slots of a parameter of a group: of a long one, rows of it each."""
        if not is_away(param.device):
            return super().slots_of(group, name, param)
        plan, whole = group.plan(name, param), tuple(param.shape)
        # The norm of all gradients adds up those of whole parameters.
        cut = _has_rows(plan, param) and not any(link.measures for link in group.links)
        if not cut or param.numel() <= _PIECE:
            return [HostSlot(param, name, plan, Window.full(whole), all_rows=plan)]
        length, slots = max(_PIECE // math.prod(whole[1:]), 1), []
        for first in range(0, whole[0], length):
            last = min(first + length, whole[0])
            window = Window(whole, (first, *(0 for _ in whole[1:])), (last - first, *whole[1:]))
            here = plan.within(window)
            slots.append(HostSlot(param, name, here, window, all_rows=plan, rows=slice(first, last)))
        return slots

    @contextlib.contextmanager
    def agreed_batches(self, params: Iterable[Tensor], batches: Sequence[Batch]) -> Iterator[None]:
        """Make the batches of the context smaller: a piece each, with its place in an arena."""
        yield
        assert isinstance(batches, list)
        batches[:] = [piece for batch in batches for piece in _pieces(batch)]
        self._turns, pieces = [], {}
        for batch in batches:
            arena = None
            if isinstance(batch.slots[0], HostSlot):
                of_device = pieces.setdefault(batch.device, ([], []))
                turn = (len(of_device[0]) + len(of_device[1])) % 2
                of_device[turn].append(batch.slots)
                arena = self._of(batch.device)[turn]
            self._turns.append((batch, arena))
        for device, of_device in pieces.items():
            for arena, of_arena in zip(self._of(device), of_device, strict=True):
                arena.place(of_arena)

    def run(self, batches: Sequence[Batch]) -> None:
        """Step the batches; while one is stepped, the state of the next one is on its way."""
        turns = [(batch, arena) for batch, arena in self._turns if any(batch is other for other in batches)]
        for i, (batch, arena) in enumerate(turns):
            for ahead, other in turns[i : i + 2] if not i else turns[i + 1 : i + 2]:
                if other is not None:
                    other.fetch(ahead.slots)  # pyright: ignore[reportArgumentType]
            if arena is None:
                run_batch(batch)
                continue
            arena.wait()
            run_batch(batch)
            arena.put(batch.slots)  # pyright: ignore[reportArgumentType]
        self._turns = []
        for arena in itertools.chain(*self._arenas.values()):
            arena.fence()

    def _of(self, device: torch.device) -> tuple[Arena, Arena]:
        if device not in self._arenas:
            self._arenas[device] = self.arena(device), self.arena(device)
        return self._arenas[device]


def _has_rows(plan: Plan, param: Tensor) -> bool:
    """Whether every state array has the rows of the parameter, with whole blocks in each."""
    shape = tuple(param.shape)
    return (
        param.dim() > 1
        and param.is_contiguous()
        and all(rule.scope == "elementwise" for rule in plan.rules)
        and all(
            not spec.shape_of and len(spec.shape(shape)) > 1 and spec.shape(shape)[0] == shape[0]
            for spec in plan.arrays.values()
        )
    )


def _pieces(batch: Batch) -> Iterator[Batch]:
    """Yield the slots of a batch some at a time, where their state is on the host."""
    if not isinstance(batch.slots[0], HostSlot):
        yield batch
        return
    places: list[list[int]] = []
    room = 0
    for place, slot in enumerate(batch.slots):
        n = math.prod(slot.window.shape)
        if not places or n > room:
            places.append([])
            room = _PIECE
        places[-1].append(place)
        room -= n
    for some in places:
        keys = SlotColumns(batch.keys.columns[:, some].contiguous())
        yield dataclasses.replace(batch, slots=[batch.slots[place] for place in some], keys=keys)
