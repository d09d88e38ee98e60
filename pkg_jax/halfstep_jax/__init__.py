"""Low-precision optimizer steps for JAX and Optax: stochastic rounding, and state of 4 to 16 bits."""

from typing import TYPE_CHECKING, NoReturn

from halfstep.requirements import needs

needs("halfstep_jax", "jax", "jax", "optax")

from halfstep import recipes
from halfstep.other_names import no_attribute
from halfstep.public_names import name_by_package
from halfstep.random_words import Role, leaf_id
from halfstep.rule import Rule, decay_rate, moment, number, option
from halfstep.version import __version__ as __version__
from halfstep_jax.checkpoint.float32_weights import float32_params, set_float32_params
from halfstep_jax.checkpoint.optax_state import from_optax, to_optax
from halfstep_jax.checkpoint.save_state import load_state, save_state
from halfstep_jax.checkpoint.weights_in_codes import StoredParam, decode_params, stored_params
from halfstep_jax.gradients.accumulation import AccumulateGradientsState, accumulate_gradients
from halfstep_jax.integrations.config import from_config
from halfstep_jax.meshes.in_shard_map import in_shard_map
from halfstep_jax.meshes.state_shardings import state_shardings
from halfstep_jax.numbers.random_words import random_words
from halfstep_jax.numbers.rounding import round_to
from halfstep_jax.numbers.schedules import ScheduleState
from halfstep_jax.report.description import describe
from halfstep_jax.report.diagnosis import diagnose
from halfstep_jax.report.memory_report import memory_report
from halfstep_jax.report.monitor import Monitor
from halfstep_jax.rules.adafactor import (
    adafactor,
    clip_by_block_rms,
    scale_by_factored_rms,
    scale_by_param_block_rms,
)
from halfstep_jax.rules.adam import ScaleByAdamState, adam, adamw, scale_by_adam
from halfstep_jax.rules.adan import adan, scale_by_adan
from halfstep_jax.rules.ademamix import ademamix, scale_by_ademamix
from halfstep_jax.rules.clip import clip_by_global_norm
from halfstep_jax.rules.lamb import lamb, lamb16
from halfstep_jax.rules.learning_rate import scale_by_learning_rate
from halfstep_jax.rules.lion import ScaleByLionState, lion, scale_by_lion
from halfstep_jax.rules.muon import (
    MatrixAxes,
    NormalizeRowsState,
    ScaleByMuonState,
    muon,
    muon_labels,
    scale_by_muon,
)
from halfstep_jax.rules.rms import scale_by_rms
from halfstep_jax.rules.rule_check import check_rule
from halfstep_jax.rules.schedule_free import scale_by_schedule_free
from halfstep_jax.rules.skip_nonfinite import SkipNonfiniteState, skip_nonfinite
from halfstep_jax.rules.store_state import StoreStateState, store_state
from halfstep_jax.rules.trace import TraceState, sgd, trace
from halfstep_jax.rules.trust_ratio import scale_by_trust_ratio
from halfstep_jax.rules.weight_decay import add_decayed_weights
from halfstep_jax.schedule_free import schedule_free_adamw, schedule_free_eval_params
from halfstep_jax.storage.formats import Format
from halfstep_jax.storage.relative import relative
from halfstep_jax.storage.state_dtypes import codebook, scaled
from halfstep_jax.transform import as_transform
from halfstep_jax.update_params import update_params
from halfstep_jax.weight_averages import EmaParamsState, ema_params
from halfstep_jax.weights.cast import cast_params
from halfstep_jax.weights.cast_updates import cast_updates
from halfstep_jax.weights.chain_check import chain, check_chain
from halfstep_jax.weights.narrow_weights import (
    CompensateState,
    RoundStochasticallyState,
    apply_updates,
    compensate,
    round_stochastically,
)
from halfstep_jax.weights.weight_storage import store_params
from halfstep_jax.weights.wide_weights import (
    KeepMasterParamsState,
    SplitParamsState,
    keep_master_params,
    split_params,
)

__all__ = [
    "AccumulateGradientsState",
    "CompensateState",
    "EmaParamsState",
    "Format",
    "KeepMasterParamsState",
    "MatrixAxes",
    "Monitor",
    "NormalizeRowsState",
    "Role",
    "RoundStochasticallyState",
    "Rule",
    "ScaleByAdamState",
    "ScaleByLionState",
    "ScaleByMuonState",
    "ScheduleState",
    "SkipNonfiniteState",
    "SplitParamsState",
    "StoreStateState",
    "StoredParam",
    "TraceState",
    "accumulate_gradients",
    "adafactor",
    "adam",
    "adamw",
    "adan",
    "add_decayed_weights",
    "ademamix",
    "apply_updates",
    "as_transform",
    "cast_params",
    "cast_updates",
    "chain",
    "check_chain",
    "check_rule",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "codebook",
    "compensate",
    "decay_rate",
    "decode_params",
    "describe",
    "diagnose",
    "ema_params",
    "float32_params",
    "from_config",
    "from_optax",
    "in_shard_map",
    "keep_master_params",
    "lamb",
    "lamb16",
    "leaf_id",
    "lion",
    "load_state",
    "memory_report",
    "moment",
    "muon",
    "muon_labels",
    "number",
    "option",
    "random_words",
    "recipes",
    "relative",
    "round_stochastically",
    "round_to",
    "save_state",
    "scale_by_adam",
    "scale_by_adan",
    "scale_by_ademamix",
    "scale_by_factored_rms",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_param_block_rms",
    "scale_by_rms",
    "scale_by_schedule_free",
    "scale_by_trust_ratio",
    "scaled",
    "schedule_free_adamw",
    "schedule_free_eval_params",
    "set_float32_params",
    "sgd",
    "skip_nonfinite",
    "split_params",
    "state_shardings",
    "store_params",
    "store_state",
    "stored_params",
    "to_optax",
    "trace",
    "update_params",
]
name_by_package(globals(), __all__)

if not TYPE_CHECKING:  # a checker knows what there is

    def __getattr__(name: str) -> NoReturn:
        """Raise AttributeError, with the name that users of other libraries look for."""
        raise no_attribute(__name__, name, __all__)


def __dir__() -> list[str]:
    """Let completion offer public names and adapters alone."""
    return [*__all__, "integrations", "__version__"]
