"""The spec's LAMB against exact norms, and against Optax's LAMB in float32, over 100 steps."""

import numpy as np
import pytest

import halfstep_spec as spec

UNIT = 2.0**-24


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_a_norm_neither_underflows_nor_overflows(scale):
    x = (np.random.default_rng(0).normal(size=1000) * scale).astype(np.float32)
    exact = np.linalg.norm(x.astype(np.float64))
    # Sums of halves: ten additions and a product to each square, half of that for the root, and its rounding.
    assert abs(float(spec.norm(x)) / exact - 1) < 7 * UNIT


def test_the_norm_of_one_element_is_that_element():
    for x in (1e-38, 1.1, 3e38, 0.0, np.inf):
        assert spec.norm(np.float32(-x)) == np.float32(x)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_the_state_is_adams(bias_correction):
    g = np.random.default_rng(0).normal(size=(5, 24)).astype(np.float32)
    p = np.linspace(1, 2, 24, dtype=np.float32).view(np.uint32)
    states = []
    for make in (spec.Step, spec.Lamb):
        step = make(spec.ScaleByAdam(bias_correction=bias_correction), 0.1, param_dtype="float32")
        codes, state = p, step.init(p)
        for row in g:
            codes, state = step.step(codes, row, state, "w", 1e-3)
        states.append(state.rule)
    for name in ("mu", "nu"):
        np.testing.assert_array_equal(states[0].moments[name].codes, states[1].moments[name].codes)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_float32_lamb_follows_optax(weight_decay):
    optax = pytest.importorskip("optax")
    steps, lr = 100, 1e-2
    rng = np.random.default_rng(0)
    gradients, p0 = (rng.normal(size=shape).astype(np.float32) for shape in ((steps, 512), 512))
    tx = optax.lamb(lr, weight_decay=weight_decay)
    p, state = p0, tx.init(p0)
    for g in gradients:
        updates, state = tx.update(g, state, p)
        p = np.asarray(optax.apply_updates(p, updates))
    step = spec.Lamb(spec.ScaleByAdam(eps=1e-6), weight_decay, param_dtype="float32")
    codes = p0.view(np.uint32)
    ours = step.init(codes)
    for g in gradients:
        codes, ours = step.step(codes, g, ours, "w", lr)
    # Of either side: the update and its norm by 8 roundings and Optax's 1.3e-5 of 1 - b^t, norms by the bound
    # of any order; a step of an element is under a quarter of lr |p|.
    relative = 2 * (8 * UNIT + 1.3e-5) + 4 * (256 + 2) * UNIT
    largest = np.linalg.norm(p) + np.linalg.norm(p0)
    bound = steps * (lr * largest / 4 * relative + 2 * UNIT * np.abs(p).max())
    assert np.abs(codes.view(np.float32) - p).max() < bound
    assert np.abs(p - p0).max() > 20 * bound


def test_a_power_tempers_the_ratio_and_the_learning_rate():
    trust = spec.scale_by_tempered_trust_ratio(1e-2, 0.382)
    assert trust.ratio(np.float32(3), np.float32(1)) == np.float32(
        np.float64(np.float32(0.3)) ** float(np.float32(0.382))
    )
    assert trust.ratio(np.float32(1e6), np.float32(1)) == 2
    assert trust.ratio(np.float32(0), np.float32(1)) == 1
