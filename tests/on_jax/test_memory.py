"""A step touches each byte once: donated memory is reused, nothing is copied, one program serves all steps.

XLA says before a run what a compiled step will allocate, so these tests measure no time.
"""

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import halfstep_jax as hs
from on_jax.steps import PLAIN_STATES, gradients, take_step, weights

SIZE = 512 * 512
# Keys, scalars and loop counters. A copy of one bfloat16 leaf would be 2 * SIZE bytes.
SMALL = 4096


def compile_step(tx, param_dtype, gradient_dtype=None, leaves=1):
    names = [f"w{i}" for i in range(leaves)]
    params = {n: jax.ShapeDtypeStruct((512, 512), param_dtype) for n in names}
    rows = {n: jax.ShapeDtypeStruct((512, 512), gradient_dtype or param_dtype) for n in names}
    state = jax.eval_shape(tx.init, params)
    return (
        jax.jit(functools.partial(take_step, tx), donate_argnums=(0, 1)).lower(params, state, rows).compile()
    )


@pytest.mark.parametrize(
    ("param_dtype", "state_dtype"),
    [
        pytest.param(p, s, marks=[] if p == s else pytest.mark.slow)
        for p, s in itertools.product(PLAIN_STATES, PLAIN_STATES)
    ],
)
@pytest.mark.parametrize("param_storage", ["stochastic", pytest.param("nearest", marks=pytest.mark.slow)])
def test_a_donated_step_needs_no_temporary_memory(param_dtype, state_dtype, param_storage):
    nu = "bfloat16" if state_dtype == "float16" else state_dtype  # plain float16 is refused
    tx = hs.adamw(1e-3, mu_dtype=state_dtype, nu_dtype=nu, param_storage=param_storage)
    memory = compile_step(tx, param_dtype).memory_analysis()
    assert memory.temp_size_in_bytes < SMALL
    width = {"float32": 4, "bfloat16": 2, "float16": 2}
    assert memory.alias_size_in_bytes >= SIZE * (width[param_dtype] + 2 * width[state_dtype])


def test_moments_in_units_of_a_root_need_no_more_than_a_copy_of_the_codes():
    """XLA keeps a root that has two uses as a float32 array: no root has. nu's codes are read once more."""
    tx = hs.adamw(1e-3, mu_dtype=hs.relative("float8_e3m4"), nu_dtype="ufloat16_e7m9")
    memory = compile_step(tx, "bfloat16").memory_analysis()
    assert memory.temp_size_in_bytes < 2 * SIZE + SMALL


def test_weights_fed_back_need_no_more_than_copies_in_16_bits():
    """A root and a weight with two uses were float32 arrays, and a step of 4 million took twice its time."""
    memory = compile_step(hs.adamw(1e-3, param_storage="feedback"), "bfloat16").memory_analysis()
    assert memory.temp_size_in_bytes < 4 * SIZE + SMALL


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        hs.adamw(1e-3, nesterov=True, eps_root=1e-6, mu_rounding="stochastic"),
        hs.adam(optax.constant_schedule(1e-3)),
        optax.chain(hs.add_decayed_weights(0.1), hs.adam(1e-3)),
        optax.inject_hyperparams(hs.adamw, hyperparam_dtype=jnp.float32)(1e-3),
    ],
    ids=["nesterov", "schedule", "l2", "injected"],
)
def test_other_recipes_need_no_temporary_memory_either(tx):
    assert compile_step(tx, "bfloat16").memory_analysis().temp_size_in_bytes < SMALL
    assert compile_step(tx, "bfloat16", "float32").memory_analysis().temp_size_in_bytes < SMALL


def test_a_leaf_takes_three_kernels_and_no_copy():
    text = compile_step(hs.adamw(1e-3), "bfloat16", leaves=2).as_text()
    entry = text[text.index("\nENTRY") :]
    whole_arrays = re.findall(r"= \w+\[512,512\]\S* (\w+)\(", entry)
    assert sorted(set(whole_arrays)) == ["fusion", "parameter"]
    assert whole_arrays.count("fusion") == 2 * 3


