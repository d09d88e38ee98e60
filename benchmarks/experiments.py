"""What an experiment is: a row of the comparison, the same for every optimizer.

A function is a row: its docstring is the text above the table. A row that follows a run drives an optimizer
and AdamW in float64 (`runs.Float32Run`) through the same gradients, and compares; Muon is compared with
torch's own on float32 weights.
"""

import dataclasses
import functools
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from peers import Entry
from runs import Float32Run

SHAPE = (128, 128)
Figures = dict[str, float | None]
Bounds = dict[str, tuple[float, float]]
ROWS: list["Row"] = []


@dataclasses.dataclass(frozen=True)
class Row:
    """A failure.

    Attributes:
        key: the function's name, under which a record keeps the figures.
        title: a heading.
        text: what is done, and what the figures are.
        columns: name of a figure -> how it is printed.
        bounds: name of a figure -> the lowest and the highest that are right.
        measure: entry -> figures.
        moment: whether it is about the second moment, which some optimizers do not have.
    """

    key: str
    title: str
    text: str
    columns: dict[str, str]
    bounds: Bounds
    measure: Callable[[Entry], Figures]
    moment: bool

    @property
    def description(self) -> dict:
        """What a record says of it."""
        return {name: getattr(self, name) for name in ("key", "title", "text", "columns", "bounds")}


def experiment(
    title: str, columns: dict[str, str], bounds: Bounds, compare: Callable | None = None, moment=False
):
    """Make a row of a function of an entry or, with `compare`, of one that starts a run and drives it."""

    def register(function: Callable) -> Callable:
        text = " ".join(textwrap.dedent(function.__doc__).split())
        measure = function if compare is None else _followed(function, compare)
        ROWS.append(Row(function.__name__, title, text, columns, bounds, measure, moment))
        return function

    return register


def _followed(drive: Callable[[Callable], Any], compare: Callable[[Any, Any], Figures]) -> Callable:
    truths: dict[str, Any] = {}

    def measure(entry: Entry) -> Figures:
        if entry.rule not in truths:
            alone = functools.partial(entry.start, dtype=torch.float32)
            truths[entry.rule] = drive(Float32Run if entry.rule == "AdamW" else alone)
        return compare(drive(entry.start), truths[entry.rule])

    return measure


def _bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.tensor(x).to(torch.bfloat16).to(torch.float64).numpy()


@functools.cache
def weights() -> np.ndarray:
    """Return first weights, of the size that a transformer begins with."""
    return _bfloat16(np.random.default_rng(0).normal(scale=0.02, size=SHAPE))


@functools.cache
def pool(sigma: float = 1.0, count: int = 16) -> list[np.ndarray]:
    """Return gradients: normal, around 0.01, with a lognormal size of each element."""
    rng = np.random.default_rng(1)
    size = 0.01 * np.exp(sigma * rng.normal(size=SHAPE))
    return [_bfloat16(size * rng.normal(size=SHAPE)) for _ in range(count)]
