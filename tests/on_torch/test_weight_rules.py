"""How weights are stored, alone and with every format: bits of the spec, survival, float32 values."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import halfstep_spec as spec
import halfstep_torch as hs
from backends.on_torch import EXTRA, from_torch, to_torch
from compare import assert_same
from halfstep_spec import PARAM_STORAGES, SCALED_CODES
from halfstep_spec.cases.steps import stored_arrays
from halfstep_spec.vectors import Array
from halfstep_spec.weights.split_weights import nearest_away
from on_torch.steps import (
    LEAF,
    LR,
    SEED,
    assert_same_snapshots,
    snapshot,
    tensor,
    values,
)

_SHAPES = [(8, 6), (3, 200), (5, 4, 3, 3), (40,)]
_SIGNED = [name for name, codes in SCALED_CODES.items() if codes.signed]
_UNSIGNED = [name for name, codes in SCALED_CODES.items() if not codes.signed]
_SECOND = [name for name, codes in SCALED_CODES.items() if codes.for_second_moments]
_PLAIN = ["float32", "bfloat16", "float16"]
_BLOCKS = [4, 8, 5, 128, "row", None]


def scaled(dtypes):
    return st.tuples(st.sampled_from(dtypes), st.sampled_from(_BLOCKS))


SETTINGS = st.fixed_dictionaries(
    {
        "param": st.sampled_from(["bfloat16", "float16", "float32"]),
        "storage": st.sampled_from(sorted(PARAM_STORAGES)),
        "mu": st.one_of(st.sampled_from(_PLAIN), scaled(_SIGNED)),
        "nu": st.one_of(st.sampled_from(["float32", "bfloat16", "ufloat8_e6m2"]), scaled(_SECOND)),
        "mu_rounding": st.sampled_from(["nearest", "stochastic"]),
        "nu_rounding": st.sampled_from(["nearest", "stochastic"]),
        "decay": st.sampled_from(["decoupled", "l2"]),
        "shape": st.sampled_from(_SHAPES),
        "special": st.booleans(),
    }
)


def formats(module, setting):
    """Return mu and nu as a package's own formats."""
    given = (setting["mu"], setting["nu"])
    return [x if isinstance(x, str) else module.scaled(*x, min_size=0, min_ndim=0) for x in given]


def inputs(setting, steps):
    """Return patterns of the weights and of the gradients of every step."""
    size = int(np.prod(setting["shape"]))
    skip = 0 if setting["special"] else 8  # the first eight values are zeros, infinities, NaN, ...
    make = lambda name, t: values(name, t, size + skip, 12)[skip:].reshape(setting["shape"])  # noqa: E731
    g = [spec.round_to(make("gradients", t), setting["param"]) for t in range(steps)]
    return spec.round_to(make("weights", 0), setting["param"]), g


def spec_steps(setting, p, g):
    mu, nu = formats(spec, setting)
    rounding = {name: setting[name] for name in ("mu_rounding", "nu_rounding")}
    adam = spec.ScaleByAdam(mu_dtype=mu, nu_dtype=nu, **rounding, seed=SEED)
    step = spec.Step(adam, 0.1, setting["decay"], setting["param"], setting["storage"])
    state = step.init(p)
    with np.errstate(all="ignore"):
        for gradient in g:
            p, state = step.step(p, spec.decode(gradient, setting["param"]), state, LEAF, LR)
    return stored_arrays(step, p, state), step.float32_params(p, state)


def optimizer_of(setting, p, **options):
    mu, nu = formats(hs, setting)
    make = hs.AdamW if setting["decay"] == "decoupled" else hs.Adam
    rounding = {
        name: "nearest_unchecked" if setting[name] == "nearest" else "stochastic"
        for name in ("mu_rounding", "nu_rounding")
    }
    return make(
        [(LEAF.replace("/", "."), p)],
        LR,
        weight_decay=0.1,
        mu_dtype=mu,
        nu_dtype=nu,
        **rounding,
        param_storage=setting["storage"],
        seed=SEED,
        **options,
    )


def torch_steps(setting, p, g, **options):
    p = torch.nn.Parameter(tensor(p, setting["param"]))
    optimizer = optimizer_of(setting, p, **options)
    for gradient in g:
        p.grad = tensor(gradient, setting["param"])
        optimizer.step()
    state = optimizer.state[p]
    keys = {"mu": "exp_avg", "nu": "exp_avg_sq", "extra": EXTRA.get(setting["storage"], "")}
    keys |= {"mu_scale": "exp_avg_scale", "nu_scale": "exp_avg_sq_scale"}
    arrays = {"p": p.detach(), **{name: state[key] for name, key in keys.items() if key in state}}
    arrays = {n: x.view(torch.uint16) if x.dtype == torch.int16 else x for n, x in arrays.items()}
    labels = [spec.as_format(fmt).codes.dtype for fmt in formats(spec, setting)]
    labels = dict(zip(("mu", "nu"), labels, strict=True))
    arrays = {name: from_torch(x, labels.get(name, "")) for name, x in arrays.items()}
    return arrays, hs.float32_params(optimizer)


def assert_bits_of_the_spec(setting, steps, **options):
    p, g = inputs(setting, steps)
    theirs, their_params = spec_steps(setting, p, g)
    ours, our_params = torch_steps(setting, p, g, **options)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert_same(ours[name], array, f"{setting}: {name}")
    known = from_torch(our_params[LEAF.replace("/", ".")])
    assert_same(known, Array.of(np.asarray(their_params, np.float32)), f"{setting}: float32_params")


@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(setting=SETTINGS)
def test_formats_and_weight_rules_have_the_bits_of_the_spec(setting):
    assert_bits_of_the_spec(setting, steps=4)


