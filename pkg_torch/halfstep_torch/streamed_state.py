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

from halfstep_torch.distributed.shards import check_sharding, is_sharded, local_part, window_of
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.run import run_batch
from halfstep_torch.engine.slots import Slot, SlotColumns, count
from halfstep_torch.say_once import say_once
from halfstep_torch.sharded.slots import ShardedSlot, exchanges
from halfstep_torch.sharded.step import ShardedStep

# Elements of a piece: enough for launching kernels to be a small part of running them.
_PIECE = 1 << 24
_ALIGNED = 64


def is_away(device: torch.device) -> bool:
    """Whether weights on a device have their state elsewhere, where that is kept on the host."""
    return device.type not in ("cpu", "meta")


def on_host(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the host, in memory from which a device of weights can copy while it computes."""
    x = x.to("cpu")  # a DTensor keeps its mesh and its placements
    if device.type == "cuda":
        local = local_part(x)
        local.data = local.pin_memory()
    return x


def is_streamed(plan: Plan, param: Tensor) -> bool:
    """Whether the state of a parameter is on the host, where that is asked for.

    It stays beside shards whose steps exchange words: what they wait for stands between two reads of state.
    """
    return is_away(param.device) and not (is_sharded(param) and exchanges(plan, param))


@dataclasses.dataclass(eq=False)
class HostSlot(ShardedSlot):
    """A parameter, or a shard of one, whose state is on the host; or some rows of its first axis here.

    Attributes:
        rows: which are the slot's; None for all.
        host: of each state array what is the slot's, where it is kept; `state` is in an arena.
    """

    rows: slice | None = None
    host: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def home(self) -> torch.device:
        """Where the state is."""
        return torch.device("cpu")

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """Of each state array what is the slot's, on the host: an arena has it while its piece is stepped."""
        return self.host

    @property
    def ends(self) -> bool:
        """Whether the parameter is stepped once the slot is: it has the last rows."""
        return self.rows is None or self.rows.stop == local_part(self.owner).shape[0]

    @property
    def grad(self) -> Tensor:
        """The gradient of the rows, detached."""
        return self._here(super().grad)

    def begin(self, step: int, index: int) -> None:
        """Have the weights of a step, its count, and the place of the parameter in it."""
        super().begin(step, index)
        self.param = self._here(self.param.detach()) if self.rows else self.param

    def attach(self, caller: str, state: MutableMapping[str, Any]) -> None:
        """Have the parameter's state, on the host."""
        super().attach(caller, state)
        self.host = {key: self._here(x) for key, x in self.state.items()}

    def new_arrays(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return some of the state arrays of a parameter that was never stepped: on its device one by one."""
        keys, device = list(keys), self.owner.device
        if is_sharded(self.owner):
            return {key: on_host(super(HostSlot, self).new_arrays([key])[key], device) for key in keys}
        specs = {key: self.whole_plan.arrays[key] for key in keys}
        copies = any(spec.copies_weights or spec.copied_as for spec in specs.values())
        like = self.owner.detach().to("cpu") if copies else torch.empty(self.owner.shape, device="cpu")
        return {key: on_host(spec.new(like), device) for key, spec in specs.items()}

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


class StreamedStep(ShardedStep):
    """The steps of an optimizer whose state is on the host."""

    arena: type[Arena] = Arena

    def __init__(self, caller: str) -> None:
        super().__init__(caller)
        self._arenas: dict[torch.device, tuple[Arena, Arena]] = {}
        self._turns: list[tuple[Batch, Arena | None]] = []
        self._told = False

    def slots_of(self, group: ReadGroup, name: str, param: Tensor) -> Sequence[Slot]:
        """Return the slots of a parameter of a group: of a long one, rows of it each."""
        plan = group.plan(name, param)
        if is_sharded(param):
            check_sharding(group.caller, name, param)
        if not is_streamed(plan, param):
            if is_away(param.device):
                self._tell(name)
            return super().slots_of(group, name, param)
        window = window_of(param)
        # The norm of all gradients adds up those of whole parameters.
        cut = _has_rows(plan, param) and not any(link.measures for link in group.links)
        if not cut or math.prod(window.shape) <= _PIECE:
            return [HostSlot(param, name, plan.within(window), window, all_elements=plan)]
        length, slots = max(_PIECE // math.prod(window.shape[1:]), 1), []
        for first in range(0, window.shape[0], length):
            last = min(first + length, window.shape[0])
            offset, shape = (window.offset[0] + first, *window.offset[1:]), (last - first, *window.shape[1:])
            rows = Window(window.whole, offset, shape)
            here = plan.within(rows)
            slots.append(HostSlot(param, name, here, rows, all_elements=plan, rows=slice(first, last)))
        return slots

    def _tell(self, name: str) -> None:
        if not self._told:
            say_once(
                f"{self._caller}: steps of some shards, such as {name!r}, exchange messages with other "
                "processes, so their state stays beside their weights. To have it on the host, shard first "
                "axes, take formats whose blocks no border cuts, or use CPUOffloadPolicy of fully_shard."
            )
        self._told = True

    @contextlib.contextmanager
    def agreed_batches(self, params: Iterable[Tensor], batches: Sequence[Batch]) -> Iterator[None]:
        """Make the batches of the context smaller: a piece each, with its place in an arena."""
        with super().agreed_batches(params, batches):
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
        super().run([batch for batch, arena in turns if arena is None])
        streamed = [(batch, arena) for batch, arena in turns if arena is not None]
        for i, (batch, arena) in enumerate(streamed):
            for ahead, other in streamed[i : i + 2] if not i else streamed[i + 1 : i + 2]:
                other.fetch(ahead.slots)  # pyright: ignore[reportArgumentType]
            arena.wait()
            run_batch(batch)
            arena.put(batch.slots)  # pyright: ignore[reportArgumentType]
            count([slot for slot in batch.slots if slot.ends])  # pyright: ignore[reportAttributeAccessIssue]
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
        and local_part(param).is_contiguous()
        and all(rule.scope == "elementwise" for rule in plan.rules)
        and all(
            not spec.shape_of and len(spec.shape(shape)) > 1 and spec.shape(shape)[0] == shape[0]
            for spec in plan.arrays.values()
        )
    )


def _pieces(batch: Batch) -> Iterator[Batch]:
    """Yield the slots of a batch whose state is on the host some at a time, and the others together."""
    streamed = [isinstance(slot, HostSlot) for slot in batch.slots]
    pieces = [[place for place, is_host in enumerate(streamed) if not is_host]]
    room = -1
    for place in (place for place, is_host in enumerate(streamed) if is_host):
        n = math.prod(batch.slots[place].window.shape)
        if n > room:
            pieces.append([])
            room = _PIECE
        pieces[-1].append(place)
        room -= n
    for some in filter(None, pieces):
        keys = SlotColumns(batch.keys.columns[:, some].contiguous())
        yield dataclasses.replace(batch, slots=[batch.slots[place] for place in some], keys=keys)
