"""`clip_grad_norm_`: float32 norms of 16-bit gradients, and norms that no order of adding changes."""

import numpy as np
import pytest
import torch

import halfstep_torch as hs
from halfstep.kernels import build
from halfstep_spec.numbers import global_norm as spec_norm
from halfstep_spec.rules.clip import clip
from halfstep_torch.engine import in_place
from halfstep_torch.numbers.global_norm import global_norm, largest_pattern, sum_of_squares


def parameters(dtype=torch.float32, scale: float = 1.0) -> list[torch.nn.Parameter]:
    rng = np.random.default_rng(0)
    found = []
    for shape in [(3, 70), (), (300,), (0, 4), (2, 9, 17)]:
        p = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        values = np.exp(2 * rng.normal(size=shape)) * rng.normal(size=shape) * scale
        p.grad = torch.as_tensor(values, dtype=torch.float32).to(dtype)
        found.append(p)
    return [*found, torch.nn.Parameter(torch.zeros(3, dtype=dtype))]


def gradients(params) -> list[np.ndarray]:
    return [p.grad.to(torch.float32, copy=True).numpy() for p in params if p.grad is not None]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_an_exact_norm_has_the_bits_of_the_spec(scale):
    grads = gradients(parameters(scale=scale))
    expected = spec_norm.global_norm(grads, exact=True)
    tensors = [torch.from_numpy(g) for g in grads]
    for order in (tensors, tensors[::-1]):
        assert global_norm(order, exact=True).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("exponent", range(16, 21))
def test_the_exact_norm_of_equal_numbers_is_the_root_of_their_count(exponent):
    """The sum of 2^46 each passes 2^62 to 2^66: of float32's 24 bits the root needs no more."""
    norm = global_norm([torch.ones(2**exponent)], exact=True)
    assert float(norm) == np.sqrt(np.float32(2.0**exponent))


def test_an_exact_norm_of_many_elements_passes_32_bits():
    x = torch.full(((1 << 20) + 77,), 1.9999999)
    expected = spec_norm.global_norm([x.numpy()], exact=True)
    assert global_norm([x], exact=True).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_scaled_in_float32_and_rounded_once(dtype):
    params = parameters(dtype)
    before = gradients(params)
    norm = hs.clip_grad_norm_(params, 0.75, exact=True)
    assert norm.numpy() == spec_norm.global_norm(before, exact=True)
    for g, after in zip(before, gradients(params), strict=True):
        expected = torch.from_numpy(np.asarray(clip(g, norm.numpy(), 0.75))).to(dtype).to(torch.float32)
        np.testing.assert_array_equal(after, expected.numpy())


def test_it_follows_torch_in_float32():
    ours, theirs = parameters(), parameters()
    norm = hs.clip_grad_norm_(ours, 0.5)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    # Sums of 800 squares in two orders; torch adds 1e-6 to the norm.
    rtol = 806 * 2.0**-24 + 1e-6 / expected.item()
    np.testing.assert_allclose(norm, expected, rtol=rtol)
    for ours_g, theirs_g in zip(gradients(ours), gradients(theirs), strict=True):
        np.testing.assert_allclose(ours_g, theirs_g, rtol=rtol)


def test_a_norm_that_is_not_finite_is_said_if_asked_for():
    params = parameters()
    params[0].grad[0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="the norm of the gradients is inf"):
        hs.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert torch.isinf(params[0].grad[0, 0])


def test_it_takes_the_arguments_of_torch():
    """In torch's order; other norms are refused by name."""
    before = parameters()
    bare, told, placed = parameters(), parameters(), parameters()
    norm = hs.clip_grad_norm_(bare, 0.5)
    assert hs.clip_grad_norm_(told, 0.5, norm_type=2.0, error_if_nonfinite=True, foreach=True) == norm
    assert hs.clip_grad_norm_(placed, 0.5, 2, False, None) == norm
    for params in (told, placed):
        for g, expected in zip(gradients(params), gradients(bare), strict=True):
            np.testing.assert_array_equal(g, expected)
    for norm_type in (1.0, float("inf"), "inf", True, None):
        with pytest.raises(ValueError, match=f"norm_type={norm_type!r} is not supported. Use norm_type=2.0"):
            hs.clip_grad_norm_(before, 0.5, norm_type)


