"""SGD whose errors of rounding weights are fed back: its formula, and both packages."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch
from halfstep.rules.sgd_fed_back import SGDFedBack
from on_torch.steps import step_by_ones
from twin.moving import jax_run, torch_run
from twin.test_adamw_fed_back import SHAPE, draws, error

MOMENTUM = 0.9


def run_torch(p, gradients, rates=(1e-2,), made=None, **options):
    """Return weights in float32, and the optimizer, after steps in torch, each at the next rate."""
    options = {"param_storage": "feedback", "seed": 7, "compile": False} | options
    left = itertools.cycle(rates)

    def make(named):
        optimizer = made(named) if made else halfstep_torch.SGD(named, rates[0], MOMENTUM, **options)
        optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(lr=next(left)))
        return optimizer

    return torch_run(make, p, gradients)


def exact(p, gradients, rates=(1e-2,), decay=0.0):
    """Return the weights of SGD in float64, at each step."""
    p, sums, b = p.astype(np.float64), 0.0, float(np.float32(MOMENTUM))
    for t, g in enumerate(gradients):
        sums = b * sums + g + decay * p
        p = p - rates[t % len(rates)] * sums
    return p


@pytest.mark.parametrize("nesterov", [False, True])
def test_alias_and_class_agree_to_the_bit(nesterov):
    p, gradients = draws(4)
    tx = halfstep_jax.sgd(1e-2, MOMENTUM, param_storage="feedback", seed=7, nesterov=nesterov)
    w, state = jax_run(tx, p, gradients)
    theirs, made = run_torch(p, gradients, nesterov=nesterov)
    np.testing.assert_array_equal(w, theirs)
    kept = next(iter(made.state.values()))["momentum_buffer"]
    np.testing.assert_array_equal(np.asarray(state.trace["w"], np.float32), kept.float().numpy())
    assert not np.array_equal(w, p)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"nesterov": True}])
def test_errors_do_not_add_up(options):
    """Independent errors grow with the root of the steps, to 5 gaps; those fed back stay below 0.94 gaps."""
    p, gradients = draws(300)
    gradients = 0.1 * gradients
    wide = torch.nn.Parameter(torch.from_numpy(p.copy()))
    reference = torch.optim.SGD([wide], 1e-3, MOMENTUM, **options)
    for g in np.asarray(jnp.asarray(gradients, jnp.bfloat16), np.float32):
        wide.grad = torch.from_numpy(g)
        reference.step()
    due = wide.detach().numpy().astype(np.float64)
    options = options | {"accumulator_dtype": "float32"}
    fed_back = error(run_torch(p, gradients, (1e-3,), **options)[0], due)
    alone = error(run_torch(p, gradients, (1e-3,), param_storage="stochastic", **options)[0], due)
    assert fed_back < 0.94 < 3 < alone


def test_a_rate_that_rises_from_near_0_releases_no_large_errors():
    """One gap moves the sum by 16 times itself at most, where nobody has said what the rate will be.

    At 1e-8 some three of the 6,144 weights move by a gap. Divided by 1e-8 alone, that would come back as a
    hundred thousand gaps; by 16 sums it comes back as some two hundred.
    """
    p, gradients = draws(60)
    rates = [1e-8] * 40 + [1e-3] * 20

    def made(named):
        rule = SGDFedBack(1e-8, MOMENTUM, seed=7, accumulator_dtype="float32")
        optimizer = halfstep_torch.Optimizer(named, halfstep_torch.chain(rule), compile=False)
        optimizer._choices[0].first_lr = None
        return optimizer

    due = exact(p, gradients, rates)
    assert error(run_torch(p, gradients, rates, made)[0], due) < 20


def test_it_is_as_long_as_sgd_at_rates_below_a_gap():
    """400 steps of .001 gaps each: the mean of 6,144 elements is right to five deviations."""
    p, (g,) = draws(1)
    gradients = np.broadcast_to(np.abs(g) * 0.1 + 0.1, (400, *SHAPE))
    moved = (run_torch(p, gradients, (1e-6,))[0].astype(np.float64) - p).mean()
    due = (exact(p, np.asarray(jnp.asarray(gradients, jnp.bfloat16), np.float32), (1e-6,)) - p).mean()
    spread = 2.0**-9 * 2 / np.sqrt(p.size)
    assert abs(moved - due) < 5 * spread < abs(due)


def test_reports_and_chains_know_it():
    shapes = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)}
    tx = halfstep_jax.sgd(1e-2, MOMENTUM, param_storage="feedback")
    assert halfstep_jax.describe(tx, shapes).of("w").rounding == "feedback"
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    halfstep_jax.check_chain(tx, params)
    with pytest.raises(ValueError, match="scale changes the updates that sgd_fed_back applies to 'w'"):
        halfstep_jax.check_chain(optax.chain(tx, optax.scale(0.5)), params)


def test_a_momentum_of_0_in_mid_run_is_refused_before_a_weight_changes():
    w = torch.nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16))
    optimizer = halfstep_torch.SGD(
        [("w", w)], 1e-2, momentum=MOMENTUM, param_storage="feedback", compile=False
    )
    step_by_ones(optimizer)
    before = w.detach().clone()
    optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(ValueError, match=r"momentum=0\.0 keeps nothing of it. Use a number above 0"):
        optimizer.step()
    assert torch.equal(w, before)
