"""The batteries by which Optax holds its own aliases and those of `optax.contrib`, as statements about ours.

Two of Optax's statements are not kept: see `test_the_two_exceptions_are_by_design`.
"""

import functools
import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
from on_jax.steps import assert_trees_same, run, take_step

# A learning rate with which each solves the problems below.
ALIASES = {
    "adam": functools.partial(hs.adam, 0.1),
    "adamw": functools.partial(hs.adamw, 0.1),
    "nadamw": functools.partial(hs.adamw, 1e-2, nesterov=True),
    "lamb": functools.partial(hs.lamb, 1e-3),
    "lion": functools.partial(hs.lion, 1e-2, weight_decay=1e-4),
    "sgd": functools.partial(hs.sgd, 1e-3, momentum=0.9),
    "one_pass": functools.partial(hs.adamw, 1e-2, **hs.recipes.one_pass),
    "split16": functools.partial(hs.adamw, 0.1, param_storage="split16"),
    "adan": functools.partial(hs.adan, 0.1),
    "ademamix": functools.partial(hs.ademamix, 0.1, b3=0.99),
    "store_state": lambda: hs.store_state(optax.adam(0.1), "bfloat16"),
}
# Wrappers of optax.contrib and how they are put around a transform of ours.
WRAPPED = {
    "reduce_on_plateau": lambda: optax.chain(hs.sgd(1e-3, momentum=0.9), optax.contrib.reduce_on_plateau()),
    "schedule_free": lambda: optax.contrib.schedule_free(hs.adam(0.1, b1=0.0), learning_rate=0.1),
    "mechanize": lambda: optax.contrib.mechanize(hs.adam(0.1)),
    "accumulate_gradients": lambda: hs.accumulate_gradients(hs.adam(0.1), 2),
    "skip_nonfinite": lambda: hs.skip_nonfinite(hs.adam(0.1)),
}
EVERY = ALIASES | WRAPPED


def parabola():
    """A quadratic of a vector: where to start, where to end, and what to minimize."""
    goal = jnp.array([1.0, -1.0, 1.0])
    return jnp.array([-1.0, 10.0, 1.0]), goal, lambda p: jnp.sum((p - goal) ** 2)


def rosenbrock():
    """The banana: a narrow, bent valley."""
    return jnp.zeros(2), jnp.ones(2), lambda p: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2


def matrices():
    """A quadratic of a tree of a matrix, a tensor and a number."""
    goal = {"a": jnp.array([[1.0, -1.0], [0.5, 2.0]]), "b": [jnp.ones((2, 1, 3)), jnp.float32(-2.0)]}
    start = jax.tree.map(jnp.zeros_like, goal)
    return (
        start,
        goal,
        lambda p: sum(jnp.sum((x - y) ** 2) for x, y in zip(*map(jax.tree.leaves, (p, goal)), strict=True)),
    )


PROBLEMS = {"parabola": parabola, "rosenbrock": rosenbrock, "matrices": matrices}


def averaged(name, state, params):
    return optax.contrib.schedule_free_eval_params(state, params) if name == "schedule_free" else params


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_it_ends_at_the_minimum(problem, name):
    start, goal, loss = PROBLEMS[problem]()
    tx = EVERY[name]()

    def step(carry, _):
        value, g = jax.value_and_grad(loss)(carry[0])
        return take_step(tx, *carry, g, value=value), None

    (params, state), _ = jax.jit(lambda c: jax.lax.scan(step, c, None, 10_000))((start, tx.init(start)))
    for actual, due in zip(
        jax.tree.leaves(averaged(name, state, params)), jax.tree.leaves(goal), strict=True
    ):
        np.testing.assert_allclose(actual, due, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", EVERY)
def test_state_and_weights_keep_their_types_through_any_step(name):
    """So that they can be carried by `lax.scan`, and a second step compiles nothing: on shapes alone."""
    tx = EVERY[name]()
    for dtype in ("float32", "bfloat16", "float16"):
        if dtype != "float32" and name in ("schedule_free", "mechanize"):
            continue  # both keep copies of the weights that their own arithmetic makes float32
        params = {"w": jax.ShapeDtypeStruct((4, 3), dtype), "b": jax.ShapeDtypeStruct((), dtype)}
        wide = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, "float32"), params)
        state = jax.eval_shape(tx.init, params)
        # Optax's Adam keeps averages in the dtype of the gradients.
        for grads in (params,) if name == "store_state" else (params, wide):
            after = jax.eval_shape(
                lambda p, s, g: take_step(tx, p, s, g, value=jnp.float32(1)), params, state, grads
            )
            for one, other in zip(jax.tree.leaves((params, state)), jax.tree.leaves(after), strict=True):
                assert (one.shape, one.dtype, one.weak_type) == (other.shape, other.dtype, other.weak_type)
            assert jax.tree.structure(after) == jax.tree.structure((params, state))


