"""What a step feeds back (contract F19), against the sum that it is to keep."""

import dataclasses

import numpy as np
import pytest

from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.adan import ScaleByAdan
from halfstep_spec.rules.lion import ScaleByLion
from halfstep_spec.rules.trace import Trace
from halfstep_spec.storage.relative import relative

STEPS, SIZE = 200, 256


def moved(rule, gradients: np.ndarray) -> np.ndarray:
    """Return the sum of all updates, in double precision."""
    state, total = rule.init(gradients.shape[1:]), np.zeros(gradients.shape[1:])
    for g in gradients:
        u, state = rule.step(g, state, "w")
        total += u.astype(np.float64)
    return total


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_momentum_nothing_adds_up(nesterov):
    """The sum of the updates is that of float32 but for the last error, which later steps would apply."""
    g = np.random.Generator(np.random.PCG64(2)).standard_normal((STEPS, SIZE)).astype(np.float32)
    exact = Trace(0.9, nesterov)
    due = moved(exact, g)
    kept = {
        rounding: moved(dataclasses.replace(exact, accumulator_dtype="bfloat16", rounding=rounding), g) - due
        for rounding in ("stochastic", "feedback")
    }
    # An error of a sum below 8 is at most 2^-5, and it is fed back nine times; 200 of them walk much farther.
    largest = 2 * 9 * 2.0**-5
    assert np.abs(kept["feedback"]).max() <= largest
    assert np.sqrt((kept["stochastic"] ** 2).mean()) > 5 * np.sqrt((kept["feedback"] ** 2).mean())


def test_adam_is_nearer_to_float32_when_it_pays():
    g = np.random.Generator(np.random.PCG64(3)).standard_normal((STEPS, 16, 16)).astype(np.float32)
    due = moved(ScaleByAdam(), g)
    int4 = relative("int4", 16, 0, 0)
    off = {
        rounding: float(
            np.sqrt(((moved(ScaleByAdam(mu_dtype=int4, mu_rounding=rounding), g) - due) ** 2).mean())
        )
        for rounding in ("stochastic", "feedback")
    }
    assert off["feedback"] < off["stochastic"] / 2


def test_what_is_fed_back_moves_an_update_by_four_at_most():
    """A burst makes the scale of a block coarse: its neighbours' errors come 99 times in a long run."""
    adam = ScaleByAdam(
        b1=0.99, mu_dtype=relative("int4", 16, 0, 0), mu_rounding="feedback", bias_correction=False
    )
    stochastic = dataclasses.replace(adam, mu_rounding="stochastic", mu_dtype="float32")
    g = np.full((3, 16, 16), 1e-2, np.float32)
    g[2, :, 0] = 100
    states = [rule.init((16, 16))._replace(count=400) for rule in (adam, stochastic)]
    largest = 0.0
    for gradient in g:
        us, states = zip(
            *(rule.step(gradient, s, "w") for rule, s in zip((adam, stochastic), states, strict=True)),
            strict=True,
        )
        largest = max(largest, float(np.abs(us[0] - us[1]).max()))
    assert 3 < largest <= 4.1  # of float32's own update, which mu as it was stored before has moved a little


def test_at_a_slow_rate_the_first_errors_are_not_longer_than_the_way():
    """99 errors of mu in 20 steps are; without the bound the distance is 0.45 of the way."""
    g = 0.05 + 0.1 * np.random.Generator(np.random.PCG64(5)).standard_normal((20, 16, 16)).astype(np.float32)
    exact = ScaleByAdam(b1=0.99)
    due = moved(exact, g)
    fmt = relative("float8_e3m4")
    fmt = dataclasses.replace(fmt, min_size=0)
    kept = moved(dataclasses.replace(exact, mu_dtype=fmt, mu_rounding="feedback"), g)
    assert np.linalg.norm(kept - due) < 0.1 * np.linalg.norm(due)


def test_float32_has_nothing_to_pay():
    g = np.random.Generator(np.random.PCG64(4)).standard_normal((3, SIZE)).astype(np.float32)
    np.testing.assert_array_equal(moved(ScaleByAdam(mu_rounding="feedback"), g), moved(ScaleByAdam(), g))


@pytest.mark.parametrize(
    "rule",
    [
        ScaleByLion(mu_rounding="feedback"),
        ScaleByAdan(mu_rounding="feedback"),
        ScaleByAdam(nu_rounding="feedback"),
    ],
)
def test_what_no_update_is_linear_in_has_no_feedback(rule):
    with pytest.raises(ValueError, match="is feedback, and no update is linear in"):
        rule.init((2,))
