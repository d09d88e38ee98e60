"""Full precision of weights goes in and comes out, also by checkpoints; what cannot be stored is refused."""

import functools
import pathlib

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

import halfstep_jax as hs
from on_jax.steps import KEEPING, RULES, assert_trees_same, gradients, run, take_step, weights


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", RULES)
def test_float32_values_go_in_and_come_out(rule, dtype):
    """Exactly under split16 of bfloat16 and under master; else to the bits that are kept."""
    p = {"w": weights((40, 7), dtype), "norm": weights((7,), "float32")}
    tx = hs.adamw(1e-3, param_storage=rule)
    values = {"w": weights((40, 7), "float32", seed=5), "norm": weights((7,), "float32", seed=6)}
    params, state = hs.set_float32_params(p, tx.init(p), values)
    assert {name: x.dtype for name, x in params.items()} == {name: x.dtype for name, x in p.items()}
    back = hs.float32_params(params, state)
    assert_trees_same(back["norm"], values["norm"])
    mantissa = {"bfloat16": 7, "float16": 10}[dtype]
    more = {"compensated": 8, "split8": 8, "split16": 16, "master": 16}.get(rule, 0)
    # Half a gap of the precision that is kept, relative to the weight; float16 below 2^-14 has less.
    error = np.abs(np.asarray(back["w"] - values["w"], np.float64))
    bound = np.abs(np.asarray(values["w"], np.float64)) * 2.0 ** -(mantissa + more + 1)
    assert (error <= np.maximum(bound, 2.0 ** -(25 + more) if dtype == "float16" else 0)).all()
    if rule == "master" or (rule, dtype) == ("split16", "bfloat16"):
        assert_trees_same(back["w"], values["w"])
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(p))
    take_step(tx, params, state, jax.tree.map(jnp.ones_like, values))


