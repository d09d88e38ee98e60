"""State on the host, which is streamed to the device of its weights in pieces during a step.

    host      state of piece 0 | piece 1 | piece 2 | ...
    arena A   in 0, step 0, out 0          in 2, step 2, out 2
    arena B        in 1,    step 1, out 1       in 3, ...

Pieces are some short parameters, or rows of a long one. The kernels are those that step state on the device,
and so are the bits. On CUDA each arena copies on a stream of its own, beside the kernels; that this overlaps
is unproven until `make gpu` has run.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from halfstep_torch.distributed.shards import check_sharding, is_sharded, local_part, window_of
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.slots import Slot
from halfstep_torch.say_once import say_once
from halfstep_torch.sharded.action import Action
from halfstep_torch.sharded.slots import PartSlot, exchanges, kept_at
from halfstep_torch.sharded.state_home import BesideWeights
from halfstep_torch.storage.stored_moment import State

# Elements of a piece: enough for launching kernels to be a small part of running them.
_PIECE = 1 << 24
_ALIGNED = 64
_HOST = torch.device("cpu")


def state_home(caller: str, state_device: object) -> BesideWeights:
    """Return where an optimizer keeps its state; only the host may be asked for."""
    if state_device is not None and str(state_device) != "cpu":
        raise ValueError(
            f"{caller}: state_device={state_device!r} is no place for state. "
            'Use "cpu", or None for the device of each weight.'
        )
    return BesideWeights() if state_device is None else OnHost()


def is_away(device: torch.device) -> bool:
    """Whether weights on a device have their state on the host."""
    return device.type not in ("cpu", "meta")


def is_streamed(plan: Plan, param: Tensor) -> bool:
    """Whether the state of a parameter is streamed.

    It stays beside shards whose steps exchange words: what they wait for stands between two reads of state.
    """
    return is_away(param.device) and not (is_sharded(param) and exchanges(plan, param))


class Arena:
    """Memory on a device for the state of one piece at a time.

    Attributes:
        memory: its bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.memory = device, torch.empty(0, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def place(self, pieces: Sequence[Sequence[Slot]]) -> None:
        """Place the state of a piece in the arena while it is stepped."""
        sizes = (sum(_bytes(x) for slot in piece for x in slot.kept.values()) for piece in pieces)
        size = max(sizes, default=0)
        if size > self.memory.numel():
            self.memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        for piece in pieces:
            start = 0
            for slot in piece:
                slot.state = {}
                for key, x in slot.kept.items():
                    part = self.memory[start : start + x.numel() * x.element_size()]
                    slot.state[key], start = part.view(x.dtype).view(x.shape), start + _bytes(x)

    def fetch(self, piece: Iterable[Slot]) -> None:
        """Copy the state of a piece to the device, asynchronously: `wait` before reading it."""
        with self._aside():
            for slot in piece:
                for key, x in slot.kept.items():
                    slot.state[key].copy_(x, non_blocking=True)

    def wait(self) -> None:
        """Make later kernels wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def put(self, piece: Iterable[Slot]) -> None:
        """Copy the state of a piece back to the host after the launched kernels."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._aside():
            for slot in piece:
                for key, x in slot.kept.items():
                    x.copy_(slot.state[key], non_blocking=True)

    def fence(self) -> None:
        """Wait until all copies to the host are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def _aside(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _bytes(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // _ALIGNED) * _ALIGNED


class Streaming(Action):
    """Copies the state of a launch to the device and back while another piece is stepped."""

    arena: type[Arena] = Arena

    def __init__(self, arenas: dict[torch.device, tuple[Arena, Arena]], pieces: Sequence[Batch]) -> None:
        """Assign the pieces to the two arenas of their device, in turn."""
        self._pieces, self._turns = pieces, {id(piece): i for i, piece in enumerate(pieces)}
        self._arenas = [self._arena_of(arenas, piece, i) for i, piece in enumerate(pieces)]
        for arena in dict.fromkeys(self._arenas):
            arena.place([piece.slots for piece, x in zip(pieces, self._arenas, strict=True) if x is arena])
        self._memory = [arena.memory for arena in self._arenas]

    def _arena_of(self, arenas: dict, piece: Batch, i: int) -> Arena:
        if piece.device not in arenas:
            arenas[piece.device] = self.arena(piece.device), self.arena(piece.device)
        return arenas[piece.device][i % 2]

    @property
    def slots(self) -> list[Slot]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whose state is on the host."""
        return [slot for piece in self._pieces for slot in piece.slots]

    def stays(self) -> bool:
        """Whether the arenas are where they were."""
        return all(arena.memory is x for arena, x in zip(self._arenas, self._memory, strict=True))

    def begin(self) -> None:
        """Start copying the first two pieces."""
        for i in range(min(2, len(self._pieces))):
            self._fetch(i)

    def _fetch(self, i: int) -> None:
        self._arenas[i].fetch(self._pieces[i].slots)

    def before(self, batch: Batch) -> None:
        """Make the kernels of a piece wait for its state."""
        if (i := self._turns.get(id(batch))) is not None:
            self._arenas[i].wait()

    def after(self, batch: Batch) -> None:
        """Start copying the state of a piece back, and the next piece into its arena."""
        if (i := self._turns.get(id(batch))) is not None:
            self._arenas[i].put(batch.slots)
            if i + 2 < len(self._pieces):
                self._fetch(i + 2)

    def end(self) -> None:
        """Wait until the host has all state."""
        for arena in dict.fromkeys(self._arenas):
            arena.fence()


def _has_rows(plan: Plan, param: Tensor) -> bool:
    """Whether every state array has the rows of the parameter, with whole blocks in each."""
    shape = tuple(param.shape)
    return (
        param.dim() > 1
        and local_part(param).is_contiguous()
        and all(rule.scope == "elementwise" for rule in plan.rules)
        and all(
            not spec.shape_of and len(spec.shape(shape)) > 1 and spec.shape(shape)[0] == shape[0]
            for spec in plan.arrays.values()
        )
    )


class OnHost(BesideWeights):
    """State on the host, except for shards whose steps communicate."""

    def __init__(self) -> None:
        # Memory of each device through which state passes.
        self._arenas: dict[torch.device, tuple[Arena, Arena]] = {}

    def slots_of(self, group: ReadGroup, name: str, param: Tensor) -> Sequence[Slot]:
        """Return the slots of a parameter: of a long one, rows of it."""
        plan = group.plan(name, param)
        if is_sharded(param):
            check_sharding(group.caller, name, param)
        if not is_streamed(plan, param):
            if is_away(param.device):
                say_once(
                    f"{group.caller}: steps of some shards, such as {name!r}, exchange messages with other "
                    "processes, so their state stays beside their weights. To have it on the host, shard "
                    "first axes, take formats whose blocks no border cuts, or use CPUOffloadPolicy of "
                    "fully_shard."
                )
            return super().slots_of(group, name, param)
        window, home = window_of(param), _HOST
        # The norm of all gradients adds up those of whole parameters.
        cut = _has_rows(plan, param) and not any(link.measures for link in group.links)
        if not cut or math.prod(window.shape) <= _PIECE:
            return [PartSlot(param, name, plan.within(window), window, whole_plan=plan, home=home)]
        length, slots = max(_PIECE // math.prod(window.shape[1:]), 1), []
        for first in range(0, window.shape[0], length):
            last = min(first + length, window.shape[0])
            offset, shape = (window.offset[0] + first, *window.offset[1:]), (last - first, *window.shape[1:])
            some = Window(window.whole, offset, shape)
            here, rows = plan.within(some), slice(first, last)
            slots.append(PartSlot(param, name, here, some, whole_plan=plan, rows=rows, home=home))
        return slots

    def arrange(self, batches: Sequence[Batch]) -> tuple[list[Batch], list[Action]]:
        """Return batches, streamed ones last, and the actions around them."""
        others, pieces = _in_pieces(batches)
        _, actions = super().arrange(others)
        return [*others, *pieces], [*actions, Streaming(self._arenas, pieces)]

    def placed(self, param: Tensor, plan: Plan, state: State) -> State:
        """Move a new state of a parameter to where state is kept, and return it."""
        if not is_streamed(plan, param):
            return state
        return {key: x if key == "step" else kept_at(x, _HOST, param.device) for key, x in state.items()}


def _in_pieces(batches: Iterable[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Return the batches that are stepped as they are, then pieces whose state is streamed."""
    others, pieces = [], []
    for batch in batches:
        beside, streamed, groups, room = [], [], [], -1
        for slot in batch.slots:
            (streamed if getattr(slot, "home", None) else beside).append(slot)
        if beside:
            others.append(dataclasses.replace(batch, slots=beside))
        for slot in streamed:
            n = math.prod(slot.window.shape)
            if n > room:
                groups.append([])
                room = _PIECE
            groups[-1].append(slot)
            room -= n
        pieces += [dataclasses.replace(batch, slots=slots) for slots in groups]
    return others, pieces
