"""What `store_state` cannot do is refused, with the way out."""

import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import halfstep_jax as hs

P = {"w": jnp.ones((2, 3))}
NU = 'Choose second moments, as by select=lambda name, array: "nu" in name.split("/").'


def keeping(state_of):
    """Return a transform that does nothing but keep a state."""
    return optax.GradientTransformation(state_of, lambda updates, state, params=None: (updates, state))


def complex_state():
    return keeping(lambda params: {"z": jnp.zeros(3, jnp.complex64)})


SCALED = hs.store_state(optax.chain(optax.trace(0.9)), hs.scaled("int8", 4, 0, 0), rounding="stochastic")
W = {"w": jnp.ones((2, 8))}


def copy_of_params():
    return keeping(lambda params: params)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: SCALED.update(W, SCALED.init(W)._replace(scale={}), W),
            ValueError,
            "store_state: the state has no scale of '0/trace/w'. Pass the state that init made.",
        ),
        (
            lambda: hs.store_state(optax.adam(1.0), "bfloat16", select=lambda name, array: False).init(P),
            ValueError,
            "store_state: select chooses none of '0/mu/w', '0/nu/w'. "
            "Choose one of them, or leave select out.",
        ),
        (
            lambda: hs.store_state(complex_state(), "bfloat16").init(P),
            TypeError,
            "store_state: the state array 'z' is complex64; formats hold real numbers. "
            "Wrap a transform of real numbers.",
        ),
        (
            lambda: hs.store_state(optax.adam(1.0), "ufloat8_e6m2").init(P),
            ValueError,
            f"store_state: format=ufloat8_e6m2 has no sign, and '0/mu/w' has one. {NU}",
        ),
        (
            lambda: hs.store_state(copy_of_params(), "ufloat8_e6m2").init({"w": -P["w"]}),
            ValueError,
            f"store_state: format=ufloat8_e6m2 has no sign, and 'w' has one. {NU}",
        ),
        (
            lambda: hs.store_state(optax.adam(1.0), "bfloat16").update(
                P, hs.store_state(optax.adam(1.0), "bfloat16").init({"w": jnp.ones((2, 4))}), P
            ),
            ValueError,
            "store_state: the state array '0/mu/w' is bfloat16[2, 4]; "
            "format=bfloat16 makes it bfloat16[2, 3]. "
            "Pass the state that init made, and the params that it saw.",
        ),
        (
            lambda: hs.store_state(optax.adam(1.0), "bfloat16").update(
                P, hs.store_state(optax.sgd(1.0, 0.9), "bfloat16").init(P), P
            ),
            ValueError,
            "store_state: the state holds 1 arrays, a state of these params 3. Pass the tree that init saw.",
        ),
    ],
)
def test_a_bad_call_says_what_is_wrong_and_what_to_do(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