def test_the_parts_of_a_weight_are_split_from_one_sum():
    """Without that, XLA computes the step for each part, and copies both before one is overwritten."""
    compiled = compile_step(hs.adamw(1e-3, param_storage="split16"), "bfloat16")
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * SIZE + SMALL  # the sum
    assert not re.findall(r"\[512,512\]\S* copy\(", compiled.as_text())


def test_a_moment_with_block_scales_is_computed_once_for_its_maxima_and_once_for_its_codes():
    """Without that, XLA keeps it in float32, or computes it for each half of the maxima, one by one."""
    fp8 = {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")}
    text = compile_step(hs.adamw(1e-3, b1=0.875, b2=0.998, **fp8), "bfloat16").as_text()
    # One decay rate per kernel that computes the moment.
    assert text.count("f32[] constant(0.875)") == 2
    assert text.count("f32[] constant(0.998)") == 2


@pytest.mark.parametrize(
    ("mu", "nu"),
    [("float8_e4m3fn", "ufloat8_e5m3"), pytest.param("int8", "uroot8", marks=pytest.mark.slow)],
)
def test_block_scales_need_no_array_of_more_than_bytes(mu, nu):
    tx = hs.adamw(1e-3, mu_dtype=hs.scaled(mu), nu_dtype=hs.scaled(nu))
    memory = compile_step(tx, "bfloat16").memory_analysis()
    # Bytes of half the elements of each moment, and of an eighth; codes are written directly to the output.
    assert memory.temp_size_in_bytes < 1.25 * SIZE + SMALL


@pytest.mark.parametrize(("recipe", "most"), [("eight_bit", 2), ("four_bit", 3)])
def test_a_moment_with_error_feedback_crosses_no_kernel_in_float32(recipe, most):
    """Of codes, a byte each is kept: old ones, which are read when new ones are there, and unpacked ones."""
    compiled = compile_step(hs.adamw(1e-3, recipe=recipe), "bfloat16")
    text, scales = compiled.as_text(), SIZE // 16
    assert compiled.memory_analysis().temp_size_in_bytes < most * SIZE + scales + SMALL
    assert not re.findall(r"= f32\[512,512\]\S* fusion", text[text.index("\nENTRY") :])


def test_one_compilation_serves_all_steps_and_learning_rates():
    traced = []

    def step(params, state, g):
        traced.append(1)
        return take_step(tx, params, state, g)

    tx = optax.inject_hyperparams(hs.adamw, hyperparam_dtype=jnp.float32)(1e-3)
    params, rows = {"w": weights(10)}, gradients(4, 10)
    state = tx.init(params)
    step = jax.jit(step)
    for k, g in enumerate(rows):
        state.hyperparams["learning_rate"] = jnp.float32(1e-3 / (k + 1))
        params, state = step(params, state, {"w": g})
    assert len(traced) == 1
    assert step._cache_size() == 1


def test_a_schedule_compiles_once():
    tx = hs.adamw(optax.cosine_decay_schedule(1e-3, 10), weight_decay=optax.linear_schedule(0.1, 0.0, 10))
    step = jax.jit(functools.partial(take_step, tx))
    params = {"w": weights(10)}
    state = tx.init(params)
    for g in gradients(4, 10):
        params, state = step(params, state, {"w": g})
    assert step._cache_size() == 1


def test_no_loop_compiles_again_op_by_op():
    tx = hs.adamw(1e-3)
    params, rows = {"w": weights(10), "v": weights(3)}, gradients(3, 10)
    state = tx.init(params)

    def step(k, params, state):
        return take_step(tx, params, state, {"w": rows[k], "v": rows[k][:3]})

    params, state = step(0, params, state)
    with compilations() as names:
        params, state = step(1, params, state)
    assert names == []
    with compilations() as names:
        jax.jit(lambda x: x * 3 - 7)(rows[0])
    assert names != []


@contextlib.contextmanager
def compilations():
    """Collect what XLA compiles in the block."""
    names, active = [], True

    def listen(name, *_, **__):
        if active and name.endswith("backend_compile_duration"):
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    active = False
