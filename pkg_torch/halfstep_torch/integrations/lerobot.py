"""A class for LeRobot: `optimizer.type=halfstep` in its configs. Importing this imports lerobot."""

import dataclasses
from typing import Any

import torch
from lerobot.optim.optimizers import OptimizerConfig  # pyright: ignore[reportMissingImports]

from halfstep_torch.config import from_config


@OptimizerConfig.register_subclass("halfstep")
@dataclasses.dataclass
class HalfstepConfig(OptimizerConfig):
    """An optimizer by name, with the arguments that LeRobot's configs have.

    Attributes:
        lr: learning rate.
        weight_decay: as the optimizer has it.
        grad_clip_norm: by which LeRobot clips.
        optimizer: its name, as in `from_config`.
        recipe: the name of one of `recipes`, or None.
        seed: of the random words.
    """

    lr: float = 1e-3
    weight_decay: float = 1e-2
    grad_clip_norm: float = 10.0
    optimizer: str = "AdamW"
    recipe: str | None = None
    seed: int = 0

    def build(self, params: Any) -> torch.optim.Optimizer:
        """Return the optimizer of parameters."""
        chosen = {key: getattr(self, key) for key in ("lr", "weight_decay", "recipe", "seed")}
        given = params.values() if isinstance(params, dict) else params
        return from_config({**chosen, "name": self.optimizer})(given)
