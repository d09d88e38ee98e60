"""What `diagnose` says of Optax's transforms and of ours, held against a step that is really taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs

STEPS = 8
OPTAX = optax.adamw(1e-5, weight_decay=0.1)


@functools.cache
def trained(tx, dtype=jnp.bfloat16):
    """Return params, the gradients of the next step and the state after some steps."""
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(0, 0.1, (48, 48)), dtype) for name in "ab"}
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        grads = {name: jnp.asarray(rng.normal(0, 1e-2, (48, 48)), dtype) for name in "ab"}
        before = params, grads, state
        params, state = step(*before[::2], grads)
    return before


@pytest.mark.parametrize(
    "tx",
    [
        OPTAX,
        pytest.param(optax.sgd(1e-2, momentum=0.9), marks=pytest.mark.slow),
        pytest.param(hs.adamw(1e-4, param_storage="nearest"), marks=pytest.mark.slow),
    ],
)
def test_the_predicted_share_is_that_of_the_step_that_follows(tx):
    params, grads, state = trained(tx)
    predicted = hs.diagnose(tx, params, grads, state).updates_lost
    updates, _ = jax.jit(tx.update)(grads, state, params)
    after = optax.apply_updates(params, updates)
    counted = np.mean([np.asarray(after[name] == params[name]).mean() for name in params])
    assert abs(predicted - counted) < 0.01
    assert predicted > 0.05


def test_the_stall_is_told_with_its_warning():
    diagnosis = hs.diagnose(OPTAX, *trained(OPTAX))
    assert diagnosis.updates_lost > 0.9
    assert diagnosis.decay_lost == 1
    assert diagnosis.leaves["a"] > 0.9
    assert diagnosis.moments["nu"].frozen == 1
    assert diagnosis.moments["mu"].frozen == 0
    assert diagnosis.moments["mu"].dtypes == {"bfloat16": 2 * 48**2}
    text = " ".join(str(diagnosis).split())
    for phrase in ("updates lost", "of nu cannot shrink", "too high once they move", " a 9"):
        assert phrase in text


BROKEN = {
    "scale": lambda: optax.chain(hs.adamw(1e-4), optax.scale(0.5)),
    "scale_by_adam": lambda: optax.chain(hs.round_stochastically(), optax.adamw(1e-4)),
    "ema": lambda: optax.chain(hs.adamw(1e-4), optax.ema(0.9)),
    "lookahead": lambda: optax.lookahead(hs.adam(1e-5), 5, 0.5),
}


@pytest.mark.parametrize(
    "name",
    ["scale", "lookahead", *(pytest.param(n, marks=pytest.mark.slow) for n in ("scale_by_adam", "ema"))],
)
def test_a_chain_that_undoes_its_rounding_is_told_first_with_the_movement_that_is_lost(name):
    """Where weights of about 1 really move at most a tenth of what they should.

    Of `optax.lookahead` plain weights become its copies.
    """
    tx = BROKEN[name]()
    params = {"w": jnp.linspace(0.5, 2, 4096, dtype=jnp.bfloat16).reshape(64, 64)}
    grads = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    copies = optax.LookaheadParams.init_synced(params) if name == "lookahead" else params
    found = hs.diagnose(tx, params, grads)
    with pytest.raises(ValueError, match=f"check_chain: {name}") as caught:
        hs.check_chain(tx, copies)
    assert found.advice[0] == str(caught.value).removeprefix("check_chain: ")
    assert found.updates_lost > 0.9
    assert "Nothing is lost" not in str(found)
    leaf = "fast/w" if name == "lookahead" else "w"
    row = hs.describe(tx, copies).of(leaf)
    assert row.rounding == "nearest"
    assert row.why == f"{name} changes what round_stochastically applies: it is rounded again"


def test_what_an_update_wants_beside_params_is_passed_on():
    tx = optax.chain(hs.adamw(1e-4), optax.contrib.reduce_on_plateau(factor=0.5))
    params = {"w": jnp.ones((8, 8), jnp.bfloat16)}
    found = hs.diagnose(tx, params, params, value=1.0)
    assert found.advice[0].startswith(
        "reduce_on_plateau changes the updates that round_stochastically applies"
    )
    assert hs.describe(tx, params, value=1.0).of("w").rounding == "nearest"
    inside = optax.chain(hs.adamw(1e-4, param_storage="nearest"), optax.contrib.reduce_on_plateau(factor=0.5))
    assert hs.diagnose(hs.store_params(inside), params, params, value=1.0).advice == ()


def test_decay_that_is_lost_is_told_where_updates_are_not():
    """A decay of 1e-6 of a weight, beside updates that move every weight."""
    params = {"w": jnp.ones((8, 8), jnp.bfloat16)}
    diagnosis = hs.diagnose(optax.adamw(1e-1, weight_decay=1e-5), params, params)
    assert (diagnosis.updates_lost, diagnosis.decay_lost) == (0, 1)
    assert any("0% of the updates and 100% of the decay" in line for line in diagnosis.advice)


def test_what_one_part_of_a_partition_loses_shows_beside_a_part_that_loses_nothing():
    parts = {"plain": optax.adamw(1e-5), "ours": hs.adamw(1e-5)}
    params = {name: jnp.ones((48, 48), jnp.bfloat16) for name in "ab"}
    tx = optax.partition(parts, {"a": "plain", "b": "ours"})
    diagnosis = hs.diagnose(tx, params, params)
    alone = hs.diagnose(parts["plain"], {"a": params["a"]}, {"a": params["a"]})
    assert alone.leaves == {"a": 1}
    assert diagnosis.leaves == {"a": 1, "b": 0}
    assert diagnosis.updates_lost == 0.5
    assert "Rounding drops 50% of the updates" in diagnosis.advice[0]


@pytest.mark.slow
def test_weights_that_a_transform_renames_are_no_false_alarm():
    params = {"a": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.ones(8, jnp.bfloat16)}
    assert hs.diagnose(optax.flatten(hs.adamw(1e-5)), params, params).updates_lost == 0


def test_float32_moments_do_not_hide_those_of_16_bits_that_freeze():
    params = {"a": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.ones(192, jnp.float32)}
    assert hs.diagnose(optax.adamw(1e-5), params, params).moments["nu"].frozen == 0.25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "dtype"),
    [
        (optax.adamw(1e-5), jnp.float32),
        (hs.adamw(1e-5), jnp.bfloat16),
        (hs.adamw(1e-5, param_storage="split16"), jnp.bfloat16),
        (hs.accumulate_gradients(hs.adamw(1e-5, **hs.recipes.one_pass), 2), jnp.bfloat16),
    ],
)
def test_there_is_no_false_alarm(tx, dtype):
    diagnosis = hs.diagnose(tx, *trained(tx, dtype))
    assert diagnosis.advice == ()
    assert diagnosis.updates_lost == 0
    assert "Nothing is lost." in str(diagnosis)


@pytest.mark.slow
def test_zero_second_moments_and_a_norm_that_sticks_are_told():
    params = {str(i): jnp.ones(4, jnp.float16) for i in range(300)}
    tx = optax.adamw(1e-3, eps=1e-4)
    grads = jax.tree.map(lambda p: p * 1e-3, params)
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    diagnosis = hs.diagnose(tx, params, grads, state)
    assert diagnosis.moments["nu"].zero > 0.5
    assert any("is zero where mu is not" in line for line in diagnosis.advice)
    ones = {name: jnp.ones(4, jnp.bfloat16) for name in params}
    diagnosis = hs.diagnose(optax.sgd(1.0), ones, ones)
    assert diagnosis.norm == pytest.approx(1200**0.5)
    assert "optax.global_norm takes it for" in diagnosis.advice[-1]


def test_an_average_that_does_not_start_at_zero_is_no_decay():
    params = {"w": jnp.ones((8, 8), jnp.bfloat16)}
    assert hs.diagnose(optax.yogi(1e-2), params, params).decay_lost is None


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_sums_of_micro_batches_in_16_bits_are_told(dtype):
    params = {"a": jnp.ones((8, 8), dtype)}
    grads = jax.tree.map(lambda p: p * 0.01, params)
    link = optax.scale(-0.5)
    theirs, ours = optax.chain(optax.apply_every(4), link), hs.accumulate_gradients(link, 4)
    diagnosis = hs.diagnose(theirs, params, grads)
    told = any("they lose small addends" in line for line in diagnosis.advice)
    assert (diagnosis.sums_rounded, told) == ((1, True) if dtype == jnp.bfloat16 else (0, False))
    assert f"rounded to nearest {diagnosis.sums_rounded:.1%}" in str(diagnosis)
    assert hs.diagnose(ours, params, grads).sums_rounded == 0


@pytest.mark.slow
def test_a_format_that_does_nothing_is_told():
    params = {"a": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones((48, 48), jnp.bfloat16)}
    tx = hs.scale_by_adam(nu_dtype=hs.scaled("ufloat8_e5m3"))
    diagnosis = hs.diagnose(tx, params, params)
    assert diagnosis.moments["nu"].not_as_asked == 48**2 / (48**2 + 64**2)
    assert diagnosis.moments["mu"].not_as_asked == 0
    assert "36% of nu is not kept as was asked for: asked for ufloat8_e5m3" in diagnosis.advice[-1]


def test_a_state_of_another_dtype_than_a_fresh_one_is_told():
    params = {"a": jnp.ones((8, 8), jnp.bfloat16)}
    tx = optax.sgd(0.1, momentum=0.9)
    cast = optax.tree.cast(tx.init(params), jnp.float32)
    moment = hs.diagnose(tx, params, params, cast).moments["trace"]
    assert moment.not_as_asked == 1
    assert moment.why == "it is float32, and bfloat16 where fresh"


def test_integer_weights_are_refused():
    with pytest.raises(TypeError, match="the weight 'n' is int32"):
        hs.diagnose(optax.sgd(1.0), {"n": jnp.ones(2, jnp.int32)}, {"n": jnp.ones(2)})


NOT_AT_EVERY_STEP = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 3),
    "accumulate_gradients": lambda tx: hs.accumulate_gradients(tx, 3),
    "sam": lambda tx: optax.contrib.sam(tx, optax.sgd(0.05), sync_period=3),
}


@pytest.mark.parametrize("name", NOT_AT_EVERY_STEP)
def test_moments_that_shrink_at_some_steps_alone_are_not_taken_for_frozen(name):
    params = {"w": jnp.ones((8, 8), jnp.bfloat16)}
    ours, theirs = (
        hs.diagnose(NOT_AT_EVERY_STEP[name](tx), params, params).moments
        for tx in (hs.adamw(1e-3, param_storage="nearest"), optax.scale_by_adam(mu_dtype="bfloat16"))
    )
    assert ours["mu"].frozen == ours["nu"].frozen == 0
    assert theirs["nu"].frozen == 1
