"""Bad input gets an error that names the value, the rule and the way out.

One table: each row is a bad call, the type of its error and the whole message.
"""

# ruff: noqa: E501 - a row is easier to read on one line

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
from on_jax.steps import G, W, update

BF16 = jnp.bfloat16


def injected(**options):
    """Build a link as `inject_hyperparams` would: hyperparameters in the dtype of bfloat16 params."""
    return optax.inject_hyperparams(hs.adamw)(1e-3, **options).init(W)


def update_if_finite(tx):
    tx = optax.apply_if_finite(tx, max_consecutive_errors=3)
    return tx.update(W, tx.init(W), W)


_SEED = "Use an integer in that range, or two uint32 words (high, low)."
_A_SEED = "Use an integer in [0, 2^64), or two uint32 words (high, low)."
_FREEZE = "freeze the leaf by optax.partition with optax.set_to_zero()."
_SPLIT = f"Wrap the optimizer in optax.contrib.split_real_and_imaginary, or {_FREEZE}"
_DTYPES = "are float32, bfloat16, float16 or float64."
_FLOATS = f"updates {_DTYPES} Cast it, or {_FREEZE}"
_INJECT = (
    "hyperparameters are float32 (0.999 in bfloat16 is 1.0). "
    "Use inject_hyperparams(..., hyperparam_dtype=jnp.float32)."
)


_ANOTHER = (
    "it belongs to another transform, or was loaded without its types. "
    "Pass the state that init made, or load it into that."
)


_LEFT_OUT = (
    "a wrapper that leaves steps out, as optax.apply_if_finite, wants updates in the dtype of the gradients, "
    "bfloat16, and the updates of these weights are float32. Cast the gradients to float32 before it; for "
    "apply_if_finite there is halfstep_jax.skip_nonfinite."
)


_ASCEND = "Use a number >= 0, or flip_sign=False to ascend."


P, WIDE = {"w": jnp.ones((2, 3))}, {"w": jnp.ones((2, 8))}
NU = 'Choose second moments, as by select=lambda name, array: "nu" in name.split("/").'


def keeping(state_of):
    """Return a transform that does nothing but keep a state."""
    return optax.GradientTransformation(state_of, lambda updates, state, params=None: (updates, state))


def complex_state():
    return keeping(lambda params: {"z": jnp.zeros(3, jnp.complex64)})


SCALED = hs.store_state(optax.chain(optax.trace(0.9)), hs.scaled("int8", 4, 0, 0), rounding="stochastic")


def copy_of_params():
    return keeping(lambda params: params)


