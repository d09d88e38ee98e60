"""The ways to store a weight, by the name that `param_storage` has for each. Contract: section P."""

import functools
from collections.abc import Callable

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS
from halfstep_spec.weights.narrow_weights import Compensate, RoundStochastically
from halfstep_spec.weights.weight_rule import NearestWeights, WeightRule
from halfstep_spec.weights.wide_weights import KeepMasterParams, SplitParams

PARAM_STORAGES: dict[str, Callable[[str], WeightRule]] = {
    "stochastic": RoundStochastically,
    "nearest": NearestWeights,
    "compensated": Compensate,
    "split8": functools.partial(SplitParams, extra_bits=8),
    "split16": functools.partial(SplitParams, extra_bits=16),
    "master": KeepMasterParams,
}
"""By name: the storage of weights of a dtype."""


def param_storage(name: str, dtype: str) -> WeightRule:
    """Return how weights of a dtype are stored; float32 and wider weights need no storage (contract P6)."""
    wide = FLOAT_FORMATS[dtype].bits == 32
    return NearestWeights(dtype) if wide else PARAM_STORAGES[name](dtype)
