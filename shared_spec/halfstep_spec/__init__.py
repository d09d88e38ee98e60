"""The halfstep contract as code: NumPy only, slow and obvious.

The prose is in `shared_spec/README.md`; the golden vectors beside it are generated from here.

>>> import numpy as np
>>> from halfstep_spec import round_to
>>> hex(round_to(np.float32([1.001]), "bfloat16")[0])
'0x3f80'
"""

from halfstep_spec.gradients.accumulation import accumulate
from halfstep_spec.numbers.float_formats import FLOAT_FORMATS
from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.numbers.norms import norm
from halfstep_spec.numbers.random_words import (
    Role,
    fold,
    leaf_id,
    leaf_key,
    random_words,
    role_of,
    threefry2x32,
)
from halfstep_spec.numbers.rounding import decode, round_to
from halfstep_spec.rule import Moment, Rule, RuleState, moment
from halfstep_spec.rules import RULES
from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.lamb import Lamb
from halfstep_spec.rules.learning_rate import ScaleByLearningRate
from halfstep_spec.rules.lion import ScaleByLion
from halfstep_spec.rules.step import Step, StepState
from halfstep_spec.rules.store_state import StoreState
from halfstep_spec.rules.trace import Trace
from halfstep_spec.rules.trust_ratio import ScaleByTrustRatio, scale_by_tempered_trust_ratio
from halfstep_spec.rules.weight_decay import AddDecayedWeights
from halfstep_spec.storage.codes import CODEBOOK_CODES, PLAIN_CODES, SCALED_CODES
from halfstep_spec.storage.formats import Encoded, Format
from halfstep_spec.storage.relative import relative
from halfstep_spec.storage.state_dtypes import as_format, codebook, scaled
from halfstep_spec.storage.stored_moment import StoredMoment
from halfstep_spec.weight_averages import ema_params
from halfstep_spec.weights.narrow_weights import Compensate, RoundStochastically
from halfstep_spec.weights.split_weights import SplitWeight, nearest_away
from halfstep_spec.weights.weight_rule import NearestWeights, WeightRule, apply_updates
from halfstep_spec.weights.weight_storage import PARAM_STORAGES, param_storage
from halfstep_spec.weights.wide_weights import KeepMasterParams, SplitParams

SPEC_VERSION = 4

__all__ = [
    "CODEBOOK_CODES",
    "FLOAT_FORMATS",
    "PARAM_STORAGES",
    "PLAIN_CODES",
    "RULES",
    "SCALED_CODES",
    "SPEC_VERSION",
    "AddDecayedWeights",
    "Compensate",
    "Encoded",
    "Format",
    "KeepMasterParams",
    "Lamb",
    "Moment",
    "NearestWeights",
    "Role",
    "RoundStochastically",
    "Rule",
    "RuleState",
    "ScaleByAdam",
    "ScaleByLearningRate",
    "ScaleByLion",
    "ScaleByTrustRatio",
    "SplitParams",
    "SplitWeight",
    "Step",
    "StepState",
    "StoreState",
    "StoredMoment",
    "Trace",
    "WeightRule",
    "accumulate",
    "apply_updates",
    "as_format",
    "bias_correction",
    "codebook",
    "decode",
    "ema",
    "ema_params",
    "fold",
    "leaf_id",
    "leaf_key",
    "moment",
    "nearest_away",
    "norm",
    "param_storage",
    "random_words",
    "relative",
    "role_of",
    "round_to",
    "scale_by_tempered_trust_ratio",
    "scaled",
    "threefry2x32",
]
