"""How weights are stored: those of float32 training, rounded; what is read, set and refused."""

import numpy as np
import pytest
import torch

import halfstep_torch as hs
from backends.on_torch import from_torch
from halfstep_spec import PARAM_STORAGES
from halfstep_spec.weights.split_weights import nearest_away
from on_torch.steps import assert_same_snapshots, snapshot, values


def train(storage, dtype, start, steps):
    """Return (model's weights, float32 weights) after steps with decay, of the same gradients for all."""
    p = torch.nn.Parameter(start.to(dtype, copy=True))
    moments = {"mu_dtype": "float32", "nu_dtype": "float32"}
    optimizer = hs.AdamW([("w", p)], 1e-3, weight_decay=0.1, param_storage=storage, compile=False, **moments)
    for t in range(steps):
        # 8 bits of mantissa and few binades: every dtype holds them.
        p.grad = torch.from_numpy(values("train", t, p.numel() + 8, 8)[8:].copy()).bfloat16().to(dtype)
        optimizer.step()
    return p.detach(), hs.float32_params(optimizer)["w"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_that_was_changed_from_outside_is_gone_on_from_under_master(dtype):
    """Those of its elements alone: the others keep all their bits."""
    params = [torch.nn.Parameter(torch.linspace(0.1, 1, 40).to(dtype)) for _ in range(2)]
    edited, left = (hs.SGD([("w", p)], lr=2.0**-14, param_storage="master") for p in params)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                params[0][:20] = 5.0
        for p in params:
            p.grad = torch.ones_like(p)
        edited.step()
        left.step()
    known, untouched = (hs.float32_params(optimizer)["w"] for optimizer in (edited, left))
    assert torch.equal(known[20:], untouched[20:])
    assert (known[:20] == 5 - 2 * 2.0**-14).all()
    assert torch.equal(params[0][:20].detach(), known[:20].to(dtype))


@pytest.mark.parametrize("steps", [40, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dtype", "storage"), [("bfloat16", "split16"), ("bfloat16", "master"), ("float16", "master")]
)
def test_split_and_master_weights_are_those_of_float32_training_rounded(dtype, storage, steps):
    start = torch.from_numpy(values("start", 0, 4104, 8)[8:] * 32).to(getattr(torch, dtype)).float()
    exact, _ = train("nearest", torch.float32, start, steps)
    shown, known = train(storage, getattr(torch, dtype), start, steps)
    np.testing.assert_array_equal(from_torch(shown).bits, nearest_away(exact.numpy(), dtype))
    np.testing.assert_array_equal(from_torch(known).bits, from_torch(exact).bits)
    assert (exact != start).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("storage", PARAM_STORAGES)
def test_what_is_set_is_what_is_read(storage, dtype):
    w = torch.randn(3, 50, generator=torch.Generator().manual_seed(5))
    p = torch.nn.Parameter(torch.zeros(3, 50, dtype=dtype))
    optimizer = hs.AdamW([("w", p)], param_storage=storage, compile=False)
    hs.set_float32_params(optimizer, {"w": w})
    known = hs.float32_params(optimizer)["w"]
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}[dtype]
    kept = {"compensated": 8, "split8": 8, "split16": 16, "master": 24}.get(storage, 0)
    unit = 2.0 ** -min(bits + kept, 24)
    if bits + kept >= 24:
        torch.testing.assert_close(
            known, w, rtol=0, atol=0 if storage != "split16" or bits == 8 else 2.0**-41
        )
    assert ((known - w).abs() <= unit * w.abs()).all()
    again = snapshot(optimizer)
    hs.set_float32_params(optimizer, {"w": known})
    assert_same_snapshots(again, snapshot(optimizer))


def test_params_without_names_are_a_list():
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = hs.AdamW([p], param_storage="master", compile=False)
    assert [x.tolist() for x in hs.float32_params(optimizer)] == [[1, 1]]
    hs.set_float32_params(optimizer, [torch.full((2,), 0.1)])
    assert hs.float32_params(optimizer)[0].tolist() == [np.float32(0.1)] * 2


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            {"w": torch.full((2,), 70000.0)},
            ValueError,
            "'w' has 70000.0, past the largest float16, 65504. Use",
        ),
        ({"w": torch.ones(3)}, ValueError, "'w' has shape (3,), its parameter (2,)"),
        ({"v": torch.ones(2)}, ValueError, "'w' is missing"),
        ({"w": torch.ones(2), "v": torch.ones(2)}, ValueError, "'v' is not a parameter"),
        ({"w": torch.ones(2, dtype=torch.bfloat16)}, TypeError, "'w' is bfloat16; values are float32"),
        ({"w": [1.0, 2.0]}, TypeError, "'w' is list; values are float32 tensors"),
    ],
)
def test_values_that_do_not_fit_are_refused_and_nothing_is_changed(values, error, message):
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = hs.AdamW([("w", p)], param_storage="master", compile=False)
    before = snapshot(optimizer)
    with pytest.raises(error) as raised:
        hs.set_float32_params(optimizer, values)
    assert str(raised.value).startswith(f"set_float32_params: {message}")
    assert_same_snapshots(before, snapshot(optimizer))


def test_float32_params_want_an_optimizer_of_ours():
    with pytest.raises(TypeError, match="float32_params: optimizer is SGD"):
        hs.float32_params(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