def nestings():
    inner = hs.adam(1e-2, param_storage="nearest")
    yield "chain", optax.chain(optax.clip_by_global_norm(1.0), hs.split_params(inner))
    yield "masked", optax.masked(hs.keep_master_params(inner), {"a": True, "b": True})
    yield "multi", optax.MultiSteps(hs.split_params(inner, 8), 2).gradient_transformation()
    yield (
        "injected",
        optax.inject_hyperparams(hs.adamw, hyperparam_dtype=jnp.float32, static_args="param_storage")(
            0.01, param_storage="compensated"
        ),
    )
    yield (
        "partition",
        optax.partition(
            {"x": hs.split_params(inner), "y": hs.keep_master_params(inner)}, {"a": "x", "b": "y"}
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tx"), [pytest.param(*row, id=row[0]) for row in nestings()])
def test_what_is_kept_is_found_anywhere_in_a_state(name, tx):
    p = {"a": weights((9,)), "b": weights((5,), seed=2)}
    params, state = run(tx, p, {"a": gradients(4, (9,)), "b": gradients(4, (5,), seed=4)}, compiled=False)
    known = hs.float32_params(params, state)
    for leaf in p:
        assert (known[leaf] != params[leaf]).any(), leaf
        gap = np.abs(np.asarray(params[leaf], np.float64)) * 2.0**-8
        assert (np.abs(np.asarray(known[leaf] - params[leaf], np.float64)) <= gap).all()
    again = hs.set_float32_params(params, state, known)
    assert_trees_same(again, (params, state))


def test_values_in_another_tree_are_refused():
    with pytest.raises(
        ValueError, match=r"params and values are different trees: 'w' is in params alone\. Pass"
    ):
        hs.set_float32_params({"w": weights(3)}, hs.compensate().init({"w": weights(3)}), {"v": weights(3)})


@pytest.mark.parametrize(("storage", "field"), [("split16", "extra"), ("compensated", "compensation")])
def test_moments_and_counts_stay_where_values_are_set(storage, field):
    params = {"w": weights(5)}
    tx = hs.adamw(1e-2, param_storage=storage)
    params, state = jax.jit(functools.partial(take_step, tx))(params, tx.init(params), params)
    values = {"w": hs.float32_params(params, state)["w"] * 3}
    _, after = hs.set_float32_params(params, state, values)
    before, after = (jax.tree_util.tree_leaves_with_path(tree) for tree in (state, after))
    changed = [path for (path, x), (_, y) in zip(before, after, strict=True) if (x != y).any()]
    assert [jax.tree_util.keystr(path, simple=True, separator="/").split("/")[-2:] for path in changed] == [
        [field, "w"]
    ]


def test_without_a_state_that_keeps_anything_it_is_a_cast():
    p = {"w": weights((9,))}
    expected = {"w": p["w"].astype(jnp.float32)}
    for state in (None, optax.sgd(0.1).init(p), hs.adamw(1e-3).init(p)):
        assert_trees_same(hs.float32_params(p, state), expected)


@pytest.mark.parametrize("rule", KEEPING)
def test_float32_weights_pass_through_and_keep_nothing(rule):
    p, g = {"w": weights((40,), "float32")}, {"w": gradients(5, (40,))}
    params, state = run(hs.adamw(1e-3, param_storage=rule, weight_decay=0.1), p, g)
    expected, plain = run(hs.adamw(1e-3, param_storage="nearest", weight_decay=0.1), p, g)
    assert_trees_same(params, expected)
    extra = sum(x.nbytes for x in jax.tree.leaves(state)) - sum(x.nbytes for x in jax.tree.leaves(plain))
    assert extra <= 16  # a count, a seed and a tag
    assert len(jax.tree.leaves(state)) - len(jax.tree.leaves(plain)) <= 3


def mixed_run(rule):
    """Return a transform, and params and state after three steps: 16-bit, float32 and too small leaves."""
    p = {"w": weights((64, 100)), "norm": weights((100,), "float32"), "b": weights((5,))}
    formats = {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")}
    tx = hs.adamw(1e-3, weight_decay=0.1, param_storage=rule, **formats)
    g = {name: gradients(3, x.shape, seed=i) for i, (name, x) in enumerate(p.items())}
    return tx, *run(tx, p, g)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_flax_checkpoint_holds_every_bit(rule):
    _, params, state = mixed_run(rule)
    data = flax.serialization.to_bytes((params, state))
    assert_trees_same(flax.serialization.from_bytes((params, state), data), (params, state))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # orbax: sharding is read from a file
@pytest.mark.parametrize(
    "rule", ["split8", *(pytest.param(r, marks=pytest.mark.slow) for r in ("stochastic", "compensated"))]
)
def test_an_orbax_checkpoint_holds_every_bit_and_the_run_goes_on(rule, tmp_path: pathlib.Path):
    tx, params, state = mixed_run(rule)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
        checkpointer.wait_until_finished()
        loaded = checkpointer.restore(tmp_path / "state", (params, state))
    assert_trees_same(loaded, (params, state))
    g = jax.tree.map(lambda p: jnp.ones(p.shape), params)
    assert_trees_same(take_step(tx, *loaded, g), take_step(tx, params, state, g))


W = {"w": jnp.ones(3, jnp.float16)}


REFUSED = [
    (lambda: hs.split_params(optax.identity(), 4), ValueError,
     "split_params: extra_bits=4 is not 8 or 16. Use 16 for all of float32, 8 for 24 bits in all."),
    (lambda: hs.split_params(optax.identity(), seed=-1), ValueError,
     "split_params: seed=-1 is outside [0, 2^64). "
     "Use an integer in that range, or two uint32 words (high, low)."),
    (lambda: hs.set_float32_params(W, None, {"w": jnp.array([1.0, 7e4, 0.0])}), ValueError,
     "set_float32_params: 'w' has 70000.0, past the largest float16, 65504. "
     "Use bfloat16 params, or clip."),
    (lambda: hs.set_float32_params(W, None, {"w": jnp.array([1.0, -jnp.inf, 0.0])}), ValueError,
     "set_float32_params: 'w' has -inf, past the largest float16, 65504. "
     "Use bfloat16 params, or clip."),
    (lambda: hs.set_float32_params(W, None, {"w": jnp.ones(4)}), ValueError,
     "set_float32_params: 'w' has shape (3,), its value (4,). Pass values in the shapes of params."),
    (lambda: hs.set_float32_params(W, None, {"w": jnp.ones(3, jnp.int32)}), TypeError,
     "set_float32_params: the value of 'w' is int32; values are float32, bfloat16 or float16. "
     "Cast it."),
    (lambda: hs.float32_params({"v": W["w"]}, hs.compensate().init(W)), ValueError,
     "float32_params: the state keeps (3,) of 'w', which is not among the params. "
     "Pass the state of these params."),
    (lambda: hs.float32_params(W, (hs.compensate().init(W), hs.compensate().init(W))), ValueError,
     "float32_params: two states keep something of 'w'. Pass one of the two."),
    (
        lambda: hs.split_params(optax.identity(), 8).update(
            W, hs.split_params(optax.identity(), 8).init({"w": W["w"][:2]}), W
        ),
        ValueError,
        "split_params: the state keeps uint8[2] beside 'w', not uint8[3]. "
        "Pass the state that init made.",
    ),
    (lambda: hs.compensate().update(W, hs.compensate().init({"w": jnp.ones(3)}), W), ValueError,
     "compensate: the state keeps nothing beside 'w', not bfloat16[3]. Pass the state that init made."),
    (lambda: hs.compensate().update(W, hs.compensate().init(W)), ValueError,
     "compensate: params is None; the link rounds params + update. "
     "Pass params to update(updates, state, params). "
     'Where a library passes none, build the optimizer of float32 weights with param_storage="nearest".'),
    (
        lambda: hs.split_params(optax.identity()).update(W, hs.split_params(optax.identity()).init(W)),
        ValueError,
        "split_params: params is None; the wrapper keeps further bits of params. "
        "Pass params to update(updates, state, params). "
        'Where a library passes none, build the optimizer of float32 weights with param_storage="nearest".',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_a_bad_call_says_what_is_wrong_and_what_to_do(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
