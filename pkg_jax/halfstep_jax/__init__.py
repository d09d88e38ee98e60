"""Low-precision optimizer steps for JAX and Optax: stochastic rounding and 16-bit states."""

from halfstep_jax.adam import ScaleByAdamState, scale_by_adam
from halfstep_jax.aliases import adam, adamw
from halfstep_jax.learning_rate import scale_by_learning_rate
from halfstep_jax.params import RoundStochasticallyState, apply_updates, round_stochastically
from halfstep_jax.random_words import Role, leaf_id, random_words
from halfstep_jax.rounding import round_to
from halfstep_jax.weight_decay import add_decayed_weights

__all__ = [
    "Role",
    "RoundStochasticallyState",
    "ScaleByAdamState",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "leaf_id",
    "random_words",
    "round_stochastically",
    "round_to",
    "scale_by_adam",
    "scale_by_learning_rate",
]