@pytest.mark.slow
@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(setting=SETTINGS)
def test_the_whole_product_has_the_bits_of_the_spec(setting):
    assert_bits_of_the_spec(setting, steps=4)


_COMPILED = {
    "param": "bfloat16",
    "mu": ("float8_e4m3fn", 128),
    "nu": ("ufloat8_e5m3", 128),
    "mu_rounding": "nearest",
    "nu_rounding": "stochastic",
    "decay": "decoupled",
    "storage": "split8",
    "special": True,
}


@pytest.mark.slow
@pytest.mark.parametrize("storage", PARAM_STORAGES)
def test_compiled_steps_have_the_bits_of_the_spec(storage):
    # Whole blocks, and short ones, which are made whole in memory of their own.
    for shape in ((16, 256), (6, 200), (7, 5, 8, 8)):
        assert_bits_of_the_spec({**_COMPILED, "storage": storage, "shape": shape}, 3, compile=True)


def train(storage, dtype, start, steps):
    """Return (model's weights, float32 weights) after steps with decay, of the same gradients for all."""
    p = torch.nn.Parameter(start.to(dtype, copy=True))
    moments = {"mu_dtype": "float32", "nu_dtype": "float32"}
    optimizer = hs.AdamW([("w", p)], 1e-3, weight_decay=0.1, param_storage=storage, compile=False, **moments)
    for t in range(steps):
        # 8 bits of mantissa and few binades: every dtype holds them.
        p.grad = tensor(spec.round_to(values("train", t, p.numel() + 8, 8)[8:], "bfloat16"), "bfloat16").to(
            dtype
        )
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


def test_weights_that_are_loaded_after_the_state_was_made_are_those_that_train():
    """As torch.distributed.checkpoint has it: a fresh optimizer's state is made before weights are loaded."""
    model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
    optimizer = hs.SGD(model.named_parameters(), lr=0.0, param_storage="master")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    model.load_state_dict({name: torch.full_like(p, 3.0) for name, p in model.named_parameters()})
    optimizer.step()
    assert all((p == 3).all() for p in model.parameters())


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


def displacement(storage, lr, steps=200, size=1 << 16):
    """Return the mean movement of weights around 0.02 under a constant gradient, over the truth."""
    start = torch.linspace(2**-6, 2**-5, size).to(torch.bfloat16)
    p = torch.nn.Parameter(start.clone())
    optimizer = hs.AdamW([("w", p)], lr, (0.0, 0.0), 0.0, 0.0, param_storage=storage, compile=False)
    p.grad = torch.ones_like(p)
    for _ in range(steps):
        optimizer.step()
    moved = start.double() - hs.float32_params(optimizer)["w"].double()
    return (moved.mean() / (steps * lr)).item()


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("storage", ["stochastic", "split8", "split16", "master"])
def test_small_updates_survive(storage, lr):
    # A stochastic step of a unit, 2^-13, with probability lr 2^13 has the variance lr 2^-13, so the mean of
    # all errs by sqrt(2^-13 / (lr 200 2^16)), 0.0097 at 1e-7; with 8 bits more by a 16th of that.
    assert displacement(storage, lr) == pytest.approx(1, abs=0.02)


@pytest.mark.slow
def test_compensated_weights_move_until_the_compensation_itself_stalls():
    # c grows to half a unit of the weight, 2^-14, where its own unit is 2^-22 = 2.4e-7: steps of 1e-5 arrive,
    # 1e-6 within a tenth, and 1e-7, under half that unit, hardly.
    assert displacement("compensated", 1e-5) == pytest.approx(1, abs=0.02)
    assert displacement("compensated", 1e-6) == pytest.approx(1, abs=0.1)
    assert displacement("compensated", 1e-7, steps=1000) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("storage", PARAM_STORAGES)
def test_decay_alone_shrinks_weights_under_every_rule_but_nearest(storage):
    # 2,000 steps at lr wd = 1e-5 and no gradient: 1 - (1 - 1e-5)^2000 = 1.98 %.
    p = torch.nn.Parameter((torch.linspace(0.5, 1.0, 1 << 12)).to(torch.bfloat16))
    start = p.detach().double().sum()
    optimizer = hs.AdamW([("w", p)], 1e-4, weight_decay=0.1, param_storage=storage, compile=False)
    p.grad = torch.zeros_like(p)
    for _ in range(2000):
        optimizer.step()
    lost = 1 - hs.float32_params(optimizer)["w"].double().sum() / start
    assert lost == (0 if storage == "nearest" else pytest.approx(0.0198, abs=0.0005))


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


@pytest.mark.parametrize("storage", PARAM_STORAGES)
def test_a_state_dict_goes_on_with_every_bit(storage, tmp_path):
    setting = {**_COMPILED, "storage": storage, "shape": (16, 200), "special": False}
    p, g = inputs(setting, 4)
    whole, _ = torch_steps(setting, p, g, compile=False)
    first = torch.nn.Parameter(tensor(p, "bfloat16"))
    optimizer = optimizer_of(setting, first, compile=False)
    for gradient in g[:2]:
        first.grad = tensor(gradient, "bfloat16")
        optimizer.step()
    torch.save({"p": first.detach(), "state": optimizer.state_dict()}, tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    second = torch.nn.Parameter(saved["p"].clone())
    resumed = optimizer_of(setting, second, compile=False)
    resumed.load_state_dict(saved["state"])
    assert_same_snapshots(snapshot(optimizer), snapshot(resumed))
    for gradient in g[2:]:
        second.grad = tensor(gradient, "bfloat16")
        resumed.step()
    np.testing.assert_array_equal(from_torch(second).bits, whole["p"].bits)
    assert to_torch(whole["p"]).dtype == torch.bfloat16
