"""Whole steps have the bits of the reference: every storage of weights and moments, eager and compiled."""

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
from on_torch.steps import step_by_ones, values

LEAF, SEED, LR = "encoder/0/weight", 2**33 + 7, 1e-2
_SHAPES = [(8, 6), (3, 200), (5, 4, 3, 3), (40,)]
_SIGNED = [name for name, codes in SCALED_CODES.items() if codes.signed]
_SECOND = [name for name, codes in SCALED_CODES.items() if codes.for_second_moments]
_PLAIN = ["float32", "bfloat16", "float16"]
_BLOCKS = [4, 8, 5, 128, "row", None]
_ROUNDINGS = ["nearest", "stochastic"]


def scaled(dtypes):
    return st.tuples(st.sampled_from(dtypes), st.sampled_from(_BLOCKS))


SETTINGS = st.fixed_dictionaries(
    {
        "param": st.sampled_from(["bfloat16", "float16", "float32"]),
        "storage": st.sampled_from(sorted(PARAM_STORAGES)),
        "mu": st.one_of(st.sampled_from(_PLAIN), scaled(_SIGNED)),
        "nu": st.one_of(st.sampled_from(["float32", "bfloat16", "ufloat16_e7m9"]), scaled(_SECOND)),
        "mu_rounding": st.sampled_from(_ROUNDINGS),
        "nu_rounding": st.sampled_from(_ROUNDINGS),
        "decay": st.sampled_from(["decoupled", "l2"]),
        "shape": st.sampled_from(_SHAPES),
        "special": st.booleans(),
    }
)


def setting_of(param, mu, nu, mu_rounding, nu_rounding, storage, decay="decoupled"):
    roundings = {"mu_rounding": mu_rounding, "nu_rounding": nu_rounding, "storage": storage}
    return {"param": param, "mu": mu, "nu": nu, **roundings, "decay": decay, "special": True}


# Every plain format and rounding of each array at least twice, every pair of formats at least once.
DEFAULT = setting_of("bfloat16", "bfloat16", "bfloat16", "stochastic", "stochastic", "stochastic")
COVER = (
    DEFAULT,
    setting_of("bfloat16", "bfloat16", "bfloat16", "nearest", "nearest", "nearest"),
    setting_of("bfloat16", "float16", "float32", "stochastic", "stochastic", "stochastic", "l2"),
    setting_of("bfloat16", "float32", "bfloat16", "stochastic", "stochastic", "nearest"),
    setting_of("float16", "bfloat16", "float32", "stochastic", "stochastic", "stochastic"),
    setting_of("float16", "float16", "bfloat16", "nearest", "stochastic", "stochastic", "l2"),
    setting_of("float16", "float32", "bfloat16", "stochastic", "nearest", "nearest"),
    setting_of("float32", "bfloat16", "float32", "nearest", "nearest", "stochastic"),
    setting_of("float32", "float16", "bfloat16", "stochastic", "stochastic", "nearest", "l2"),
    setting_of("float32", "float32", "float32", "stochastic", "stochastic", "stochastic"),
)
IN_BLOCKS = ("float8_e4m3fn", 128), ("ufloat8_e5m3", 128)


def tensor(bits: np.ndarray, dtype: str) -> torch.Tensor:
    """Return patterns as a tensor of its own memory."""
    return to_torch(Array(dtype, bits.copy()))


def formats(module, setting):
    """Return mu and nu as a package's own formats."""
    given = (setting["mu"], setting["nu"])
    return [x if isinstance(x, str) else module.scaled(*x, min_size=0, min_ndim=0) for x in given]


def inputs(setting, steps):
    """Return patterns of the weights and of the gradients of every step."""
    size = int(np.prod(setting["shape"]))
    skip = 0 if setting["special"] else 8  # the first eight values are zeros, infinities, NaN, ...
    make = lambda name, t: values(name, t, size + skip, 12)[skip:].reshape(setting["shape"])  # noqa: E731
    g = [np.roll(spec.round_to(make("gradients", t), setting["param"]), 5 * t) for t in range(steps)]
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
    unchecked = {"nearest": "nearest_unchecked", "stochastic": "stochastic"}
    rounding = {name: unchecked[setting[name]] for name in ("mu_rounding", "nu_rounding")}
    stored = {"mu_dtype": mu, "nu_dtype": nu, **rounding, "param_storage": setting["storage"]}
    return make([(LEAF.replace("/", "."), p)], LR, weight_decay=0.1, **stored, seed=SEED, **options)


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


