"""What both training scripts share: the model's shape, its first weights, the rows, what a run reports.

NumPy alone. The two frameworks start from the same weights, see the same batches and use the same
hyperparameters. So a row of JAX can be compared with the same row of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Recipe:
    """The model and its training. 3e-4 is a usual learning rate, and bfloat16 weights stall at it."""

    layers: int = 2
    heads: int = 3
    width: int = 96
    context: int = 32
    batch: int = 32
    steps: int = 800
    learning_rate: float = 3e-4
    weight_decay: float = 0.01
    validation_windows: int = 256
    evaluations: int = 24
    seed: int = 0

    def evaluates_after(self, step: int) -> bool:
        """Whether the validation loss is read after `step` updates: evenly, the last one included."""
        return step == self.steps or step % max(1, self.steps // self.evaluations) == 0


@dataclass(frozen=True)
class Row:
    """One way to keep the weights: a dtype, and how an update is applied to it."""

    name: str
    dtype: Literal["float32", "bfloat16"]
    rounding: Literal["none", "nearest", "stochastic"]


FLOAT32 = Row("float32", "float32", "none")
NEAREST = Row("bfloat16, nearest", "bfloat16", "nearest")
STOCHASTIC = Row("bfloat16, stochastic", "bfloat16", "stochastic")
ROWS = (FLOAT32, NEAREST, STOCHASTIC)


@dataclass
class Outcome:
    """What one run of one row in one framework reports."""

    framework: str
    row: str
    steps: list[int] = field(default_factory=list)  # updates done when each loss below was read
    losses: list[float] = field(default_factory=list)  # validation loss, nats per character
    parameters: int = 0
    bytes_per_parameter: float = 0.0  # weights and optimizer state, counted from the arrays themselves
    never_moved: float = 0.0  # share of the weights that no update of the run changed
    batches_crc32: int = 0  # of all batches in their order, to show that all runs saw the same
    seconds: float = 0.0


def initial_weights(recipe: Recipe, vocabulary: int) -> dict[str, np.ndarray]:
    """Draw the first weights: normal with standard deviation 1/sqrt(fan in), ones for the norms.

    Every layer of the model has one array, named by the layer's path; a matrix is (inputs, outputs), as Flax
    has it. The low half of each float32 is cleared, so that bfloat16 holds the values too and all rows start
    from the same point.

    Returns:
        The arrays, float32, by path.
    """
    generator = np.random.default_rng([recipe.seed, 1])  # not the stream of the batches

    def normal(fan_in: int, *shape: int) -> np.ndarray:
        drawn = (generator.standard_normal(shape) / np.sqrt(fan_in)).astype(np.float32)
        return (drawn.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    width = recipe.width
    weights = {
        "token": normal(width, vocabulary, width),
        "position": normal(width, recipe.context, width),
    }
    for i in range(recipe.layers):
        weights |= {
            f"blocks/{i}/norm1": np.ones(width, np.float32),
            f"blocks/{i}/qkv": normal(width, width, 3 * width),
            f"blocks/{i}/out": normal(width, width, width),
            f"blocks/{i}/norm2": np.ones(width, np.float32),
            f"blocks/{i}/up": normal(width, width, 4 * width),
            f"blocks/{i}/down": normal(4 * width, 4 * width, width),
        }
    weights["norm"] = np.ones(width, np.float32)
    weights["head"] = normal(width, width, vocabulary)
    return weights
