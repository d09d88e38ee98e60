"""Weights that the state holds in codes: decoded where a layer computes, and what a compiled step keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep_jax as hs
from on_jax.steps import assert_same_in_every_mode, gradients, run, sharded, weights

LAYERS, WIDTH = 16, 128
FLOAT32 = LAYERS * WIDTH * WIDTH * 4
"""Bytes of the weights in float32."""


def state_of_layers():
    """Return the state of a stack of layers, whose weights nothing else has."""
    tx = hs.adamw(1e-3, param_storage="int8", mu_dtype="bfloat16", nu_dtype="bfloat16")
    return tx, jax.jit(tx.init)({"layers": weights((LAYERS, WIDTH, WIDTH), "float32")})


def zeros_like(stored):
    """Return a zero for every weight: the derivative with respect to it is the gradient of the weight."""
    is_stored = lambda x: isinstance(x, hs.StoredParam)  # noqa: E731
    return jax.tree.map(lambda x: jnp.zeros(x.codes.shape), stored, is_leaf=is_stored)


def layer(h, w):
    return jnp.tanh(h @ w)


def loss_by_layer(stored, zeros, x):
    """Decode each layer where it is computed, again in the backward pass."""

    @jax.checkpoint
    def decoded_layer(h, weight):
        stored, zeros = weight
        return layer(h, stored.decode() + zeros), None

    h, _ = jax.lax.scan(decoded_layer, x, (stored["layers"], zeros["layers"]))
    return jnp.mean(h**2)


def loss_of_decoded(params, x):
    h, _ = jax.lax.scan(lambda h, w: (layer(h, w), None), x, params["layers"])
    return jnp.mean(h**2)


def gradients_by_layer(state, x):
    stored = hs.stored_params(state)
    return jax.grad(lambda zeros: loss_by_layer(stored, zeros, x))(zeros_like(stored))


def gradients_of_decoded(state, x):
    return jax.grad(loss_of_decoded)(hs.decode_params(hs.stored_params(state)), x)


def temporaries(function, *arguments) -> int:
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_a_state_is_a_byte_per_weight_and_its_moments():
    state = jax.eval_shape(lambda: state_of_layers()[1])
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert size - FLOAT32 // 4 * (1 + 2 + 2) == LAYERS * WIDTH + 4 + 8 + 4  # scales, count, seed, tag


@pytest.mark.slow
def test_a_forward_pass_that_decodes_by_layer_keeps_no_float32_weights():
    """One layer and some activations, where decoding first keeps all layers."""
    _, state = state_of_layers()
    x = jnp.ones((8, WIDTH))

    def forward(state, x):
        stored = hs.stored_params(state)
        return jax.lax.scan(lambda h, w: (layer(h, w.decode()), None), x, stored["layers"])[0]

    assert temporaries(forward, state, x) < 0.2 * FLOAT32
    assert temporaries(
        lambda state, x: loss_of_decoded(hs.decode_params(hs.stored_params(state)), x), state, x
    ) > (0.9 * FLOAT32)


@pytest.mark.slow
def test_gradients_by_layer_keep_no_float32_weights_and_are_those_of_decoded_weights():
    _, state = state_of_layers()
    x = jnp.ones((8, WIDTH))
    assert temporaries(gradients_by_layer, state, x) < 0.5 * FLOAT32
    assert temporaries(gradients_of_decoded, state, x) > 0.9 * FLOAT32
    by_layer, decoded = (jax.jit(f)(state, x)["layers"] for f in (gradients_by_layer, gradients_of_decoded))
    # The same products, in programs that may add them in another order.
    np.testing.assert_allclose(by_layer, decoded, rtol=1e-4, atol=1e-9)
    assert float(jnp.abs(by_layer).max()) > 0


@pytest.mark.slow
def test_a_run_that_keeps_the_state_alone_learns():
    tx, state = state_of_layers()
    x = jax.random.normal(jax.random.key(0), (8, WIDTH))

    @jax.jit
    def step(state):
        stored = hs.stored_params(state)
        loss, grads = jax.value_and_grad(lambda zeros: loss_by_layer(stored, zeros, x))(zeros_like(stored))
        return loss, tx.update(grads, state, hs.decode_params(stored))[1]

    losses = []
    for _ in range(5):
        loss, state = step(state)
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]


def test_decoding_is_exact_in_float32_and_to_nearest_in_16_bits():
    _, state = state_of_layers()
    stored = hs.stored_params(state)
    exact = hs.decode_params(stored)["layers"]
    np.testing.assert_array_equal(hs.decode_params(stored, "bfloat16")["layers"], exact.astype(jnp.bfloat16))
    one = jax.tree.map(lambda x: x[3], stored["layers"])
    np.testing.assert_array_equal(one.decode(), exact[3])
    gap = jnp.abs(exact).max(-1, keepdims=True) / 127
    assert float((jnp.abs(exact - weights(exact.shape, "float32")) / gap).max()) <= 0.5 * 1.26


@pytest.mark.slow
def test_steps_are_the_same_op_by_op_compiled_and_over_devices():
    assert_same_in_every_mode(hs.adamw(1e-3, param_storage="int8", seed=3, mu_dtype="bfloat16"), "float32")


@pytest.mark.slow
def test_new_codes_of_a_sharded_weight_are_those_of_the_whole():
    tx, p = hs.adamw(1e-3, param_storage="int8"), weights((64, 200), "float32")
    expected = tx.init({"w": p})
    for axes in (("x", None), (None, "y"), (("x", "y"), None)):
        found = tx.init({"w": sharded(p, *axes)})
        assert all(np.array_equal(*x) for x in zip(*map(jax.tree.leaves, (found, expected)), strict=True))
    p, state = run(tx, {"w": p}, {"w": gradients(2, (64, 200))})
    np.testing.assert_array_equal(hs.decode_params(hs.stored_params(state))["w"], p["w"])
