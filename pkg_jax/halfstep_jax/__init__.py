"""Low-precision optimizer steps for JAX and Optax: stochastic rounding and 16-bit states."""

from halfstep_jax.adam import ScaleByAdamState, scale_by_adam
from halfstep_jax.aliases import adam, adamw, lion, sgd
from halfstep_jax.float32_params import float32_params, set_float32_params
from halfstep_jax.formats import mapped, scaled
from halfstep_jax.lamb import lamb, lamb16
from halfstep_jax.learning_rate import scale_by_learning_rate
from halfstep_jax.lion import ScaleByLionState, scale_by_lion
from halfstep_jax.params import (
    CompensateState,
    RoundStochasticallyState,
    apply_updates,
    compensate,
    round_stochastically,
)
from halfstep_jax.random_words import Role, leaf_id, random_words
from halfstep_jax.rounding import round_to
from halfstep_jax.store_state import StoreStateState, store_state
from halfstep_jax.trace import TraceState, trace
from halfstep_jax.trust_ratio import scale_by_trust_ratio
from halfstep_jax.weight_decay import add_decayed_weights
from halfstep_jax.wide_params import (
    KeepMasterParamsState,
    SplitParamsState,
    keep_master_params,
    split_params,
)

__all__ = [
    "CompensateState",
    "KeepMasterParamsState",
    "Role",
    "RoundStochasticallyState",
    "ScaleByAdamState",
    "ScaleByLionState",
    "SplitParamsState",
    "StoreStateState",
    "TraceState",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "compensate",
    "float32_params",
    "keep_master_params",
    "lamb",
    "lamb16",
    "leaf_id",
    "lion",
    "mapped",
    "random_words",
    "round_stochastically",
    "round_to",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_trust_ratio",
    "scaled",
    "set_float32_params",
    "sgd",
    "split_params",
    "store_state",
    "trace",
]
