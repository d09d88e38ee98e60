"""State in torch's own form: a run moves in, and out, and goes on."""

import copy
import sys
import types

import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import run

SHAPES = {"dense.weight": (64, 80), "dense.bias": (80,)}


def parameters(dtype=torch.float32) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype))
        for name, shape in SHAPES.items()
    }


def train(params: dict, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    run([*params.items()], optimizer, range(first, last))


def distance(ours: dict, theirs: dict) -> float:
    return max((ours[name].detach().float() - p.detach()).abs().max().item() for name, p in theirs.items())


TORCH = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


def torchs_run(steps: int):
    params = parameters()
    optimizer = torch.optim.AdamW(params.values(), **TORCH, foreach=False)
    train(params, optimizer, 0, steps)
    return params, optimizer


FORMATS = {
    "float32": {"mu_dtype": "float32", "nu_dtype": "float32"},
    "bfloat16": {},
    "near_float32": hs.recipes.near_float32,
    "one_pass": hs.recipes.one_pass,
    "four_bit": hs.recipes.four_bit,
}
# How far moments of a format may lead twenty steps of 1e-3 from float32's: a share of the way.
SHARES = {"float32": 1e-3, "bfloat16": 0.1, "near_float32": 0.1, "one_pass": 0.2, "four_bit": 0.6}


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_of_torch_goes_on_in_any_format(name):
    """In float32 weights, so that the formats of the moments alone are seen."""
    params, theirs = torchs_run(20)
    ours = {key: torch.nn.Parameter(p.detach().clone()) for key, p in params.items()}
    optimizer = hs.AdamW(ours.items(), lr=5.0, compile=False, **FORMATS[name])
    hs.load_float32_state_dict(optimizer, theirs.state_dict())
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (1e-3, 0.1)
    assert int(optimizer.state[ours["dense.bias"]]["step"]) == 20
    before = {key: p.detach().clone() for key, p in params.items()}
    train(params, theirs, 20, 40)
    train(ours, optimizer, 20, 40)
    way = distance(before, params)
    assert distance(ours, params) < SHARES[name] * way
    fresh = {key: torch.nn.Parameter(p.clone()) for key, p in before.items()}
    train(fresh, hs.AdamW(fresh.items(), compile=False, **TORCH), 20, 40)
    assert distance(fresh, params) > 0.7 * way  # as it would be had nothing been read


@pytest.mark.parametrize("name", ["float32", "bfloat16", "one_pass"])
def test_what_is_exported_is_read_again_into_the_same_format(name):
    params = parameters(torch.bfloat16)
    options = {**FORMATS[name], "param_storage": "split16", "compile": False}
    optimizer, other = hs.AdamW(params.items(), **options), hs.AdamW(params.items(), **options)
    train(params, optimizer, 0, 3)
    hs.set_float32_params(other, hs.float32_params(optimizer))
    hs.load_float32_state_dict(other, hs.float32_state_dict(optimizer))
    for p in params.values():
        for key, array in optimizer.state[p].items():
            # A number of the format never moves (contract R1). In units of a root it has been multiplied by
            # that, and divided again: now and then it is then rounded to the next code.
            same = (other.state[p][key] == array).double().mean()
            assert same == 1 if (name, key) != ("one_pass", "exp_avg") else same > 0.99, key


def test_torch_loads_an_export_without_leftovers_and_goes_on():
    params = parameters()
    optimizer = hs.AdamW(params.items(), **TORCH, compile=False)
    train(params, optimizer, 0, 20)
    theirs_params = {key: torch.nn.Parameter(p.detach().clone()) for key, p in params.items()}
    theirs = torch.optim.AdamW(theirs_params.values(), lr=5.0, foreach=False)
    theirs.load_state_dict(copy.deepcopy(hs.float32_state_dict(optimizer)))
    fresh = torch.optim.AdamW(theirs_params.items(), foreach=False)
    assert theirs.param_groups[0].keys() == fresh.param_groups[0].keys()
    assert theirs.state[theirs_params["dense.bias"]].keys() == {"step", "exp_avg", "exp_avg_sq"}
    train(params, optimizer, 20, 40)
    train(theirs_params, theirs, 20, 40)
    # Float32 on both sides: twenty steps of roundings of the weight, and updates within 1e-4 of each other.
    assert distance(theirs_params, params) < 20 * (2**-24 + 1e-3 * 1e-4)


def test_sgd_moves_both_ways():
    params = parameters()
    theirs = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    train(params, theirs, 0, 5)
    ours = {key: torch.nn.Parameter(p.detach().clone()) for key, p in params.items()}
    optimizer = hs.SGD(ours.items(), momentum=0.5)
    hs.load_float32_state_dict(optimizer, theirs.state_dict())
    train(params, theirs, 5, 10)
    train(ours, optimizer, 5, 10)
    assert distance(ours, params) < 1e-5
    back = torch.optim.SGD(params.values(), lr=1.0)
    back.load_state_dict(hs.float32_state_dict(optimizer))
    assert back.state[params["dense.bias"]].keys() == {"momentum_buffer"}
    assert back.param_groups[0]["momentum"] == 0.9


def test_what_does_not_fit_is_refused_and_changes_nothing():
    params, theirs = torchs_run(2)
    optimizer = hs.AdamW(params.items(), compile=False)
    good = theirs.state_dict()

    def changed(change) -> dict:
        state_dict = copy.deepcopy(good)
        change(state_dict)
        return state_dict

    cases = [
        (changed(lambda d: d["param_groups"][0].update(amsgrad=True)), "amsgrad=True in param group 0"),
        (changed(lambda d: d["param_groups"].pop()), "has 0 param groups, this optimizer 1"),
        (
            changed(lambda d: d["param_groups"][0]["params"].pop()),
            "has 1 parameters in the state dict, 2 here",
        ),
        (changed(lambda d: d["state"][1].pop("exp_avg")), "'dense/bias' holds exp_avg_sq, step"),
        (
            changed(lambda d: d["state"][1].update(exp_avg=torch.zeros(3))),
            r"exp_avg of 'dense/bias' is torch.float32\[3\]",
        ),
        (changed(lambda d: d["state"][1].update(step=-1.0)), "the step of 'dense/bias' is -1"),
        (changed(lambda d: d["param_groups"][0].update(lr=-1.0)), "lr=-1.0 is negative"),
    ]
    names = ["dense.weight", "dense.kernel"]
    cases.append(
        (
            changed(lambda d: d["param_groups"][0].update(param_names=names)),
            "parameter 'dense.bias' is not in group 0 of the state dict",
        )
    )
    for state_dict, message in cases:
        with pytest.raises(ValueError, match=message):
            hs.load_float32_state_dict(optimizer, state_dict)
    assert not optimizer.state
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    with pytest.raises(TypeError, match="is not a state dict"):
        hs.load_float32_state_dict(optimizer, [])
    with pytest.raises(TypeError, match="optimizer is AdamW"):
        hs.float32_state_dict(theirs)
    rooted = hs.Optimizer(params.items(), hs.scale_by_adam(eps_root=1e-8), compile=False)
    with pytest.raises(ValueError, match="eps_root=1e-08 in param group 0, which torch has not"):
        hs.float32_state_dict(rooted)


@pytest.mark.parametrize("storage", ["compensated", "split16", "master"])
def test_what_is_kept_beside_the_weights_and_seeds_and_formats_stay(storage):
    params = parameters(torch.bfloat16)
    optimizer = hs.AdamW(params.items(), param_storage=storage, seed=7, compile=False)
    train(params, optimizer, 0, 3)
    before, seeds = (
        hs.float32_params(optimizer),
        optimizer.state_dict()["param_groups"][0]["halfstep"]["seeds"],
    )
    moments = optimizer.state[params["dense.bias"]]["exp_avg"].clone()
    hs.load_float32_state_dict(optimizer, torchs_run(2)[1].state_dict())
    after = hs.float32_params(optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert any(not torch.equal(value, params[name].float()) for name, value in before.items())
    assert not torch.equal(optimizer.state[params["dense.bias"]]["exp_avg"], moments)
    assert moments.dtype == optimizer.state[params["dense.bias"]]["exp_avg"].dtype
    assert optimizer.state_dict()["param_groups"][0]["halfstep"]["seeds"] == seeds


def test_a_value_that_does_not_fit_sets_no_weight_and_those_that_fit_leave_moments_and_steps():
    params = parameters(torch.bfloat16)
    optimizer = hs.AdamW(params.items(), param_storage="split16", compile=False)
    train(params, optimizer, 0, 3)
    values = {name: value * 2 for name, value in hs.float32_params(optimizer).items()}
    before = copy.deepcopy(optimizer.state_dict()["state"])
    weights = {name: p.detach().clone() for name, p in params.items()}
    with pytest.raises(ValueError, match=r"dense[./]bias"):
        hs.set_float32_params(optimizer, values | {"dense.bias": torch.zeros(3)})
    assert all(torch.equal(p, weights[name]) for name, p in params.items())
    hs.set_float32_params(optimizer, values)
    for i, state in optimizer.state_dict()["state"].items():
        kept = {key: array for key, array in state.items() if key != "extra_bits"}
        assert {"step", "exp_avg", "exp_avg_sq"} <= kept.keys()
        assert all(torch.equal(array, before[i][key]) for key, array in kept.items())
    assert torch.equal(hs.float32_params(optimizer)["dense.bias"], values["dense.bias"])


@pytest.mark.parametrize("library", ["torchastic", "adamw_bf16", "bitsandbytes"])
def test_state_of_another_library_is_that_of_its_float32_moments(library):
    """As each writes it; bitsandbytes keeps small parameters in float32."""
    generator = torch.Generator().manual_seed(0)
    mu, nu = (
        torch.randn(3, 4, generator=generator).bfloat16(),
        torch.rand(3, 4, generator=generator).bfloat16(),
    )
    theirs = {
        "torchastic": {"step": 3, "ema": mu, "ema_squared": nu},
        "adamw_bf16": {"step": 3.0, "exp_avg": mu, "exp_avg_sq": nu, "shift": mu, "accumulated_decay": 0.1},
        "bitsandbytes": {
            "step": 3,
            "__bnb_optimizer_quant_state__": {"state1": mu.float(), "state2": nu.float()},
        },
    }[library]
    states = []
    for state in (theirs, {"step": 3, "exp_avg": mu.float(), "exp_avg_sq": nu.float()}):
        optimizer = hs.AdamW([("w", torch.nn.Parameter(torch.ones(3, 4).bfloat16()))], recipe="one_pass")
        group = {"lr": torch.tensor(0.5), "params": [0]}
        hs.load_float32_state_dict(optimizer, {"state": {0: state}, "param_groups": [group]})
        assert optimizer.param_groups[0]["lr"] == 0.5
        states.append(next(iter(optimizer.state.values())))
    assert all(torch.equal(x, states[1][key]) for key, x in states[0].items())


def test_codes_of_bitsandbytes_are_decoded_in_its_blocks(monkeypatch):
    """Blocks of 256, each with the largest magnitude in it: here of 2 and of 3."""

    def dequantize_blockwise(codes, absmax, code, blocksize):
        blocks = torch.arange(codes.numel()) // blocksize
        return (code[codes.reshape(-1).long()] * absmax[blocks]).view(codes.shape)

    library = types.ModuleType("bitsandbytes.functional")
    library.dequantize_blockwise = dequantize_blockwise  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", library)
    state: dict = {"step": torch.tensor(3.0)}
    for place in (1, 2):
        codes = torch.full((2, 256), 128, dtype=torch.uint8)
        state |= {f"state{place}": codes, f"qmap{place}": torch.arange(256) / 128}
        state |= {f"absmax{place}": torch.tensor([2.0, 3.0])}
    p = torch.nn.Parameter(torch.zeros(2, 256))
    optimizer = hs.AdamW([("w", p)], mu_dtype="float32", nu_dtype="float32")
    hs.load_float32_state_dict(optimizer, {"state": {0: state}, "param_groups": [{"params": [0]}]})
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[p][key], torch.tensor([[2.0], [3.0]]).expand(2, 256))


def test_dithered_codes_are_exported_by_the_words_with_which_they_are_read():
    """Other words decode other numbers, 7 % of their size apart once they are read again; codes of 4 bits."""
    params = parameters()
    optimizer, other = (hs.AdamW(params.items(), recipe="four_bit", compile=False) for _ in range(2))
    train(params, optimizer, 0, 3)
    exported = hs.float32_state_dict(optimizer)
    hs.load_float32_state_dict(other, exported)
    mu, again = (saved["state"][0]["exp_avg"] for saved in (exported, hs.float32_state_dict(other)))
    assert (again - mu).abs().mean() < 0.02 * mu.abs().mean()


def test_a_run_of_torch_that_ascends_goes_on_ascending():
    params = parameters()
    theirs = torch.optim.AdamW(params.values(), **TORCH, maximize=True)
    train(params, theirs, 0, 1)
    optimizer = hs.AdamW(params.items())
    hs.load_float32_state_dict(optimizer, theirs.state_dict())
    assert optimizer.param_groups[0]["maximize"] is True