ROWS = [
    # Hyperparameters.
    (lambda: hs.scale_by_adam(b2=jnp.asarray(0.999, BF16)), TypeError, f"scale_by_adam: b2 is a bfloat16 array; {_INJECT}"),
    (lambda: hs.scale_by_adam(eps=jnp.int32(0)), TypeError,
     "scale_by_adam: eps is an integer array (int32); hyperparameters are float32. Use a float, such as 1.0 for 1."),
    (lambda: optax.inject_hyperparams(hs.muon)(1e-3).init(W), TypeError,
     "muon: ns_steps and eps are arrays, as optax.inject_hyperparams makes numbers. "
     "Pass it static_args=('ns_steps', 'eps')."),
    (lambda: optax.inject_hyperparams(hs.adafactor)(1e-3).init(W), TypeError,
     "adafactor: min_dim_size_to_factor and decay_offset are arrays, as optax.inject_hyperparams makes numbers. "
     "Pass it static_args=('min_dim_size_to_factor', 'decay_offset')."),
    (lambda: optax.inject_hyperparams(hs.scale_by_muon, static_args="ns_steps")().init(W), TypeError,
     "scale_by_muon: eps is an array, as optax.inject_hyperparams makes numbers. Pass it static_args=('eps',)."),
    (lambda: injected(), TypeError, f"scale_by_adam: b1 is a bfloat16 array; {_INJECT}"),
    (lambda: hs.adamw(-0.1), ValueError, f"scale_by_learning_rate: learning_rate=-0.1 is negative. {_ASCEND}"),
    (lambda: update(hs.scale_by_learning_rate(lambda count: jnp.bfloat16(0.1)), G), TypeError,
     f"scale_by_learning_rate: learning_rate is a bfloat16 array; {_INJECT}"),
    (lambda: update(hs.scale_by_learning_rate(lambda count: "0.1"), G), TypeError,
     "scale_by_learning_rate: learning_rate='0.1' is not a number. Use a float."),
    # States.
    (lambda: hs.adamw(1e-3).update(W, optax.adamw(1e-3).init(W), W), ValueError,
     "adamw: the state has 3 parts, expected 4: it belongs to another transform. Pass the state that init made; "
     "from_optax(state, tx, params) makes one of the state of an Optax optimizer."),
    *(
        (
            lambda storage=storage: hs.adamw(1e-3, param_storage=storage).update(W, optax.adamw(1e-3).init(W), W),
            ValueError,
            f"{caller}: the state is of an Optax optimizer, expected {due}. Pass the state that init made; "
            "from_optax(state, tx, params) makes one of the state of an Optax optimizer.",
        )
        for storage, caller, due in (
            ("nearest", "scale_by_adam", "ScaleByAdamState"),
            ("split8", "split_params", "SplitParamsState"),
            ("master", "keep_master_params", "KeepMasterParamsState"),
        )
    ),
    (lambda: hs.adamw(1e-3).update(W, None, W), ValueError,
     "adamw: the state is NoneType, expected 4: it belongs to another transform. Pass the state that init made; "
     "from_optax(state, tx, params) makes one of the state of an Optax optimizer."),
    (lambda: hs.adamw(1e-3).update(W, {"0": {}}, W), ValueError,
     "adamw: the state is a dict, expected a tuple of 4 parts: it was loaded without its types. Load it into the "
     "target jax.eval_shape(tx.init, params)."),
    (lambda: update_if_finite(hs.adamw(1e-3)), TypeError, f"round_stochastically: {_LEFT_OUT}"),
    (lambda: update_if_finite(hs.adamw(1e-3, param_storage="feedback")), TypeError,
     f"adamw_fed_back: {_LEFT_OUT}"),
    # Seeds and words.
    (lambda: hs.adam(1e-3, seed=jnp.int32(-2)), ValueError, f"scale_by_adam: seed=-2 is outside [0, 2^64). {_SEED}"),
    (lambda: hs.adam(1e-3, seed=jnp.zeros(3, jnp.uint32)), TypeError,
     f"scale_by_adam: seed is uint32 of shape (3,). {_A_SEED}"),
    (lambda: hs.adam(1e-3, seed=jnp.zeros(2, jnp.int32)), TypeError,
     f"scale_by_adam: seed is int32 of shape (2,). {_A_SEED}"),
    (lambda: hs.apply_updates(W, G), TypeError, "apply_updates: seed is missing: stochastic rounding takes words of both. Pass seed and step, or use optax.apply_updates after a transform of this package, whose last link has rounded."),
    # Rounding.
    (lambda: hs.round_to(jnp.ones(3, jnp.int32), "bfloat16"), TypeError,
     "round_to: x is int32; it is rounded from float32. Cast it to float32."),
    (lambda: hs.round_to(jnp.ones(3), "bfloat16", jnp.ones(3, jnp.int32)), TypeError,
     "round_to: words are int32. Use one uint32 word per element."),
    (lambda: hs.round_to(jnp.ones(3), "bfloat16", jnp.ones(4, jnp.uint32)), ValueError,
     "round_to: words have shape (4,), x (3,). Use one uint32 word per element."),
    # Trees.
    (lambda: update(hs.scale_by_adam(), {"w": jnp.ones(3, jnp.int32)}), TypeError, f"scale_by_adam: the update of 'w' is int32; {_FLOATS}"),
    (lambda: update(hs.scale_by_learning_rate(1.0), {"w": jnp.ones(3, jnp.complex64)}), TypeError,
     f"scale_by_learning_rate: the update of 'w' is complex64; updates {_DTYPES} {_SPLIT}"),
    (lambda: update(hs.round_stochastically(), {"w": np.zeros(3, jax.dtypes.float0)}), TypeError,
     f"round_stochastically: the update of 'w' is float0; {_FLOATS}"),
    (lambda: update(hs.add_decayed_weights(0.1), {"w": jnp.ones(3, jnp.float8_e5m2)}), TypeError,
     f"add_decayed_weights: the update of 'w' is float8_e5m2; {_FLOATS}"),
    (lambda: update(hs.scale_by_adam(), {"w": 1.0}), TypeError, f"scale_by_adam: the update of 'w' is float; {_FLOATS}"),
    (lambda: hs.adamw(1e-3).init({"a": {"b": jnp.ones(3, jnp.int8)}}), TypeError, f"scale_by_adam: the weight 'a/b' is int8; weights {_DTYPES} Cast it, or {_FREEZE}"),
    (lambda: hs.ema_params(0.9).init({"w": np.ones(3)}), TypeError, "ema_params: the weight 'w' is float64; weights are float32, bfloat16 or float16. Cast it, or freeze the leaf by optax.partition with optax.set_to_zero()."),
    (lambda: hs.round_stochastically().init([jnp.ones(3, jnp.complex64)]), TypeError, f"round_stochastically: the weight '0' is complex64; weights {_DTYPES} {_SPLIT}"),
    (lambda: update(hs.add_decayed_weights(0.1), G, {"w": jnp.ones(3, jnp.int32)}), TypeError,
     f"add_decayed_weights: the weight 'w' is int32; weights {_DTYPES} Cast it, or {_FREEZE}"),
    (
        lambda: hs.apply_updates({"w": np.ones(3)}, G, 0, 1),
        TypeError,
        "apply_updates: the weight 'w' is float64; weights are float32, bfloat16 or float16. Cast it, or freeze the leaf by optax.partition with optax.set_to_zero().",
    ),
    (lambda: update(hs.scale_by_adam(), G, seen={"w": jnp.ones(4, jnp.bfloat16)}), ValueError,
     "scale_by_adam: the update of 'w' has shape (3,), its mu (4,). Pass the tree that init saw."),
    (lambda: update(hs.scale_by_adam(), G, seen={"w": None}), ValueError,
     "scale_by_adam: the update of 'w' has shape (3,), its mu None. Pass the tree that init saw."),
    (lambda: update(hs.add_decayed_weights(0.1), G, {"w": jnp.ones((3, 1))}), ValueError,
     "add_decayed_weights: the update of 'w' has shape (3,), its weight (3, 1). "
     "Pass the params that the updates are for."),
    (lambda: hs.apply_updates({"w": jnp.ones(())}, G, 0, 1), ValueError,
     "apply_updates: the update of 'w' has shape (3,), its weight (). Pass the params that the updates are for."),
    (lambda: hs.adamw(1e-3, seed=jax.random.key(0, impl="rbg")), TypeError,
     "scale_by_adam: seed is a key of 4 words. Use an integer in [0, 2^64), such as the number that the key "
     "was made of, or a key of threefry2x32."),
    (lambda: hs.adamw(optax.constant_schedule(-1e-3), param_storage="feedback"), ValueError,
     "adamw: the largest rate of the schedule learning_rate is -0.001, and "
     "feedback of rounding errors divides by rates above 0. Negate the gradients, or use another "
     "param_storage."),
    (lambda: update(hs.round_stochastically(), G, None), ValueError,
     "round_stochastically: params is None; the link rounds params + update. "
     "Pass params to update(updates, state, params). "
     'Where a library passes none, build the optimizer of float32 weights with param_storage="nearest".'),
    (lambda: update(hs.add_decayed_weights(0.1), G, None), ValueError,
     "add_decayed_weights: params is None; the link adds weight_decay * params. "
     "Pass params to update(updates, state, params)."),
    (lambda: hs.adam(1e-3).init({"a/b": W["w"], "a": {"b": W["w"]}}), ValueError,
     "scale_by_adam: two leaves have the name 'a/b', and so would share random words. Rename one of them."),
    (
        lambda: hs.keep_master_params(optax.identity()).update(G, hs.split_params(optax.identity()).init(W), W),
        ValueError,
        f"keep_master_params: the state is SplitParamsState, expected KeepMasterParamsState: {_ANOTHER}",
    ),
    (lambda: hs.scale_by_adam().update(G, hs.scale_by_lion().init(W)), ValueError,
     f"scale_by_adam: the state is ScaleByLionState, expected ScaleByAdamState: {_ANOTHER}"),
    (lambda: hs.scale_by_learning_rate(lambda count: 0.1).update(G, optax.EmptyState()), ValueError,
     f"scale_by_learning_rate: the state is EmptyState, expected ScheduleState: {_ANOTHER}"),
    (
        lambda: hs.scale_by_adam(mu_dtype="bfloat16").update(G, hs.scale_by_adam(mu_dtype="float32").init(W)),
        TypeError,
        "scale_by_adam: the mu of 'w' is float32, mu_dtype is bfloat16. Pass the state that init made.",
    ),
    (
        lambda: hs.scale_by_adam().update(G, hs.scale_by_adam().init(W)._replace(nu={"w": jnp.ones(3, jnp.int8)})),
        TypeError,
        "scale_by_adam: the nu of 'w' is int8, as another recipe keeps it: nu_dtype=None keeps bfloat16 or "
        "float32. Pass the state that init made, or the arguments that it had.",
    ),
    # LAMB.
    (lambda: hs.lamb16(-0.01, trust_power=0.5), ValueError,
     "lamb16: learning_rate=-0.01 is negative. Use a number >= 0."),
    (lambda: hs.scale_by_trust_ratio().update({"w": jnp.ones(2)}, optax.EmptyState()), ValueError,
     "scale_by_trust_ratio: params is None; the link compares the norms of params and updates. "
     "Pass params to update(updates, state, params)."),
    # store_state.
    (lambda: SCALED.update(WIDE, SCALED.init(WIDE)._replace(scale={}), WIDE), ValueError,
     "store_state: the state has no scale of '0/trace/w'. Pass the state that init made."),
    (
        lambda: hs.store_state(optax.adam(1.0), "bfloat16", select=lambda name, array: False).init(P),
        ValueError,
        "store_state: select chooses none of '0/mu/w', '0/nu/w'. "
        "Choose one of them, or leave select out.",
    ),
    (lambda: hs.store_state(complex_state(), "bfloat16").init(P), TypeError,
     "store_state: the state array 'z' is complex64; formats hold real numbers. "
     "Wrap a transform of real numbers."),
    (lambda: hs.store_state(optax.adam(1.0), "ufloat16_e7m9").init(P), ValueError,
     f"store_state: format=ufloat16_e7m9 has no sign, and '0/mu/w' has one. {NU}"),
    (lambda: hs.store_state(copy_of_params(), "ufloat16_e7m9").init({"w": -P["w"]}), ValueError,
     f"store_state: format=ufloat16_e7m9 has no sign, and 'w' has one. {NU}"),
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
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), ROWS, ids=[row[2][:60] for row in ROWS])
def test_a_bad_call_says_what_is_wrong_and_what_to_do(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
