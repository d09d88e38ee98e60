"""A class for LeRobot: `optimizer.type=halfstep` in its configs. Importing this imports lerobot."""

import dataclasses
from typing import Any

import torch
from lerobot.optim.optimizers import OptimizerConfig  # pyright: ignore[reportMissingImports]

from halfstep_torch.integrations.config import from_config


@OptimizerConfig.register_subclass("halfstep")
@dataclasses.dataclass
class HalfstepConfig(OptimizerConfig):
    """An optimizer by name, with the arguments in LeRobot's configs.

    Attributes:
        lr: the learning rate.
        weight_decay: the decay, as in the optimizer.
        grad_clip_norm: the maximum norm in LeRobot's clipping.
        optimizer: its name, as in `from_config`.
        recipe: the name of one of `recipes`, or None.
        seed: the seed of the random words.
    """

    lr: float = 1e-3
    weight_decay: float = 1e-2
    grad_clip_norm: float = 10.0
    optimizer: str = "AdamW"
    recipe: str | None = None
    seed: int = 0

    def build(self, params: Any) -> Any:  # as lerobot declares
        """Return the optimizer of parameters, or of each list of a dict of lists (SAC's actor and critic)."""
        if isinstance(params, dict) and not any(isinstance(x, torch.Tensor) for x in params.values()):
            return {name: self.build(part) for name, part in params.items()}
        chosen = {key: getattr(self, key) for key in ("lr", "weight_decay", "recipe", "seed")}
        return from_config({**chosen, "name": self.optimizer})(
            params.items() if isinstance(params, dict) else params
        )
