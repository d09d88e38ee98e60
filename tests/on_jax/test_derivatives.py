"""Derivatives pass through a step: as through Optax's in float32, and straight through what is rounded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs

P = {"w": jnp.array([1.0, -0.5, 2.0]), "v": jnp.full((2, 2), 0.3)}
PAIRS = {
    "sgd": (hs.sgd, optax.sgd, {}),
    "momentum": (hs.sgd, optax.sgd, {"momentum": 0.9, "nesterov": True}),
    "adamw": (hs.adamw, optax.adamw, {"weight_decay": 0.1, "eps_root": 1e-6}),
    "lion": (hs.lion, optax.lion, {"weight_decay": 0.1}),
    "lamb": (hs.lamb, optax.lamb, {"weight_decay": 0.1, "eps_root": 1e-6}),
}
# Both differ by some ten float32 roundings a step, and the derivative multiplies them by factors below 100.
RTOL = 1e-5


def loss(params):
    return sum(jnp.sum(x**4) for x in jax.tree.leaves(params))


def trained(make, rate, params, steps=3):
    """Return the loss after some steps."""
    tx = make(rate)
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    return loss(params)


def pair(name, **more):
    ours, theirs, options = PAIRS[name]
    return functools.partial(ours, **options, **more), functools.partial(theirs, **options)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["op by op", "jit"])
@pytest.mark.parametrize("name", PAIRS)
def test_derivatives_by_rate_and_weights_are_those_of_optax(name, transform):
    ours, theirs = (
        transform(jax.grad(functools.partial(trained, make), (0, 1)))(jnp.float32(0.01), P)
        for make in pair(name)
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL * float(jnp.abs(b).max()))
        assert jnp.abs(a).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["op by op", "jit"])
def test_forward_mode_and_vmap_agree_with_reverse_mode_and_optax(transform):
    f, theirs = (functools.partial(trained, make, steps=1) for make in pair("adamw"))
    rates = jnp.array([0.01, 0.02], jnp.float32)
    reverse = transform(jax.vmap(jax.grad(f), (0, None)))(rates, P)
    np.testing.assert_allclose(reverse, jax.vmap(jax.grad(theirs), (0, None))(rates, P), rtol=RTOL)

    def forward(rate):
        return jax.jvp(lambda r: f(r, P), (rate,), (jnp.float32(1),))[1]

    np.testing.assert_allclose([transform(forward)(rate) for rate in rates], reverse, rtol=RTOL)


@pytest.mark.slow
def test_a_maml_loop_and_a_learned_rate_go_where_they_go_through_optax():
    """Derivatives of second order, by weights and by a rate, over tasks under vmap."""
    goals = jnp.array([[0.5, 1.0, -1.0], [1.5, 0.0, 2.0]])

    def adapted(make, meta, goal):
        tx, p = make(jnp.exp(meta["log_rate"]), 0.9), meta["p"]
        state = tx.init(p)
        for _ in range(2):
            updates, state = tx.update(jax.grad(lambda p: jnp.sum((p - goal) ** 4))(p), state, p)
            p = optax.apply_updates(p, updates)
        return jnp.sum((p - goal) ** 4)

    def learned(make):
        @jax.jit
        def step(meta, _):
            losses = lambda meta: jax.vmap(lambda goal: adapted(make, meta, goal))(goals).sum()  # noqa: E731
            return jax.tree.map(lambda x, g: x - 1e-3 * g, meta, jax.grad(losses)(meta)), None

        return jax.lax.scan(step, {"p": jnp.zeros(3), "log_rate": jnp.float32(-5.0)}, None, 10)[0]

    ours, theirs = learned(hs.sgd), learned(optax.sgd)
    for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(x, y, rtol=RTOL)
    assert ours["log_rate"] != -5.0


@pytest.mark.parametrize("param_storage", ["stochastic", "nearest", "compensated", "master"])
def test_rounding_is_straight_through(param_storage):
    """One step on bfloat16 weights: p + u to the derivative, whatever the rounding did."""
    p = jax.tree.map(lambda x: x.astype(jnp.bfloat16), P)
    g = jax.tree.map(jnp.ones_like, P)

    def moved(rate, make):
        tx = make(rate)
        return sum(jnp.sum(u) for u in jax.tree.leaves(tx.update(g, tx.init(p), p)[0]))

    got = jax.grad(moved)(jnp.float32(1e-4), functools.partial(hs.sgd, param_storage=param_storage))
    assert float(got) == -7.0  # the number of weights


CODED = {
    "momentum": lambda rate: hs.sgd(rate, 0.9, accumulator_dtype=hs.scaled("float8_e4m3fn", 4, 0, 0)),
    "one_pass": lambda rate: hs.adamw(rate, recipe="one_pass"),
    "nu": lambda rate: hs.adamw(rate, nu_dtype="ufloat16_e7m9"),
    "float16": lambda rate: hs.sgd(rate, 0.9, accumulator_dtype=hs.scaled("float16", 4, 0, 0)),
    "store_state": lambda rate: hs.store_state(optax.sgd(rate, 0.9), hs.scaled("float8_e4m3fn", 4, 0, 0)),
}


@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CODED)
def test_a_derivative_that_reaches_codes_is_refused(name, compiled):
    """Codes pass no derivative on: rates and weights would get wrong ones, some of the wrong sign."""
    by_weights = jax.grad(functools.partial(trained, CODED[name], jnp.float32(0.01), steps=2))
    with pytest.raises(ValueError, match=r"a derivative reaches a moment in codes or with scales"):
        (jax.jit(by_weights) if compiled else by_weights)(P)


def test_a_step_beside_a_derivative_may_have_codes():
    """As where a loss is differentiated and the step is taken in one function."""
    tx = CODED["one_pass"](1e-2)

    def step(params, state):
        value, g = jax.value_and_grad(loss)(params)
        stopped = jax.lax.stop_gradient((g, state, params))
        return value, tx.update(*stopped)

    (_, (updates, _)), _ = jax.value_and_grad(lambda p, s: step(p, s), has_aux=True)(P, tx.init(P))
    assert updates["w"].shape == (3,)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["op by op", "jit"])
def test_an_exact_norm_has_the_derivative_of_the_norm(transform):
    def clipped(scale, exact):
        g = jax.tree.map(lambda x: x * scale, P)
        u = hs.clip_by_global_norm(1.0, exact=exact).update(g, optax.EmptyState())[0]
        return sum(jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (u, P)), strict=True))

    exact, plain = (transform(jax.grad(functools.partial(clipped, exact=x)))(3.0) for x in (True, False))
    # Clipped updates do not change with the length of the gradient: two sums of about 5, each off by ulps.
    assert abs(exact) < 1e-5
    assert abs(plain) < 1e-5
