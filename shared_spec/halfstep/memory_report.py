"""Bytes of weights, gradients and state of a run, beside AdamW in float32: the counts, and their table."""

import dataclasses
from collections.abc import Mapping

from halfstep.text_table import Report, Row, Table, in_units

FLOAT32_ADAMW = 16
"""Bytes per weight of float32 weights, gradients and the two moments of AdamW."""
WEIGHTS, GRADIENTS = "weights", "gradients"


@dataclasses.dataclass(frozen=True)
class MemoryReport(Report):
    """The result of `memory_report`; `print` and notebooks show it as a table.

    Attributes:
        size: the number of weights.
        nbytes: in all, by content: "weights", "gradients", and arrays of the state by their names.
        per_device: the same on one device; equal where nothing is cut.
        float32: bytes of weights, gradients and both moments of AdamW in float32, in all, and
        float32_per_device: on one device. Of weights that are not stepped, the weights alone.
        parts: reports of parts of the weights, by name: in PyTorch of every param group and, if there are
            any, of weights "not stepped".
        temporaries: bytes beside the totals during a step, on one device. In JAX 0: XLA plans them.
    """

    size: int
    nbytes: Mapping[str, int]
    per_device: Mapping[str, int]
    float32: int
    float32_per_device: int
    parts: Mapping[str, "MemoryReport"] = dataclasses.field(default_factory=dict)
    temporaries: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.nbytes.values())

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state."""
        return self.total - self.nbytes[WEIGHTS] - self.nbytes[GRADIENTS]

    @property
    def total_per_device(self) -> int:
        """All bytes of one device."""
        return sum(self.per_device.values())

    def table(self) -> Table:
        """Return the table."""
        is_cut = self.per_device != self.nbytes
        head = ("", "bytes per weight", "in all", *(["per device"] if is_cut else []))

        def row(name: str, size: int, in_all: int, on_one: int) -> Row:
            per_weight = f"{in_all / size:.3f}" if size else "-"
            return name, per_weight, in_units(in_all), *([in_units(on_one)] if is_cut else [])

        rows = [row(name, self.size, self.nbytes[name], self.per_device[name]) for name in self.nbytes]
        rows.append(row("in all", self.size, self.total, self.total_per_device))
        if len(self.parts) > 1:
            rows += [row(f"  {name}", x.size, x.total, x.total_per_device) for name, x in self.parts.items()]
        if self.temporaries:
            rows.append(row("temporaries of a step", self.size, self.temporaries, self.temporaries))
        rows.append(row("AdamW in float32", self.size, self.float32, self.float32_per_device))
        return Table(head, rows, range(1, len(head)), [self._saved(is_cut)])

    def _saved(self, is_cut: bool) -> str:
        saved = self.float32 - self.total
        here = f", {in_units(self.float32_per_device - self.total_per_device)} per device" if is_cut else ""
        if saved <= 0:
            return "Nothing is saved beside AdamW in float32."
        return f"It saves {in_units(saved)}{here}: {saved / self.float32:.0%} of AdamW in float32."
