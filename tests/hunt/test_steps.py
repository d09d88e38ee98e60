"""The hunt: any rule, format, weight storage, tree and numbers; each package has the bits of the reference.

`make hunt` takes 100,000 examples; CI takes 2,000. What it has found stands as a named test.
"""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from halfstep_spec import decode
from hunt.settings import EXAMPLES, SEED, Numbers, Setting, kinds_for, numbers_of, patterns, settings_of_steps
from hunt.sides import Jax, Reference, Torch, assert_same_arrays, differ_by_subnormals, subnormals_are_zeros

LEAST = 2.0**-40
"""Squares from here up are normal in float32; XLA on a CPU takes subnormal numbers for zero (contract A8)."""
_COMPILED = max(16, EXAMPLES // 250)
_HUNT = {
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate, Phase.shrink],
}

# What is said of such runs is true, and no matter here.
pytestmark = pytest.mark.filterwarnings("ignore:.*too coarse for the factor of a matrix")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Step small arrays in one thread: a second one costs more time than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def follow(
    run: type, setting: Setting, numbers: Numbers, draw_seed: int, kinds: list[str], least: float = 0.0
) -> None:
    """Take a step per kind of gradient beside the reference, and compare after each.

    Where JAX differs because XLA on a CPU takes subnormals for zeros (contract A8), the run ends.
    """
    shapes = dict(setting.shapes)

    def arrays(step, kind):
        seeds = {name: draw_seed + 1000 * step + i for i, name in enumerate(shapes)}
        return {
            name: patterns(seeds[name], kind, shape, setting.dtype, least) for name, shape in shapes.items()
        }

    weights = arrays(0, kinds[0])
    with np.errstate(all="ignore"):
        due, given = Reference(setting, numbers, weights), run(setting, numbers, weights)
        for t, kind in enumerate(kinds[1:], 1):
            gradients, before = arrays(t, kind), due
            due = before.after(gradients)
            given.step(gradients)
            try:
                assert_same_arrays(given.arrays(), due.arrays(), f"step {t}")
            except AssertionError:
                with subnormals_are_zeros():
                    without = before.after(gradients)
                if run is Jax and differ_by_subnormals(given.arrays(), due.arrays(), without.arrays()):
                    return
                raise


@st.composite
def examples(draw, setting=None):
    """Draw a setting, its numbers, a seed of patterns, the kind of the weights and of each gradient."""
    setting = draw(settings_of_steps()) if setting is None else setting
    kinds = draw(st.lists(kinds_for(setting), min_size=2, max_size=4))
    return setting, draw(numbers_of(setting)), draw(st.integers(0, 2**32)), kinds


@pytest.mark.slow
@seed(SEED)
@settings(max_examples=EXAMPLES * 4 // 5, **_HUNT)
@given(examples())
def test_torch_has_the_bits_of_the_reference(example):
    follow(Torch, *example)


@pytest.mark.slow
@seed(SEED)
@settings(max_examples=EXAMPLES // 5, **_HUNT)
@given(examples())
def test_rows_without_gradients_leave_finite_weights(example):
    """The packages have the reference's bits, so that its weights are looked at: half of them were NaN."""
    setting, numbers, draw_seed, _ = example
    assume(numbers.rule.get("epsilon") != 0)  # 0 / 0, as it is asked for
    numbers = dataclasses.replace(numbers, learning_rate=min(numbers.learning_rate, 1e-3))
    shapes = dict(setting.shapes)

    def arrays(step, kind):
        return {
            name: patterns(draw_seed + 1000 * step + i, kind, shape, setting.dtype)
            for i, (name, shape) in enumerate(shapes.items())
        }

    with np.errstate(all="ignore"):
        run = Reference(setting, numbers, arrays(0, "near 1"))
        for t in range(1, 5):
            run = run.after(arrays(t, "rows"))
    for name, array in run.arrays().items():
        if name.endswith(" p"):
            assert np.isfinite(decode(array.bits, setting.dtype)).all(), name


@functools.cache
def compiled_settings() -> list[tuple[Setting, Numbers]]:
    """Return settings that JAX compiles once each, for all examples, and rates for those that know them."""
    drawn: list[tuple[Setting, Numbers]] = []

    @seed(SEED)
    @settings(max_examples=_COMPILED, **{**_HUNT, "phases": [Phase.generate]})
    @given(settings_of_steps().flatmap(lambda chosen: st.tuples(st.just(chosen), numbers_of(chosen))))
    def collect(pair):
        drawn.append(pair)

    collect()
    return drawn


@pytest.mark.slow
@seed(SEED)
@settings(max_examples=EXAMPLES // 5, **_HUNT)
@given(st.data())
def test_jax_has_the_bits_of_the_reference(data):
    setting, known = data.draw(st.sampled_from(compiled_settings()))
    _, numbers, draw_seed, kinds = data.draw(examples(setting))
    if setting.auto:
        numbers = dataclasses.replace(numbers, rule=known.rule)
    follow(Jax, setting, numbers, draw_seed, kinds, least=LEAST)
