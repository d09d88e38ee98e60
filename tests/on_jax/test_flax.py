"""Flax trains with our transforms as they are: linen's TrainState and nnx's Optimizer, nothing subclassed."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

import halfstep_jax as hs
from on_jax.steps import assert_trees_same, take_step

X = jnp.asarray(np.random.default_rng(0).standard_normal((32, 8)), jnp.bfloat16)
Y = jnp.asarray(np.random.default_rng(1).standard_normal((32, 4)), jnp.float32)
STEPS = 30


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, param_dtype=jnp.bfloat16)(x))
        return nn.Dense(4, param_dtype=jnp.bfloat16)(x)


class Model(nnx.Module):
    def __init__(self):
        linear = functools.partial(nnx.Linear, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        self.layers = nnx.List([linear(8, 16), linear(16, 4)])

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.layers[0](x)))


def loss_of(predictions):
    return ((predictions.astype(jnp.float32) - Y) ** 2).mean()


def share_moved(before, after):
    """Return the share of weights that are not what they were; without biases, which leave 0 at once."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    moved = [np.asarray(a != b).ravel() for a, b in pairs if a.ndim == 2]
    return float(np.concatenate(moved).mean())


def train_linen(tx, steps=STEPS):
    model = Dense()
    params = model.init(jax.random.key(0), X)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state):
        grads = jax.grad(lambda p: loss_of(state.apply_fn(p, X)))(state.params)
        return state.apply_gradients(grads=grads)

    for _ in range(steps):
        state = step(state)
    return params, state


def train_nnx(tx):
    model = Model()
    params = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: loss_of(model(X)))(model))

    for _ in range(STEPS):
        step(model, optimizer)
    return params, nnx.state(model, nnx.Param), optimizer


# At this rate a step is at most about 1e-5 and the weights are around 0.3, where half a gap is 2^-10.
@pytest.mark.slow
def test_linen_weights_move_where_nearest_leaves_them():
    params, state = train_linen(hs.adamw(1e-5))
    assert {str(p.dtype) for p in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert share_moved(params, state.params) > 0.1
    params, state = train_linen(hs.adamw(1e-5, param_storage="nearest"))
    assert share_moved(params, state.params) < 0.02


@pytest.mark.slow
def test_nnx_weights_move_where_nearest_leaves_them():
    params, after, optimizer = train_nnx(hs.adamw(1e-5))
    assert {str(p.dtype) for p in jax.tree.leaves(after)} == {"bfloat16"}
    assert share_moved(params, after) > 0.1
    assert int(optimizer.step[...]) == STEPS
    params, after, _ = train_nnx(hs.adamw(1e-5, param_storage="nearest"))
    assert share_moved(params, after) < 0.02


@pytest.mark.slow
def test_nnx_takes_the_steps_of_a_plain_dict_of_the_same_names():
    model = Model()
    plain = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tx = hs.adamw(1e-2)
    opt_state = tx.init(plain)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: loss_of(model(X)))(model)
        optimizer.update(model, grads)
        return nnx.to_pure_dict(grads)

    plain_step = jax.jit(functools.partial(take_step, tx))
    for _ in range(2):
        plain, opt_state = plain_step(plain, opt_state, step(model, optimizer))
        assert_trees_same(nnx.to_pure_dict(nnx.state(model, nnx.Param)), plain)


@pytest.mark.slow
def test_flax_checkpoints_keep_every_bit_and_the_run_goes_on():
    _, state = train_linen(hs.adamw(optax.cosine_decay_schedule(1e-2, 100), seed=2**63 + 1), steps=2)
    data = serialization.to_bytes(state)
    fresh = TrainState.create(apply_fn=state.apply_fn, params=state.params, tx=state.tx)
    restored = serialization.from_bytes(fresh, data)
    assert_trees_same(restored.opt_state, state.opt_state)
    assert_trees_same(restored.params, state.params)
    grads = jax.tree.map(jnp.ones_like, state.params)
    assert_trees_same(restored.apply_gradients(grads=grads).params, state.apply_gradients(grads=grads).params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_orbax_checkpoints_keep_every_bit(tmp_path, dtype):
    import orbax.checkpoint as ocp

    params = {"a": {"b": X.astype(dtype)}, "c": jnp.ones((), dtype)}
    tx = hs.adamw(optax.constant_schedule(1e-3), seed=2**40 + 5)
    state = jax.jit(tx.update)(jax.tree.map(jnp.ones_like, params), tx.init(params), params)[1]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        like = jax.eval_shape(lambda: state)
        restored = checkpointer.restore(tmp_path / "state", like)
    assert_trees_same(restored, state)
