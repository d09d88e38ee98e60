"""The expressions whose rounding XLA changes: on bare tensors torch gives NumPy's bits (A1 to A3)."""

import numpy as np
import pytest
import torch

from halfstep_torch.numbers.op import STEP_OPS
from hazards import HAZARDS, NUMPY, ZERO, C, D, differing, operands

OP = STEP_OPS["elementwise"]


def expected() -> dict[str, np.ndarray]:
    return {name: function(*operands(), C, D, ZERO, NUMPY) for name, (_, function) in HAZARDS.items()}


def all_of(x, y, z, c, d, zero):
    """Return every expression: one program, so that a compiler may gather and fuse what it likes."""
    return [function(x, y, z, c, d, zero, OP) for _, function in HAZARDS.values()]


def assert_bits(results):
    wrong = {
        name: count
        for (name, ours), theirs in zip(expected().items(), results, strict=True)
        if (count := differing(theirs, ours))
    }
    assert not wrong


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 0 / 0
def test_eager_steps_have_the_bits_of_numpy():
    # Numbers of a user's rule are 0-d tensors: eager torch takes c / x for c (1 / x) where c is a float.
    assert_bits(all_of(*map(torch.from_numpy, operands()), *torch.tensor([C, D, ZERO]).unbind()))
