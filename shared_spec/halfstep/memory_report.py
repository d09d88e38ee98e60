"""Bytes for weights, gradients and state in a run, compared with float32 AdamW, as counts and a table."""

import dataclasses
from collections.abc import Mapping

from halfstep.text_table import Report, Row, Table, in_units

FLOAT32_ADAMW = 16
"""Bytes per weight for float32 weights, gradients and AdamW's two moments."""
WEIGHTS, GRADIENTS = "weights", "gradients"


@dataclasses.dataclass(frozen=True)
class MemoryReport(Report):
    """The result of `memory_report`. `print` and notebooks show it as a table.

    Attributes:
        size: number of weights.
        nbytes: bytes in all by content, which is "weights", "gradients" or the name of a state array.
        per_device: bytes on one device, equal to `nbytes` if no array is sharded.
        float32: bytes for weights, gradients and AdamW's moments in float32. For weights that are not
            stepped, only the weights count.
        float32_per_device: the same bytes on one device.
        parts: reports for parts of the weights, by name. In PyTorch there is a part for every param group
            and, if there are any, for weights "not stepped".
        temporaries: further bytes during a step, on one device. In JAX it is 0, because XLA plans them.
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
        """Number of bytes in all."""
        return sum(self.nbytes.values())

    @property
    def state(self) -> int:
        """Number of bytes in the optimizer's state."""
        return self.total - self.nbytes[WEIGHTS] - self.nbytes[GRADIENTS]

    @property
    def total_per_device(self) -> int:
        """Number of bytes on one device."""
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
