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

import halfstep_spec as spec
from halfstep_spec import decode
from hunt.edits import EDITS, edited, edits_for
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
    run: type,
    setting: Setting,
    numbers: Numbers,
    draw_seed: int,
    kinds: list[str],
    edits: list[str] | tuple[()] = (),
    least: float = 0.0,
) -> None:
    """Take a step per kind of gradient beside the reference, and compare after each; then edit weights.

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
            if not edits:
                continue
            weights = {
                name: edited(edits[t % len(edits)], p, setting.dtype, draw_seed + t, least)
                for name, p in due.params.items()
            }
            due.set(weights)
            given.set(weights)


@st.composite
def examples(draw, setting=None):
    """Draw a setting, its numbers, a seed of patterns, kinds of weights and gradients, and edits."""
    setting = draw(settings_of_steps()) if setting is None else setting
    kinds = draw(st.lists(kinds_for(setting), min_size=2, max_size=4))
    edits = draw(st.lists(st.sampled_from(edits_for(setting.rule)), min_size=1, max_size=3))
    return setting, draw(numbers_of(setting)), draw(st.integers(0, 2**32)), kinds, edits


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
    setting, numbers, draw_seed, *_ = example
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


OWN_WEIGHTS = ("adamw_in_codes", "adamw_fed_back", "sgd_fed_back", "lamb", "adafactor")
"""Rules whose updates depend on the weights, or on how these are rounded."""
_PER_STEP = {"split8": 2.0**-7, "split16": 2.0**-15, "master": 0.0}
"""What a step rounds away, in units in the last place of a weight; of other storages it is at most one.

A compensation of half a unit goes where a step more than halves a weight.
"""


@pytest.mark.slow
@seed(SEED)
@settings(max_examples=EXAMPLES // 5, **_HUNT)
@given(examples(), st.lists(st.sampled_from(tuple(EDITS)), min_size=1, max_size=4))
def test_weights_that_are_set_move_as_they_do_in_float32(example, edits):
    """The packages have the reference's bits. Updates are the same; bits beside weights are half a unit."""
    setting, numbers, draw_seed, *_ = example
    assume(setting.rule not in OWN_WEIGHTS)
    dtype = "bfloat16" if setting.dtype == "float32" else setting.dtype
    setting = dataclasses.replace(setting, dtype=dtype, decay="")
    wide = dataclasses.replace(setting, dtype="float32", storage="nearest")
    draws = iter(range(draw_seed, draw_seed + 10**6))

    def arrays(kind):
        return {name: patterns(next(draws), kind, shape, dtype) for name, shape in setting.shapes}

    def in_float32(bits):
        return {name: decode(x, dtype).view(np.uint32) for name, x in bits.items()}

    weights = arrays("near 1")
    with np.errstate(all="ignore"):
        given, due = Reference(setting, numbers, weights), Reference(wide, numbers, in_float32(weights))
        for edit in edits:
            sizes = [{name: np.abs(decode(p, dtype)) for name, p in given.params.items()}]
            for _ in range(3):
                gradients = arrays("near 1")
                given.step(gradients)
                due.step(in_float32(gradients))
                sizes.append({name: np.abs(w.view(np.float32)) for name, w in due.params.items()})
                for name, w in due.params.items():
                    _assert_near(given, name, w.view(np.float32), np.stack([size[name] for size in sizes]))
            weights = {name: edited(edit, p, dtype, next(draws)) for name, p in given.params.items()}
            given.set(weights)
            due.set(in_float32(weights))
            for name, p in weights.items():
                _assert_near(given, name, decode(p, dtype), np.abs(decode(p, dtype))[None])


def _assert_near(given: Reference, name: str, due: np.ndarray, sizes: np.ndarray) -> None:
    """Compare weights with those of float32, of these sizes since they were set."""
    fmt, step, steps = spec.FLOAT_FORMATS[given.setting.dtype], given.step_of_leaf, len(sizes) - 1
    known = step.float32_params(given.params[name], given.states[name])
    size, largest = sizes.max(0), decode(np.full((), fmt.max_code, fmt.code_dtype), fmt.name)
    exponent = np.maximum(np.frexp(np.where(size < largest, size, 1))[1] - 1, 1 - fmt.bias)
    unit, smallest = np.ldexp(1.0, exponent - fmt.mantissa_bits), 2.0 ** (1 - fmt.bias - fmt.mantissa_bits)
    # The model's zero has lost its sign, and with it that of the bits beside it (contract P2).
    lost = np.where(sizes.min(0) <= smallest, 1.0, _PER_STEP.get(step.param_storage, 1.0))
    most = (0.5 + steps * lost) * unit + steps * 2.0**-22 * size
    near = np.abs(known - due.astype(np.float64)) <= most
    assert (near | ~(size < largest / 2)).all(), f"{name}, {steps} steps later: {known} is not near {due}"
    np.testing.assert_array_equal(np.isnan(known), np.isnan(due))


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
    _, numbers, draw_seed, kinds, edits = data.draw(examples(setting))
    if setting.auto:
        numbers = dataclasses.replace(numbers, rule=known.rule)
    follow(Jax, setting, numbers, draw_seed, kinds, edits, least=LEAST)
