"""torch.optim.AdamW, held against the contract.

python -m halfstep_spec.check examples/adapters/torch_adamw.py
"""

import torch
from torch_steps import asks_for_adamw, take_steps


def adam_step(case):
    """Steps of AdamW, with state in the dtype of the weights."""
    if not asks_for_adamw(case):
        raise NotImplementedError("formats, roundings and weight storages that it does not have")
    return take_steps(case, torch.optim.AdamW, ("exp_avg", "exp_avg_sq"))
