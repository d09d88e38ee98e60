"""Rows of many spans, packed into shared memory and copied back."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from halfstep_torch.engine.for_each import for_each
from halfstep_torch.engine.rows import Rows, Span, alias, kernel_dtype
from halfstep_torch.engine.slots import Slot
from halfstep_torch.engine.stage import Stage

# Kinds of arrays beside those of the state, whose names are not empty.
_P, _G, _U = ("", "p"), ("", "g"), ("", "u")


class PackedRows(Rows):
    """Rows of many spans, packed into shared memory and copied back."""

    def __init__(self, stage: Stage, spans: Sequence[Span], slots: Sequence[Slot], memory: "Memory") -> None:
        super().__init__(stage, spans, memory.device, min_rows=2)
        counts = [span.rows(stage.width) for span in spans]
        self._ends = list(itertools.accumulate(counts))
        self._elements = [span.of(slots[span.slot].param.detach(), span.length) for span in spans]
        self.p, self._p = self._matrix(memory, _P, self._elements)
        self.g, self._g = self._matrix(memory, _G, self._elements)
        if not stage.applies:
            self.u, self._u = self._matrix(memory, _U, self._elements)
        self._entries = [
            [span.of(slots[span.slot].state[name], _entries(slots[span.slot], name, span)) for span in spans]
            for name in stage.arrays
        ]
        located = [self._matrix(memory, *array) for array in zip(stage.arrays, self._entries, strict=True)]
        self.state, self._views = [matrix for matrix, _ in located], [views for _, views in located]
        self._fills = any(span.short for span in spans)
        whole = zip(spans, self._elements, strict=True)
        self._whole = all(
            x.numel() == slots[span.slot].param.numel() and span.box is None for span, x in whole
        )

    def _matrix(
        self, memory: "Memory", name: str | tuple, parts: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the matrix for one kind of array, and its views for each span."""
        matrix = memory.matrix(name, len(self))
        rows = matrix.view(len(self), -1)
        located = zip(self.spans, [0, *self._ends], self._ends, parts, strict=False)
        return matrix, [span.within(rows[start:stop], x) for span, start, stop, x in located]

    def load(self, incoming: Mapping[int, Tensor], outgoing: Mapping[int, Tensor] | None) -> None:
        """Copy everything into the matrices."""
        if self._fills:
            for matrix in (self.p, self.g, *self.state):
                matrix.zero_()  # what fills a block up must not be its largest element
        for_each("copy_", self._p, self._elements)
        for_each("copy_", self._g, self._parts(incoming))
        for views, entries in zip(self._views, self._entries, strict=True):
            for_each("copy_", views, entries)

    def write_back(self, outgoing: Mapping[int, Tensor] | None) -> None:
        """Copy what was changed back."""
        if outgoing is None:
            for_each("copy_", self._elements, self._p)
        else:
            for_each("copy_", self._parts(outgoing), self._u)
        for spec, views, entries in zip(self.stage.arrays.values(), self._views, self._entries, strict=True):
            for_each("copy_", entries, views)
            if spec.packed_of and self._fills:
                _clear_half_bytes(self.spans, entries)

    def write_scales_back(self) -> None:
        """Copy scales back, and nothing else."""
        for spec, views, entries in zip(self.stage.arrays.values(), self._views, self._entries, strict=True):
            if spec.scale_of:
                for_each("copy_", entries, views)

    def _parts(self, arrays: Mapping[int, Tensor]) -> list[Tensor]:
        if self._whole:
            return [arrays[span.slot] for span in self.spans]
        return [span.of(arrays[span.slot], span.length) for span in self.spans]


class Memory:
    """Memory for packed rows, which the packs use in turn."""

    def __init__(self, stage: Stage, rows: int, device: torch.device, grad_dtype: torch.dtype, wide: bool):
        self.device, self.grad_dtype = device, grad_dtype
        self._per_row: dict[str | tuple, int] = dict.fromkeys((_P, _G, _U), stage.width)
        dtypes: dict[str | tuple, torch.dtype] = {_P: stage.dtype, _G: grad_dtype, _U: torch.float32}
        self._flat = {name for name, spec in stage.arrays.items() if spec.scale_of}
        for name, spec in stage.arrays.items():
            self._per_row[name] = spec.size(stage.width)
            dtypes[name] = kernel_dtype(spec.dtype, device) if wide else spec.dtype
        self._memory = {
            name: torch.zeros(rows * self._per_row[name], dtype=dtype, device=device)
            for name, dtype in dtypes.items()
            if name != _U or not stage.applies
        }

    def matrices(self, rows: int) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Return the first rows of weights, incoming update, outgoing update if any, and state."""
        u = self.matrix(_U, rows) if _U in self._memory else None
        state = [self.matrix(name, rows) for name in self._per_row if name not in (_P, _G, _U)]
        return self.matrix(_P, rows), self.matrix(_G, rows), u, state

    def matrix(self, name: str | tuple, rows: int) -> Tensor:
        """Return the first rows of an array; scales are in one row."""
        per_row = self._per_row[name]
        return alias(self._memory[name], 0, (rows * per_row,) if name in self._flat else (rows, per_row))


def _entries(slot: Slot, name: str, span: Span) -> int:
    """Return the number of entries of a state array that belong to a span."""
    return slot.plan.arrays[name].size(span.length)


def _clear_half_bytes(spans: Sequence[Span], entries: Sequence[Tensor]) -> None:
    """Clear the unused half bytes of 4-bit codes in runs of odd length."""
    for span, codes in zip(spans, entries, strict=True):
        if span.short and span.short.unit % 2:
            codes.view(span.length // span.short.unit, -1)[:, -1] &= 15
