"""What the tests of compiled steps share: models of many shapes, and graphs."""

import itertools

import pytest
import torch
from torch._dynamo.utils import counters

from on_torch.steps import parameters

# Inductor's modules warn, as they are imported, of what torch itself has deprecated.
IMPORTS_INDUCTOR = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def shapes() -> list[tuple[int, ...]]:
    """Return 30 distinct shapes of ranks 0 to 4."""
    lengths = [(), (1,), (2,), (7,), (64,), (1000,)]
    grids = [(a, b) for a, b in itertools.product((1, 3, 64, 130), (1, 5, 64))]
    kernels = [(8, c, k, k) for c, k in itertools.product((1, 3, 8), (1, 3))]
    return [*lengths, *grids, *kernels, (2, 3, 4), (5, 1, 7), (1, 1, 1), (16, 4, 4), (4, 4, 16), (70000,)]


def model(count: int, dtype=torch.bfloat16) -> list[tuple[str, torch.nn.Parameter]]:
    cycle = itertools.cycle(shapes())
    return parameters(dtype, {f"layer.{i}": next(cycle) for i in range(count)})
