"""A step of a batch as two launches that read all they need on the device, so a CUDA graph can replay it.

    launch 1   count; make keys, numbers and the rows of gradients (`triton_numbers.py`)
    launch 2   the step's kernel

Addresses of gradients, and hyperparameters that are not tensors on the device, are in pinned memory, which
launch 1 reads over the bus. Each capture has its own row of this memory, which is never written again, so
replays read the values of the capture.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep.rule import declared
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.groups import is_there, number_of
from halfstep_torch.engine.kernels.ahead_kernel import ahead_kernel_of
from halfstep_torch.engine.kernels.triton_kernel import Resident, TritonKernel
from halfstep_torch.engine.step_numbers import leaves_of
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.numbers.random_words import as_int32

_SPARE = 16
"""Rows of pinned memory allocated at once, because captures cannot allocate any."""


class _Number(NamedTuple):
    """A hyperparameter of a link, with the group's entry and its index if the entry has several numbers."""

    link: int
    field: str
    key: str
    index: int | None


class Ahead:
    """The two launches of a batch, and their tables on the device.

    Attributes:
        caller: the name in messages.
    """

    def __init__(self, batch: Batch, kernel: TritonKernel) -> None:
        """Make the tables, and compare the words of the next step with the host's.

        Raises:
            NoGeneratedForm: if the numbers of a link need the host.
            RuntimeError: if the words differ.
        """
        self._batches, self._device, self._count = [batch], batch.device, len(batch.slots)
        self.caller, self._group = batch.group.caller, batch.group.index
        self._frozen: dict[tuple[str, int | None], object] = {}
        links = [batch.group.links[j] for j in batch.plan.rule_indices]
        fields = [tuple(declared(type(link.rule)).numbers) for link in links]
        self._numbers = [
            _Number(j, field, entry.key, entry.index)
            for j, names in zip(batch.plan.rule_indices, fields, strict=True)
            for field in names
            for entry in batch.group.links[j].entry_fields
            if entry.field == field
        ]
        addresses = batch.gradient_addresses()
        keys, numbers, which = batch.inputs(0, batch.all_places, batch.late_numbers(0))
        table = batch.table(0, batch.all_places, addresses, None)
        self._step: Resident = kernel.resident(table, len(keys) + numbers.shape[1])
        streams = tuple(stream._replace(seed=0, prefix="") for stream in batch.plan.streams)
        self._kernel = ahead_kernel_of(tuple(links), tuple(fields), streams, self._step.arrays)
        self._leaves = self._put(_leaves(batch))
        self._counts = self._put([slot.counter.data_ptr() for slot in batch.slots])
        self._fast = self._put(self._step.tables.fast.astype(np.int32))
        self._spare: list[Tensor] = []
        self._captured: list[Tensor] = []
        self._make_room()
        self._turns: list[tuple[Tensor, torch.Event | None]] = [(self._spare.pop(), None) for _ in range(2)]
        self._content, self._turn = np.zeros(0, np.int64), 0
        self._compare(addresses, keys, numbers, which)

    def _put(self, values: object) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self._device)

    def _make_room(self) -> None:
        """Allocate rows of pinned memory, each at an address aligned for Triton."""
        if len(self._spare) < _SPARE // 2:
            width = 1 + 2 * len(self._numbers) + self._count
            pinned = self._device.type == "cuda"
            rows = torch.zeros(_SPARE, width + width % 2, dtype=torch.int64, pin_memory=pinned)
            self._spare += rows.unbind()

    def run(self, addresses: np.ndarray, *, capturing: bool) -> None:
        """Step the batch, given the addresses of its gradients.

        Raises:
            RuntimeError: if too many captures follow each other without a step in between.
        """
        given = self._given_captured(addresses) if capturing else self._given(addresses)
        self._launch(given, self._counts)
        self._step.launch()
        if not capturing and self._device.type == "cuda":
            event = torch.cuda.current_stream(self._device).record_event()
            self._turns[self._turn] = given, event

    def reads(self, addresses: np.ndarray) -> bool:
        """Whether the last step read gradients at these addresses."""
        return np.array_equal(self._content[len(self._content) - self._count :], addresses)

    def changed(self, groups: Sequence[Group]) -> tuple[str, object, object] | None:
        """Return a number written after the capture, as (entry, value in replays, new value)."""
        for (key, index), before in self._frozen.items():
            now = number_of(groups[self._group], key, index)
            if now != before:
                return key, before, now
        return None

    def _host_numbers(self) -> dict[tuple[str, int | None], object]:
        """Return the hyperparameters of the group that are not on the device."""
        found = {
            (x.key, x.index): number_of(self._batches[0].group.entries, x.key, x.index) for x in self._numbers
        }
        return {key: x for key, x in found.items() if isinstance(x, (int, float))}

    def _launch(self, given: Tensor, counts: Tensor) -> None:
        step = self._step
        self._kernel((given, step.rows, step.words, counts, self._leaves, self._fast), self._count)

    def _given(self, addresses: np.ndarray) -> Tensor:
        """Return the row that the next launch reads."""
        self._make_room()
        content = self._read(addresses)
        if not np.array_equal(content, self._content):
            self._turn = 1 - self._turn
            row, event = self._turns[self._turn]
            if event is not None:
                event.synchronize()
            row.numpy()[: len(content)] = content
            self._content = content
        return self._turns[self._turn][0]

    def _given_captured(self, addresses: np.ndarray) -> Tensor:
        if not self._spare:
            raise RuntimeError(
                f"{self.caller}: {len(self._captured)} captures were made since the last step "
                "outside of one. Make such a step before the next capture."
            )
        row, content = self._spare.pop(), self._read(addresses)
        row.numpy()[: len(content)] = content
        self._captured.append(row)
        self._frozen = self._host_numbers()
        return row

    def _read(self, addresses: np.ndarray) -> np.ndarray:
        """Return the host's values for launch 1."""
        group = self._batches[0].group
        entries, values = group.entries, group.values
        places, patterns = [], []
        for number in self._numbers:
            x = number_of(entries, number.key, number.index)
            there = is_there(x, self._device)
            places.append(x.data_ptr() if there else 0)
            value = np.float32(0 if there else getattr(values[number.link], number.field))
            patterns.append(int(value.view(np.int32)))
        return np.concatenate([[1], places, patterns, addresses]).astype(np.int64)

    def _compare(
        self, addresses: np.ndarray, keys: np.ndarray, numbers: np.ndarray, which: np.ndarray | None
    ) -> None:
        """Raise RuntimeError unless launch 1 makes the host's words, on counts that it may overwrite."""
        counts = torch.stack([slot.counter for slot in self._batches[0].slots])
        places = counts.data_ptr() + counts.itemsize * np.arange(self._count)
        self._launch(self._given(addresses), self._put(places))
        expected = np.zeros(self._step.words.numel(), np.int32)
        self._step.tables.write_words(keys, numbers, which, expected)
        if (self._step.words.cpu().numpy().reshape(-1) != expected).any():
            raise RuntimeError(
                f"{self.caller}: capturable=True, but this device makes other numbers of a step "
                "than the host. Use capturable=False, and report the device."
            )

    def drop(self) -> None:
        """Make replays change nothing, because their memory may be reused from now on.

        Their tables are kept, and the parameters and their state may be freed.
        """
        if self._captured and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for row in self._captured:
            row[0] = 0
        self._batches.clear()


def _leaves(batch: Batch) -> np.ndarray:
    """Return the leaf and the seed of each stream, a row for each parameter."""
    streams = batch.plan.streams
    leaves = leaves_of(streams, [slot.name for slot in batch.slots])
    columns = [
        [of_stream, np.full_like(of_stream, stream.seed >> 32), np.full_like(of_stream, stream.seed % 2**32)]
        for stream, of_stream in zip(streams, leaves, strict=True)
    ]
    empty = np.zeros((len(batch.slots), 1), np.uint32)
    return as_int32(np.concatenate([np.stack(x, 1) for x in columns], 1) if columns else empty)
