"""Low-precision optimizer steps for PyTorch: transforms that compose, and the same bits everywhere.

>>> import torch, halfstep_torch as hs
>>> model = torch.nn.Linear(4, 2).to(torch.bfloat16)
>>> optimizer = hs.AdamW(model.named_parameters(), lr=1e-3, weight_decay=0.1, seed=0)
>>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
>>> optimizer.step(zero_grad=True)
"""

from typing import TYPE_CHECKING, NoReturn

from halfstep.requirements import needs

needs("halfstep_torch", "torch", "torch")

from halfstep import Rule, decay_rate, moment, number, option, recipes
from halfstep.other_names import no_attribute
from halfstep.public_names import name_by_package
from halfstep.random_words import Role, leaf_id
from halfstep.version import __version__ as __version__
from halfstep_torch import integrations as integrations
from halfstep_torch.checkpoint.float32_state import float32_state_dict, load_float32_state_dict
from halfstep_torch.checkpoint.float32_weights import float32_params, set_float32_params
from halfstep_torch.checkpoint.save_state import load_state, save_state
from halfstep_torch.checkpoint.weights_in_codes import StoredParam, stored_params
from halfstep_torch.gradients.accumulation import accumulate_gradients
from halfstep_torch.gradients.release import release_gradients
from halfstep_torch.integrations.config import from_config
from halfstep_torch.integrations.foreign import round_weights
from halfstep_torch.integrations.weight_averages import ema_params
from halfstep_torch.leaves.found_names import register_names
from halfstep_torch.links.chain import chain
from halfstep_torch.numbers.random_words import random_words
from halfstep_torch.numbers.rounding import round_to
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.report.description import describe
from halfstep_torch.report.diagnosis import diagnose
from halfstep_torch.report.memory_report import memory_report
from halfstep_torch.report.monitor import Monitor
from halfstep_torch.rules.adafactor import (
    Adafactor,
    clip_by_block_rms,
    scale_by_factored_rms,
    scale_by_param_block_rms,
)
from halfstep_torch.rules.adam import Adam, AdamW, scale_by_adam
from halfstep_torch.rules.adan import Adan, scale_by_adan
from halfstep_torch.rules.ademamix import AdEMAMix, scale_by_ademamix
from halfstep_torch.rules.clip import clip_by_global_norm, clip_grad_norm_
from halfstep_torch.rules.lamb import Lamb, Lamb16
from halfstep_torch.rules.learning_rate import preheat, scale_by_learning_rate
from halfstep_torch.rules.lion import Lion, scale_by_lion
from halfstep_torch.rules.muon import Muon, scale_by_muon
from halfstep_torch.rules.muon_split import MatrixAxes, muon_groups
from halfstep_torch.rules.rms import scale_by_rms
from halfstep_torch.rules.rule_check import check_rule
from halfstep_torch.rules.schedule_free import (
    AdamWScheduleFree,
    scale_by_schedule_free,
    schedule_free_eval_params,
)
from halfstep_torch.rules.store_state import store_state
from halfstep_torch.rules.trace import SGD, trace
from halfstep_torch.rules.trust_ratio import scale_by_trust_ratio
from halfstep_torch.rules.weight_decay import add_decayed_weights
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.relative import relative
from halfstep_torch.storage.state_dtypes import codebook, scaled
from halfstep_torch.weights.cast import cast_model
from halfstep_torch.weights.narrow_weights import compensate, round_stochastically
from halfstep_torch.weights.wide_weights import keep_master_params, split_params

__all__ = [
    "SGD",
    "AdEMAMix",
    "Adafactor",
    "Adam",
    "AdamW",
    "AdamWScheduleFree",
    "Adan",
    "Format",
    "Lamb",
    "Lamb16",
    "Lion",
    "MatrixAxes",
    "Monitor",
    "Muon",
    "Optimizer",
    "Role",
    "Rule",
    "StoredParam",
    "accumulate_gradients",
    "add_decayed_weights",
    "cast_model",
    "chain",
    "check_rule",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_grad_norm_",
    "codebook",
    "compensate",
    "decay_rate",
    "describe",
    "diagnose",
    "ema_params",
    "float32_params",
    "float32_state_dict",
    "from_config",
    "keep_master_params",
    "leaf_id",
    "load_float32_state_dict",
    "load_state",
    "memory_report",
    "moment",
    "muon_groups",
    "number",
    "option",
    "preheat",
    "random_words",
    "recipes",
    "register_names",
    "relative",
    "release_gradients",
    "round_stochastically",
    "round_to",
    "round_weights",
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
    "schedule_free_eval_params",
    "set_float32_params",
    "split_params",
    "store_state",
    "stored_params",
    "trace",
]
name_by_package(globals(), __all__)

if not TYPE_CHECKING:  # type checkers find all names themselves

    def __getattr__(name: str) -> NoReturn:
        """Raise AttributeError, with our name for one from another library."""
        raise no_attribute(__name__, name, __all__)


def __dir__() -> list[str]:
    """Return only public names and adapters, for completion."""
    return [*__all__, "integrations", "__version__"]