def test_no_gradient_is_a_norm_of_zero():
    assert hs.clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0) == 0


def test_gradients_that_float32_does_not_hold_are_refused():
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    p.grad = torch.ones(2, dtype=torch.float64)
    with pytest.raises(TypeError, match="a gradient is float64"):
        hs.clip_grad_norm_(p, 1.0)


def stepped(params, *links, groups=None, **options) -> list[np.ndarray]:
    tx = hs.chain(*links, hs.scale_by_learning_rate(1.0, flip_sign=False))
    hs.Optimizer(groups or params, tx, **options).step()
    return [p.detach().to(torch.float32).numpy() for p in params if p.grad is not None]


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_link_clips_as_the_spec_does_and_leaves_gradients_alone(compile):
    params = parameters()
    before = gradients(params)
    norm = spec_norm.global_norm(before, exact=True)
    moved = stepped(params, hs.clip_by_global_norm(0.75, exact=True), compile=compile)
    for g, u, after in zip(before, moved, gradients(params), strict=True):
        np.testing.assert_array_equal(u, np.asarray(clip(g, norm, 0.75)))
        np.testing.assert_array_equal(after, g)


def test_the_link_measures_the_gradients_of_all_groups():
    params = parameters()
    norm = spec_norm.global_norm(gradients(params), exact=True)
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    moved = stepped(params, hs.clip_by_global_norm(0.75, exact=True), groups=groups)
    for g, u in zip(gradients(params), moved, strict=True):
        np.testing.assert_array_equal(u, np.asarray(clip(g, norm, 0.75)))


def test_a_link_that_measures_is_the_first_of_its_chain():
    with pytest.raises(ValueError, match="clip_by_global_norm measures the gradients, and comes after trace"):
        hs.chain(hs.trace(0.9), hs.clip_by_global_norm(1.0))


def test_squares_below_2_to_the_minus_50_of_the_largest_add_nothing_to_an_exact_norm():
    """An element of 2^-25 of the largest would be a unit of the sum: contract N2 lets it be 0."""
    alone, among = torch.tensor([1.0]), torch.tensor([1.0, 0.99 * 2**-25, -(2.0**-40)])
    largest = largest_pattern([alone], torch.device("cpu"))
    assert torch.equal(sum_of_squares([among], largest), sum_of_squares([alone], largest))


@pytest.mark.skipif(build.find_cc() is None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_clip_with_the_bits_of_plain_steps(dtype):
    scale = 1e37 if dtype == torch.float32 else 1.0  # past 2^64 what is scaled is 2^-64 times the gradient
    plain, built = parameters(dtype, scale), parameters(dtype, scale)
    for params in (plain, built):
        wide = torch.ones(6, 8, dtype=dtype)[:, ::2]  # not row-major, and in no kernel
        params[-1].data, params[-1].grad = torch.zeros_like(wide), wide
    norm, of_kernels = (hs.clip_grad_norm_(x, 0.75, compile=y) for x, y in ((plain, False), (built, True)))
    assert torch.equal(norm, of_kernels)
    for g, expected in zip(gradients(built), gradients(plain), strict=True):
        np.testing.assert_array_equal(g, expected)


@pytest.mark.skipif(build.find_cc() is None, reason="needs a C compiler")
def test_a_gradient_that_is_given_twice_is_scaled_twice_and_not_by_threads_at_once(monkeypatch):
    monkeypatch.setattr(in_place, "run_kernel", lambda *_: pytest.fail("rows of a kernel share memory"))
    p, q = (torch.nn.Parameter(torch.zeros(1000)) for _ in "ab")
    p.grad, q.grad = (torch.full((1000,), 2.0) for _ in "ab")
    for x, compile in ((p, True), (q, False)):
        hs.clip_grad_norm_([x, x], 1.0, compile=compile)
    assert torch.equal(p.grad, q.grad)


def test_gradients_within_the_norm_keep_their_bits_and_their_version():
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([0.5, -0.25])
    version = p.grad._version
    hs.clip_grad_norm_(p, 1.0)
    assert p.grad.tolist() == [0.5, -0.25]
    assert p.grad._version == version
