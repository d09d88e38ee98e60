"""torchao's AdamW, which computes in float32 and can round bfloat16 weights stochastically, in eager mode.

python -m halfstep_spec.check examples/adapters/torchao_adamw.py
"""

import functools
from unittest import mock

import torch
from torch_steps import asks_for_adamw, take_steps
from torchao.optim import _AdamW


def adam_step(case):
    """Steps of AdamW, with state in the dtype of the weights."""
    if not asks_for_adamw(case, ("nearest", "stochastic")):
        raise NotImplementedError("formats, roundings and weight storages that it does not have")
    stochastic = case.arguments["param_storage"] == "stochastic"
    make = functools.partial(_AdamW, bf16_stochastic_round=stochastic)
    # It compiles its step; without, it is the same arithmetic, an operation at a time.
    with mock.patch.object(torch, "compile", lambda function, **options: function):
        return take_steps(case, make, ("exp_avg", "exp_avg_sq"))
