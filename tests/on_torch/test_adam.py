"""Whole steps against the reference: every combination of storage, eager and compiled, to the bit."""

import numpy as np
import pytest
import torch

import halfstep_torch as hs
from halfstep_spec import ScaleByAdam, bias_correction
from halfstep_torch.numbers import moments
from on_torch.steps import DEFAULT, GRID, SEED, Setting, assert_equal_runs, spec_run, torch_run

# Every format and rounding of each array at least twice, every pair of formats at least once.
COVER = (
    DEFAULT,
    Setting("bfloat16", "bfloat16", "bfloat16", "nearest", "nearest", "nearest"),
    Setting("bfloat16", "float16", "float32", "stochastic", "stochastic", "stochastic", "l2"),
    Setting("bfloat16", "float32", "bfloat16", "stochastic", "stochastic", "nearest"),
    Setting("float16", "bfloat16", "float32", "stochastic", "stochastic", "stochastic"),
    Setting("float16", "float16", "bfloat16", "nearest", "stochastic", "stochastic", "l2"),
    Setting("float16", "float32", "bfloat16", "stochastic", "nearest", "nearest"),
    Setting("float32", "bfloat16", "float32", "nearest", "nearest", "stochastic"),
    Setting("float32", "float16", "bfloat16", "stochastic", "stochastic", "nearest", "l2"),
    Setting("float32", "float32", "float32", "stochastic", "stochastic", "stochastic"),
)


@pytest.mark.parametrize("setting", GRID, ids=str)
def test_eager_steps_have_the_bits_of_the_spec(setting):
    assert_equal_runs(torch_run(setting, 3, 3000, compile=False), spec_run(setting, 3, 3000), str(setting))


@pytest.mark.parametrize("setting", COVER[:2] + COVER[5:6], ids=str)
def test_eager_steps_in_pieces_have_the_bits_of_the_spec(setting):
    size = (1 << 17) + 1001
    assert_equal_runs(torch_run(setting, 2, size, compile=False), spec_run(setting, 2, size), str(setting))


@pytest.mark.slow
def test_compiled_steps_have_the_bits_of_the_spec_under_the_default_setting():
    ours = torch_run(DEFAULT, 20, 100_003, compile=True)
    assert_equal_runs(ours, spec_run(DEFAULT, 20, 100_003), str(DEFAULT))


@pytest.mark.slow
@pytest.mark.parametrize("setting", COVER, ids=str)
def test_compiled_steps_have_the_bits_of_the_spec(setting):
    for size in (2, 31, 33, 100_003):
        ours = torch_run(setting, 10, size, compile=True)
        assert_equal_runs(ours, spec_run(setting, 10, size), f"{setting}, {size}")


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


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("eps_root", [0.0, 1e-6])
def test_eps_root_and_nesterov_are_those_of_the_spec(nesterov, eps_root):
    rng = np.random.default_rng(0)
    reference = ScaleByAdam(eps_root=eps_root, nesterov=nesterov, nu_dtype="bfloat16", seed=SEED)
    state = reference.init((500,))
    p = torch.nn.Parameter(torch.zeros(500))
    adam = hs.scale_by_adam(
        eps_root=eps_root, nesterov=nesterov, mu_dtype="float32", nu_dtype="bfloat16", seed=SEED
    )
    optimizer = hs.Optimizer([("w", p)], adam)
    for _ in range(5):
        g = rng.standard_normal(500).astype(np.float32)
        before = p.detach().clone()
        p.grad = torch.from_numpy(g.copy())
        optimizer.step()
        u, state = reference.step(g, state, "w")
        assert torch.equal(p.detach(), before + torch.from_numpy(u))


def test_the_update_reads_the_stored_moments():
    # In float16, 1e-9 is stored as 0 (to nearest): the update of a first step must then be 0 as well.
    p = torch.nn.Parameter(torch.ones(4))
    p.grad = torch.full((4,), 1e-8)
    hs.Optimizer(
        [p],
        hs.chain(hs.scale_by_adam(mu_dtype="float16", mu_rounding="nearest"), hs.scale_by_learning_rate(1.0)),
    ).step()
    assert torch.equal(p.detach(), torch.ones(4))


@pytest.mark.parametrize("b", [0.0, 0.5, 0.9, 0.999, 0.9999])
def test_bias_correction_is_that_of_the_spec(b):
    for t in [*range(1, 200), 2**20 - 1, 2**20, 2_000_000]:
        assert moments.bias_correction(b, t) == bias_correction(b, t)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_that_stand_still_keep_the_sign_of_zero_and_infinities(dtype, compile):
    start = torch.tensor([-0.0, 0.0, float("inf"), -float("inf"), 1.0] * 2, dtype=dtype)
    p = torch.nn.Parameter(start.clone())
    optimizer = hs.AdamW([p], lr=0.0, weight_decay=0.0, compile=compile)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(torch.signbit(p.detach()), torch.signbit(start))
    assert torch.equal(p.detach(), start)


def test_moments_never_hold_an_infinity():
    for dtype in ("bfloat16", "float16", "float32"):
        p = torch.nn.Parameter(torch.ones(6))
        p.grad = torch.tensor([1e20, -1e30, 3e38, float("inf"), float("-inf"), float("nan")])
        nu = "bfloat16" if dtype == "float16" else dtype
        optimizer = hs.AdamW([p], mu_dtype=dtype, nu_dtype=nu)
        optimizer.step()
        for key in ("exp_avg", "exp_avg_sq"):
            assert not torch.isinf(optimizer.state[p][key]).any()
            assert torch.isnan(optimizer.state[p][key][3:]).all()