@settings(max_examples=10, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(setting=SETTINGS)
def test_eager_steps_have_the_bits_of_the_spec(setting):
    assert_bits_of_the_spec(setting, steps=4)


@pytest.mark.slow
@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(setting=SETTINGS)
def test_eager_steps_of_more_settings_have_the_bits_of_the_spec(setting):
    assert_bits_of_the_spec(setting, steps=4)


@pytest.mark.parametrize("setting", COVER, ids=lambda setting: "-".join(map(str, setting.values())))
def test_eager_steps_of_plain_formats_have_the_bits_of_the_spec(setting):
    assert_bits_of_the_spec({**setting, "shape": (3000,)}, 3, compile=False)


@pytest.mark.parametrize("setting", COVER[:2] + COVER[5:6], ids=["default", "nearest", "float16"])
def test_eager_steps_in_pieces_have_the_bits_of_the_spec(setting):
    assert_bits_of_the_spec({**setting, "shape": ((1 << 17) + 1001,)}, 2, compile=False)


@pytest.mark.slow
def test_compiled_steps_have_the_bits_of_the_spec_under_the_default_setting():
    assert_bits_of_the_spec({**DEFAULT, "shape": (100_003,)}, 20, compile=True)


@pytest.mark.slow
@pytest.mark.parametrize("setting", COVER, ids=lambda setting: "-".join(map(str, setting.values())))
def test_compiled_steps_of_plain_formats_have_the_bits_of_the_spec(setting):
    for size in (2, 31, 33, 100_003):
        assert_bits_of_the_spec({**setting, "shape": (size,)}, 10, compile=True)


@pytest.mark.slow
@pytest.mark.parametrize("storage", PARAM_STORAGES)
def test_compiled_steps_of_blocks_have_the_bits_of_the_spec(storage):
    # Whole blocks, and short ones, which are made whole in memory of their own.
    for shape in ((16, 256), (6, 200), (7, 5, 8, 8)):
        setting = setting_of("bfloat16", *IN_BLOCKS, "nearest", "stochastic", storage)
        assert_bits_of_the_spec({**setting, "shape": shape}, 3, compile=True)


def test_gradients_of_another_dtype_than_the_weights_are_read_as_float32():
    torch.manual_seed(0)
    grad = torch.randn(1000)
    p, q = (torch.nn.Parameter(torch.ones(1000, dtype=torch.float32)) for _ in range(2))
    narrow = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    p.grad, q.grad = grad.clone(), grad.bfloat16().float()
    if not hasattr(narrow, "grad_dtype"):
        pytest.skip("this torch binds the dtype of a gradient to its parameter's")
    narrow.grad_dtype = torch.float32
    narrow.grad = grad.clone()
    optimizer = hs.AdamW([("a", p), ("b", q), ("c", narrow)], mu_dtype="float32", nu_dtype="float32")
    optimizer.step()
    state = optimizer.state
    assert torch.equal(state[narrow]["exp_avg"], state[p]["exp_avg"])
    assert not torch.equal(state[q]["exp_avg"], state[p]["exp_avg"])


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_that_stand_still_keep_the_sign_of_zero_and_infinities(dtype, compile):
    start = torch.tensor([-0.0, 0.0, float("inf"), -float("inf"), 1.0] * 2, dtype=dtype)
    p = torch.nn.Parameter(start.clone())
    optimizer = hs.AdamW([p], lr=0.0, weight_decay=0.0, compile=compile)
    step_by_ones(optimizer)
    assert torch.equal(torch.signbit(p.detach()), torch.signbit(start))
    assert torch.equal(p.detach(), start)
