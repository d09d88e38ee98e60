"""bitsandbytes' AdamW with 32 bits of state.

python -m halfstep_spec.check examples/adapters/bitsandbytes_adamw.py
"""

import bitsandbytes
from torch_steps import asks_for_adamw, take_steps


def adam_step(case):
    """Steps of AdamW, with float32 state. Its 8-bit state has tables and scales of its own."""
    if not asks_for_adamw(case):
        raise NotImplementedError("formats, roundings and weight storages that it does not have")
    return take_steps(case, bitsandbytes.optim.AdamW32bit, ("state1", "state2"))
