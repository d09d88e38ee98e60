"""The spec's Adam against others' Adam in float32, over 100 steps."""

import numpy as np
import pytest

import halfstep_spec as spec

_STEPS = 100
# Per step, the update of either side is off by at most about 8 roundings of 2^-24: two in each moment, both
# corrections, root, sum, quotient. Optax's 1 - b^t adds 1.3e-5. The sum over the steps bounds the path, and
# each weight adds one rounding of itself a step.
_PER_STEP = 8 * 2.0**-24 + 1.3e-5


def _run_ours(gradients, p, decay, weight_decay, **hyper):
    step = spec.Step(spec.ScaleByAdam(**hyper), weight_decay, decay, "float32", "nearest")
    codes = p.view(np.uint32)
    state = step.init(codes)
    for g in gradients:
        codes, state = step.step(codes, g, state, "w", 1e-3)
    return codes.view(np.float32)


@pytest.fixture(scope="module")
def problem():
    rng = np.random.Generator(np.random.PCG64(0))
    return rng.normal(size=(_STEPS, 512)).astype(np.float32), rng.normal(size=512).astype(np.float32)


@pytest.mark.parametrize("nesterov", [False, True])
def test_float32_adamw_follows_optax(problem, nesterov):
    optax = pytest.importorskip("optax")
    gradients, p0 = problem
    tx = optax.adamw(1e-3, weight_decay=0.1, nesterov=nesterov)
    p, state = p0, tx.init(p0)
    for g in gradients:
        updates, state = tx.update(g, state, p)
        p = np.asarray(optax.apply_updates(p, updates))
    ours = _run_ours(gradients, p0, "decoupled", 0.1, nesterov=nesterov)
    assert np.abs(ours - p).max() < _STEPS * 1e-3 * _PER_STEP * 2 + _STEPS * 2.0**-24 * np.abs(p0).max()


@pytest.mark.parametrize("decay", ["decoupled", "l2"])
def test_float32_adam_follows_torch(problem, decay):
    torch = pytest.importorskip("torch")
    gradients, p0 = problem
    p = torch.nn.Parameter(torch.from_numpy(p0.copy()))
    make = torch.optim.AdamW if decay == "decoupled" else torch.optim.Adam
    optimizer = make([p], lr=1e-3, weight_decay=0.1)
    for g in gradients:
        p.grad = torch.from_numpy(g)
        optimizer.step()
    ours = _run_ours(gradients, p0, decay, 0.1)
    bound = _STEPS * 1e-3 * _PER_STEP * 2 + _STEPS * 2.0**-24 * np.abs(p0).max()
    assert np.abs(ours - p.detach().numpy()).max() < bound


def test_the_update_reads_the_stored_moments():
    """One step in bfloat16: u is a function of the codes alone."""
    adam = spec.ScaleByAdam(mu_dtype="bfloat16", nu_dtype="bfloat16")
    g = np.array([0.3, -1.7, 12.5], np.float32)
    u, state = adam.step(g, adam.init(g.shape), "w")
    m, v = (spec.decode(stored.codes, "bfloat16") for stored in state.moments.values())
    r1, r2 = (np.float32(1) / spec.bias_correction(b, 1) for b in (0.9, 0.999))
    np.testing.assert_array_equal(u, m * r1 / (np.sqrt(v * r2) + np.float32(1e-8)))


def test_small_updates_move_stochastic_weights_by_the_right_mean_and_nearest_ones_not_at_all():
    """1,000 steps of 2^-12 onto 1.0 in bfloat16: half a unit in the last place is 2^-8."""
    size, steps, u = 4096, 1000, np.float32(2.0**-12)
    one = np.full(size, 0x3F80, np.uint16)
    nearest, stochastic = one, one
    for t in range(1, steps + 1):
        updates = np.full(size, u)
        nearest = spec.apply_updates(nearest, updates, "bfloat16")
        words = spec.random_words(0, t, "w", spec.Role.PARAM, (size,))
        emitted, _ = spec.RoundStochastically("bfloat16").emit(stochastic, updates, None, words)
        stochastic = spec.apply_updates(stochastic, emitted, "bfloat16")
    assert (nearest == one).all()
    moved = spec.decode(stochastic, "bfloat16").astype(np.float64) - 1
    # Each step's variance is at most gap * u, the gap being 2^-7 on [1, 2): the standard error of the mean.
    error = np.sqrt(steps * 2.0**-7 * u / size)
    assert abs(moved.mean() - steps * u) < 5 * error


@pytest.mark.parametrize(("root_ulps", "quotient_ulps"), [(1, 0), (0, 1), (1, 2), (4, 2)])
def test_a_root_and_a_quotient_that_are_off_move_the_term_by_no_more_than_their_bound(
    root_ulps, quotient_ulps
):
    """The bound of contract C5, before the term is rounded; and no term is off by less than half of that."""
    rng = np.random.Generator(np.random.PCG64(1))
    m_hat, v_hat = (rng.uniform(1, 4, 100_000).astype(np.float32) for _ in range(2))
    eps = np.float32(1e-8)
    root = np.sqrt(v_hat)
    right = m_hat.astype(np.float64) / (np.sqrt(v_hat.astype(np.float64)) + 1e-8)
    worst = 0.0
    for signs in ((1, -1), (-1, 1)):
        moved = root + np.float32(signs[0] * root_ulps) * np.spacing(root)
        term = m_hat / (moved + eps)
        term = term + np.float32(signs[1] * quotient_ulps) * np.spacing(term)
        worst = max(worst, np.abs(term / right - 1).max())
    bound = (root_ulps + quotient_ulps + 2) * 2.0**-23
    assert bound / 2 < worst <= bound
