"""The halfstep contract as code: NumPy only, slow and obvious.

The prose is in `shared_spec/README.md`; the golden vectors beside it are generated from here.

>>> import numpy as np
>>> from halfstep_spec import round_to
>>> hex(round_to(np.float32([1.001]), "bfloat16")[0])
'0x3f80'
"""

from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.numbers.norms import norm
from halfstep_spec.numbers.random_words import Role, fold, leaf_id, leaf_key, random_words, threefry2x32
from halfstep_spec.numbers.rounding import decode, round_to
from halfstep_spec.rule import RuleState, UpdateRule
from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.learning_rate import scale_by_learning_rate
from halfstep_spec.rules.lion import ScaleByLion
from halfstep_spec.rules.store_state import StoreState
from halfstep_spec.rules.trace import Trace
from halfstep_spec.rules.trust_ratio import TrustRatio, tempered_trust_ratio
from halfstep_spec.rules.weight_decay import add_decayed_weights
from halfstep_spec.steps import PARAM_STORAGES, Step, StepState
from halfstep_spec.storage.formats import Encoded, Format, as_format, codebook, scaled
from halfstep_spec.storage.stored_moment import StoredMoment
from halfstep_spec.weights.params import (
    SplitWeight,
    apply_updates,
    compensate,
    nearest_away,
    round_stochastically,
)

SPEC_VERSION = 1

__all__ = [
    "PARAM_STORAGES",
    "SPEC_VERSION",
    "Encoded",
    "Format",
    "Role",
    "RuleState",
    "ScaleByAdam",
    "ScaleByLion",
    "SplitWeight",
    "Step",
    "StepState",
    "StoreState",
    "StoredMoment",
    "Trace",
    "TrustRatio",
    "UpdateRule",
    "add_decayed_weights",
    "apply_updates",
    "as_format",
    "bias_correction",
    "codebook",
    "compensate",
    "decode",
    "ema",
    "fold",
    "leaf_id",
    "leaf_key",
    "nearest_away",
    "norm",
    "random_words",
    "round_stochastically",
    "round_to",
    "scale_by_learning_rate",
    "scaled",
    "tempered_trust_ratio",
    "threefry2x32",
]
