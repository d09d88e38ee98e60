"""Averages of weights, in the dtype of the weights, through torch.optim.swa_utils."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfstep_torch as hs


class Net(torch.nn.Module):
    """4000 weights of 1 in bfloat16, some float32 ones, and a buffer."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(40, 100, dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def averaged_of(model, multi_avg_fn, steps: int = 100) -> AveragedModel:
    averaged = AveragedModel(model, multi_avg_fn=multi_avg_fn, use_buffers=True)
    averaged.update_parameters(model)
    with torch.no_grad():
        model.w.fill_(2.0), model.norm.fill_(2.0), model.seen.fill_(7)
    for _ in range(steps):
        averaged.update_parameters(model)
    return averaged


def test_a_bf16_average_moves_where_torchs_stays():
    model = Net()
    ours = averaged_of(model, hs.ema_params(model, 0.999)).module
    due = 2 - 0.999**100
    # 100 roundings to a gap of 2^-7, each with a deviation of at most sqrt(0.128 * 0.872) of it.
    assert abs(ours.w.double().mean() - due) < 5 * 2**-7 * (100 * 0.112 / 4000) ** 0.5
    torch.testing.assert_close(ours.norm, torch.full((4,), due))
    assert ours.seen == 7
    theirs = averaged_of(Net(), get_ema_multi_avg_fn(0.999)).module
    assert (theirs.w == 1).all()


def test_an_average_of_another_model_is_refused():
    model = Net()
    with pytest.raises(ValueError, match="is not one of the model's"):
        averaged_of(model, hs.ema_params(Net(), 0.9), steps=1)
    with pytest.raises(ValueError, match=r"decay=1.0 is outside \[0, 1\)"):
        hs.ema_params(model, 1.0)
    with pytest.raises(TypeError, match="model is list"):
        hs.ema_params([model.w], 0.9)


def test_a_weight_of_a_dtype_that_is_not_averaged_is_refused():
    model = torch.nn.Linear(2, 2, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"a weight is torch\.float64; averages are of float32, bfloat16"):
        averaged_once(model)


def averaged_once(model):
    averaged = AveragedModel(model, multi_avg_fn=hs.ema_params(model, 0.9))
    for _ in range(2):
        averaged.update_parameters(model)
