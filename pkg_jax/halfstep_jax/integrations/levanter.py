"""A class for Levanter: `optimizer: {type: halfstep}` in its configs. Importing this imports levanter."""

import dataclasses

import optax
from levanter.optim import OptimizerConfig  # pyright: ignore[reportMissingImports]

from halfstep_jax.integrations.config import from_config


@OptimizerConfig.register_subclass("halfstep")
@dataclasses.dataclass(frozen=True)
class HalfstepConfig(OptimizerConfig):
    """An optimizer by name. The schedule, the decay and its mask are Levanter's own.

    Attributes:
        optimizer: its name, as in `from_config`.
        recipe: the name of one of `recipes`, or None.
        seed: of the random words.
    """

    optimizer: str = "adamw"
    recipe: str | None = None
    seed: int = 0

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """Return the Optax transform of a run of `num_train_steps` steps."""
        arguments = {
            "learning_rate": self.lr_scheduler(num_train_steps),
            "weight_decay": self.weight_decay,
            "mask": self.build_weight_decay_mask(),
            "recipe": self.recipe,
            "seed": self.seed,
        }
        return from_config({**arguments, "name": self.optimizer})