@pytest.mark.parametrize("name", EVERY)
def test_it_takes_arguments_that_it_does_not_expect(name):
    tx, params = EVERY[name](), {"w": jax.ShapeDtypeStruct((4,), "float32")}
    step = functools.partial(take_step, tx, value=1.0, unexpected=1)
    jax.eval_shape(step, params, jax.eval_shape(tx.init, params), params)


@pytest.mark.parametrize("name", EVERY)
def test_a_map_over_its_params_changes_nothing(name):
    tx, params = EVERY[name](), {"w": jnp.ones((4, 3)), "b": jnp.ones(())}
    state = tx.init(params)
    mapped = optax.tree.map_params(tx, lambda x: x, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (mapped, state)), strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "sgd" else pytest.mark.slow) for x in ALIASES]
)
def test_multi_steps_moves_nothing_between_steps(name):
    tx = optax.MultiSteps(ALIASES[name](), every_k_schedule=4)
    params = {"w": jnp.array([1.0, 2.0], jnp.bfloat16), "v": jnp.array([1.0, 2.0])}
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(params, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert not any(u.any() for u in jax.tree.leaves(updates))
    assert_trees_same(after.inner_opt_state, state.inner_opt_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [hs.adam, hs.adamw, hs.adan, hs.ademamix, hs.lion, hs.sgd, hs.lamb, hs.lamb16]
)
def test_injected_hyperparameters_are_numbers(make):
    """Rates by which roundings are chosen stay numbers, as docs/how-to/schedules.md says."""
    start, _, loss = parabola()
    static = [name for name in ("b1", "b2", "b3", "momentum") if name in inspect.signature(make).parameters]
    injected = optax.inject_hyperparams(make, static_args=static, hyperparam_dtype=jnp.float32)(1e-3)
    params, rows = start.astype(jnp.bfloat16), jax.grad(loss)(start)[None]
    assert_trees_same(run(injected, params, rows)[0], run(make(1e-3), params, rows)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [hs.adam, hs.adamw, hs.adan, hs.ademamix, hs.lion, hs.sgd, hs.lamb, hs.lamb16]
)
def test_a_constant_schedule_is_its_number(make):
    start, _, loss = parabola()
    rows = jnp.stack([jax.grad(loss)(start + k) for k in range(10)])
    ours, theirs = (run(make(rate), start, rows)[0] for rate in (optax.constant_schedule(1e-3), 1e-3))
    assert_trees_same(ours, theirs)


@pytest.mark.parametrize("name", hs.__all__)
def test_annotations_are_complete_and_can_be_read(name):
    """A learning rate is annotated as Optax's are: its schedule tests go by that."""
    function = getattr(hs, name)
    if inspect.isclass(function) or not callable(function):
        return
    hints, signature = typing.get_type_hints(function), inspect.signature(function)
    assert {"return", *signature.parameters} == hints.keys()
    if "learning_rate" in signature.parameters:
        rate = optax.ScalarOrSchedule
        expected = rate | None if name == "adafactor" else rate
        assert signature.parameters["learning_rate"].annotation == expected
    if name.startswith("scale_by"):
        assert hints["return"] is optax.GradientTransformationExtraArgs


def test_the_two_exceptions_are_by_design():
    """Updates are float32, since in 16 bits they could not lead to a weight.

    Optax asks for updates in the dtype of the gradients, and that `lax.cond` may choose between updates and
    gradients. Under float32 gradients both hold.
    """
    tx = hs.adamw(1e-3)
    for dtype, kept in (("float32", True), ("bfloat16", False), ("float16", False)):
        p = {"w": jnp.ones(3, dtype)}
        state = tx.init(p)
        assert (jax.eval_shape(tx.update, p, state, p)[0]["w"].dtype == dtype) == kept

        def chosen(p, state):
            return jax.lax.cond(True, lambda: tx.update(p, state, p), lambda: (p, state))

        if kept:
            jax.eval_shape(chosen, p, state)
            continue
        with pytest.raises(TypeError, match="float32"):
            jax.eval_shape(chosen, p, state)
        # The way out, where a step is to be left out.
        jax.eval_shape(
            functools.partial(take_step, hs.skip_nonfinite(tx)), p, hs.skip_nonfinite(tx).init(p), p
        )
