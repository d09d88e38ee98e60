"""The spec's Lion and momentum against others' in float32 over 100 steps, and what can be derived by hand."""

import numpy as np
import pytest

import halfstep_spec as spec

_STEPS, _SIZE, _LR = 100, 512, 1e-3
_UNIT = 2.0**-24


@pytest.fixture(scope="module")
def problem():
    rng = np.random.Generator(np.random.PCG64(0))
    return rng.normal(size=(_STEPS, _SIZE)).astype(np.float32), rng.normal(size=_SIZE).astype(np.float32)


def run_ours(rule, gradients, p, decay, weight_decay):
    step = spec.Step(rule, weight_decay, decay, "float32", "nearest")
    codes = p.view(np.uint32)
    state = step.init(codes)
    for g in gradients:
        codes, state = step.step(codes, g, state, "w", _LR)
    (moment,) = state.rule.moments.values()
    return codes.view(np.float32), moment.codes.view(np.float32)


def run_optax(tx, gradients, p):
    optax = pytest.importorskip("optax")
    state = tx.init(p)
    for g in gradients:
        updates, state = tx.update(g, state, p)
        p = np.asarray(optax.apply_updates(p, updates))
    return p, state


def test_float32_lion_follows_optax(problem):
    optax = pytest.importorskip("optax")
    gradients, p0 = problem
    theirs, state = run_optax(optax.lion(_LR, weight_decay=0.1), gradients, p0)
    p, mu = run_ours(spec.ScaleByLion(), gradients, p0, "decoupled", 0.1)
    # The average: three roundings a step on either side, and 1 - b2, which Optax forms in float64, off by
    # 2^-25 of 1; all remembered for at most a hundred steps, of values up to the largest gradient.
    largest = np.abs(gradients).max()
    assert np.abs(mu - optax.tree.get(state, "mu")).max() <= _STEPS * 8 * _UNIT * largest
    # The weights: equal signs. For a sign to differ, a sum must be within 2e-6 of zero. With 51,200 sums, the
    # chance of this is one in four, and here there is none. Then, on either side, each step has two roundings
    # of the update and one of the weight.
    bound = _STEPS * (4 * _UNIT * np.abs(p0).max() + 4 * _UNIT * _LR)
    assert np.abs(p - theirs).max() <= bound


@pytest.mark.parametrize("nesterov", [False, True])
def test_float32_momentum_follows_optax(problem, nesterov):
    optax = pytest.importorskip("optax")
    gradients, p0 = problem
    theirs, state = run_optax(optax.sgd(_LR, 0.9, nesterov), gradients, p0)
    p, trace = run_ours(spec.Trace(0.9, nesterov), gradients, p0, "l2", 0.0)
    # The same operations in the same order, op by op: the same bits.
    np.testing.assert_array_equal(trace, optax.tree.get(state, "trace"))
    np.testing.assert_array_equal(p, theirs)


@pytest.mark.parametrize("nesterov", [False, True])
def test_float32_momentum_with_decay_follows_torch(problem, nesterov):
    torch = pytest.importorskip("torch")
    gradients, p0 = problem
    p = torch.nn.Parameter(torch.from_numpy(p0.copy()))
    optimizer = torch.optim.SGD([p], _LR, 0.9, weight_decay=0.1, nesterov=nesterov)
    for g in gradients:
        p.grad = torch.from_numpy(g)
        optimizer.step()
    ours, trace = run_ours(spec.Trace(0.9, nesterov), gradients, p0, "l2", 0.1)
    # Two roundings of what is summed and two of the sum a step on our side; torch may fuse. A sum remembers
    # ten steps of up to the largest gradient, so is at most ten times that.
    largest = 10 * (np.abs(gradients).max() + 0.1 * np.abs(p0).max())
    of_sum = 10 * 4 * _UNIT * largest
    bound = _STEPS * (2 * _UNIT * np.abs(p0).max() + _LR * (of_sum + 2 * _UNIT * largest))
    assert np.abs(trace - optimizer.state[p]["momentum_buffer"].numpy()).max() <= of_sum + bound
    assert np.abs(ours - p.detach().numpy()).max() <= bound


def test_the_sign_of_either_zero_is_plus_zero_and_of_nan_is_nan():
    lion = spec.ScaleByLion()
    g = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-30, -2.0], np.float32)
    with np.errstate(invalid="ignore"):
        u, _ = lion.step(g, lion.init(g.shape), "w")
    expected = np.array([0.0, 0.0, np.nan, 1.0, -1.0, 1.0, -1.0], np.float32)
    assert (u.view(np.uint32) == expected.view(np.uint32)).all()


def test_lion_reads_the_average_of_the_step_before():
    lion = spec.ScaleByLion(b1=0.5, b2=0.5, mu_dtype="bfloat16")
    _, state = lion.step(np.array([2.0], np.float32), lion.init((1,)), "w")
    u, _ = lion.step(np.array([-1.5], np.float32), state, "w")  # 0.5 * 1 - 0.5 * 1.5 < 0
    assert u[0] == -1


def test_momentum_gives_what_was_stored():
    """1 + 2^-8 is a tie in bfloat16, and goes to even."""
    trace = spec.Trace(0.5, accumulator_dtype="bfloat16")
    u, state = trace.step(np.array([1 + 2.0**-8], np.float32), trace.init((1,)), "w")
    assert u[0] == spec.decode(state.moments["trace"].codes, "bfloat16")[0] == 1
