"""What storage does to an average over many steps, seen through the optimizer that keeps it."""

import numpy as np
import pytest
import torch

import halfstep_torch as hs
from halfstep_spec import SCALED_CODES
from halfstep_torch.storage.formats import Encoded
from halfstep_torch.storage.state_dtypes import as_format
from stops import STOPS

QUICK = ("bfloat16", "scaled ufloat8_e5m3")
SCALED = [f"scaled {dtype}" for dtype, codes in SCALED_CODES.items() if codes.for_second_moments]
STOCHASTIC = ("bfloat16", "ufloat16_e7m9", *SCALED)


def average_of_ones(fmt, b, rounding, shape, steps, seed=0):
    """Take steps with a gradient of ones; return the optimizer, the parameter and both moments."""
    p = torch.nn.Parameter(torch.zeros(shape))
    # A second moment alone may have no sign.
    mu = {"mu_dtype": fmt} if rounding == "nearest_unchecked" else {"mu_dtype": "float32"}
    nu = "bfloat16" if fmt == "float16" else fmt  # refused; bfloat16 stops before it
    optimizer = hs.Optimizer(
        [p], hs.scale_by_adam(b, b, **mu, nu_dtype=nu, mu_rounding=rounding, nu_rounding=rounding, seed=seed)
    )
    p.grad = torch.ones(shape)
    before = None
    for _ in range(steps):
        optimizer.step()
        state = {key: x.clone() for key, x in optimizer.state[p].items() if key != "step"}
        if before is not None and all(torch.equal(state[key], before[key]) for key in state):
            break
        before = state
    return optimizer.state[p]


def value(state, key, fmt, shape):
    fmt = as_format("", "", fmt).for_shape(shape)  # formats work on memory in one row
    return fmt.decode(Encoded(state[key].view(-1), _flat(state.get(f"{key}_scale")))).double().numpy()


def _flat(scale):
    return None if scale is None else scale.view(-1)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "b"), STOPS)
def test_nearest_averages_stop_at_their_fixed_points(dtype, b):
    shape = (2, 4)
    fmt = hs.scaled(dtype, min_size=0, min_ndim=1) if dtype.startswith("float8") else dtype
    state = average_of_ones(fmt, b, "nearest_unchecked", shape, 6000)
    assert int(state["step"]) < 6000
    for key in ("exp_avg",) if dtype == "float16" else ("exp_avg", "exp_avg_sq"):
        assert (value(state, key, fmt, shape) == STOPS[dtype, b]).all()


def check_mean(name, v, truth):
    """Check 4,096 averages: their mean; of unsigned floats, that of the step, which divides by their root.

    To within 5 of its own standard errors, or 3 %: what is left in third order of a gap of a quarter.
    """
    if "ufloat8" in name:
        assert abs(np.sqrt(truth / v).mean() - 1) < 0.03
    else:
        assert abs(v.mean() - truth) < 5 * v.std(ddof=1) / np.sqrt(v.size)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in STOCHASTIC]
)
def test_stochastic_averages_follow_the_true_mean(name):
    """Averages of g = 1 have the mean 1 - b^t. The words are a function of the seed: the outcome is fixed."""
    kind, _, dtype = name.partition(" ")
    fmt = hs.scaled(dtype, min_size=0) if dtype else kind
    shape, steps, b = (32, 128), 300, float(np.float32(0.999))
    v = value(average_of_ones(fmt, b, "stochastic", shape, steps, seed=3), "exp_avg_sq", fmt, shape)
    check_mean(name, v, 1 - b**steps)
    assert v.std() > 0.001 * v.mean()
