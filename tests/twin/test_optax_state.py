"""A run of Optax moves into any recipe and out again: the bits are those of a run of torch that moves in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax as hs
import halfstep_torch

SHAPES = {"conv": (64, 80), "norm": (80,)}
STEPS = 20
KEYS = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}


def weights(dtype=jnp.bfloat16) -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=shape)).astype(dtype) for name, shape in SHAPES.items()}


def of_rule(theirs, fields):
    """Return a state of Optax after STEPS steps, and the same as torch's state dict."""
    rng = np.random.default_rng(2)
    moments = {}
    for field in fields:
        drawn = {name: rng.normal(size=shape) * 1e-2 for name, shape in SHAPES.items()}
        if field == "nu":
            drawn = {name: x**2 for name, x in drawn.items()}
        moments[field] = {name: jnp.asarray(x, jnp.float32) for name, x in drawn.items()}
    first = theirs.init(weights(jnp.float32))
    kinds = (optax.ScaleByAdamState, optax.ScaleByLionState, optax.TraceState)
    first = jax.tree.map(
        lambda x: x._replace(**moments) if isinstance(x, kinds) else x,
        first,
        is_leaf=lambda x: isinstance(x, kinds),
    )
    state = jax.tree.map(lambda x: jnp.int32(STEPS) if x.dtype == jnp.int32 else x, first)
    states = {}
    for i, name in enumerate(SHAPES):
        arrays = {KEYS[field]: torch.from_numpy(np.array(tree[name])) for field, tree in moments.items()}
        states[i] = arrays if "trace" in fields else {"step": torch.tensor(float(STEPS)), **arrays}
    return state, {"state": states, "param_groups": [{"params": list(range(len(SHAPES)))}]}


RUNS = {
    "adamw": (optax.adamw(1e-3), "AdamW", ("mu", "nu"), ["sixteen_bit", "one_pass", "eight_bit", "four_bit"]),
    "adam": (optax.adam(1e-3), "Adam", ("mu", "nu"), ["near_float32"]),
    "lamb": (optax.lamb(1e-3), "Lamb", ("mu", "nu"), ["full_precision"]),
    "lion": (optax.lion(1e-3), "Lion", ("mu",), ["sixteen_bit", "eight_bit"]),
    "sgd": (optax.sgd(1e-3, 0.9), "SGD", ("trace",), ["sixteen_bit", "eight_bit"]),
}


MOVES = [(rule, {"recipe": recipe}) for rule in RUNS for recipe in RUNS[rule][3]]
MOVES += [(rule, {"recipe": "eight_bit", "param_storage": "feedback"}) for rule in ("adamw", "sgd")]


@pytest.mark.parametrize(("rule", "options"), MOVES)
def test_a_moved_run_has_the_bits_of_one_that_moves_in_from_torch(rule, options):
    """Each moment is rounded once, by the words of the step that the state is of."""
    theirs, torch_name, fields, _ = RUNS[rule]
    state, state_dict = of_rule(theirs, fields)
    options = {**options, "seed": 3, **({"momentum": 0.9} if rule == "sgd" else {})}
    params = weights()
    state = hs.from_optax(state, getattr(hs, rule)(1e-3, **options), params)
    named = {
        name: torch.nn.Parameter(torch.from_numpy(np.array(p, np.float32)).bfloat16())
        for name, p in params.items()
    }
    optimizer = getattr(halfstep_torch, torch_name)(named.items(), lr=1e-3, compile=False, **options)
    halfstep_torch.load_float32_state_dict(optimizer, state_dict)
    link = link_of(state)
    for field in fields:
        for name, p in named.items():
            kept = optimizer.state[p]
            assert bits(getattr(link, field)[name]) == bits(kept[KEYS[field]]), (field, name)
            if f"{KEYS[field]}_scale" in kept:
                scales = getattr(link, f"{field}_scale")
                assert bits(scales[name]) == bits(kept[f"{KEYS[field]}_scale"]), (field, name)
    assert counts_of(state) == {0 if rule == "sgd" else STEPS}


def link_of(state):
    """Return the state of the link with moments."""

    def found(x):
        return hasattr(x, "mu_scale") or hasattr(x, "trace_scale")

    return next(x for x in jax.tree.leaves(state, is_leaf=found) if found(x))


def counts_of(state) -> set[int]:
    paths = jax.tree_util.tree_leaves_with_path(state)
    return {int(x) for path, x in paths if path[-1] == jax.tree_util.GetAttrKey("count")}


def bits(x) -> bytes:
    if isinstance(x, torch.Tensor):
        x = x.contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(x).tobytes()


def test_moments_of_16_bits_are_rounded_by_the_words_of_the_step():
    state, _ = of_rule(optax.adamw(1e-3), ("mu", "nu"))
    moved = link_of(hs.from_optax(state, hs.adamw(1e-3, seed=3), weights()))
    for name, shape in SHAPES.items():
        for field, role in (("mu", hs.Role.MU), ("nu", hs.Role.NU)):
            words = hs.random_words(3, STEPS, name, role, shape)
            due = hs.round_to(getattr(state[0], field)[name], "bfloat16", words)
            assert bits(getattr(moved, field)[name]) == bits(due)


FLOAT32 = {"mu_dtype": "float32", "nu_dtype": "float32"}


def both_ways(theirs, tx, state):
    return hs.to_optax(hs.from_optax(state, tx, weights()), tx, weights(), theirs)


def test_a_state_in_float32_comes_back_as_it_was():
    """With the count of the schedule, and without the numbers, which are those of the transform."""
    schedule = optax.cosine_decay_schedule(1e-3, 100)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, nesterov=True))
    state, _ = of_rule(theirs, ("mu", "nu"))
    back = both_ways(theirs, hs.adamw(schedule, **FLOAT32), state)
    assert jax.tree.all(jax.tree.map(lambda x, y: bits(x) == bits(y), back, state))
    assert jax.tree.structure(back) == jax.tree.structure(state)


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_weights_fed_back_move_in_and_out(rule):
    """With the rounding errors of weights, which are within the first moment."""
    theirs, _, fields, _ = RUNS[rule]
    formats = FLOAT32 if rule == "adamw" else {"momentum": 0.9, "accumulator_dtype": "float32"}
    tx = getattr(hs, rule)(1e-3, param_storage="feedback", **formats)
    state, _ = of_rule(theirs, fields)
    assert jax.tree.all(jax.tree.map(lambda x, y: bits(x) == bits(y), both_ways(theirs, tx, state), state))


def test_masks_partitions_and_injected_numbers_are_seen_through():
    wide, labels = weights(jnp.float32), {"conv": "a", "norm": "b"}
    theirs = optax.partition(
        {"a": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), "b": optax.sgd(1e-3, 0.9)}, labels
    )
    _, state = jax.jit(theirs.update)(wide, theirs.init(wide), wide)
    tx = optax.partition(
        {"a": hs.adam(1e-3, **FLOAT32), "b": hs.sgd(1e-3, 0.9, accumulator_dtype="float32")}, labels
    )
    back = both_ways(theirs, tx, state)
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert bits(x) == bits(y)


@pytest.mark.slow
def test_a_run_goes_on_near_the_run_of_optax():
    """Twenty steps further, under bfloat16 moments and float32 weights."""
    theirs, ours = optax.adamw(1e-3), hs.adamw(1e-3, mu_dtype="bfloat16", nu_dtype="bfloat16")
    wide = weights(jnp.float32)
    grads = [jax.tree.map(lambda p, i=i: jnp.sin(p * i), wide) for i in range(1, 41)]

    def run(tx, state, params, grads):
        step = jax.jit(lambda g, s, p: tx.update(g, s, p))
        for g in grads:
            updates, state = step(g, state, params)
            params = optax.apply_updates(params, updates)
        return state, params

    state, middle = run(theirs, theirs.init(wide), wide, grads[:20])
    _, due = run(theirs, state, middle, grads[20:])
    _, moved = run(ours, hs.from_optax(state, ours, middle), middle, grads[20:])
    _, fresh = run(ours, ours.init(middle), middle, grads[20:])
    way = float(jnp.abs(due["conv"] - middle["conv"]).max())
    assert float(jnp.abs(moved["conv"] - due["conv"]).max()) < 0.1 * way
    assert float(jnp.abs(fresh["conv"] - due["conv"]).max()) > 0.5 * way


@pytest.mark.parametrize(
    ("theirs", "tx", "says"),
    [
        (optax.lion(1e-3), hs.adamw(1e-3), "tx keeps mu of 'conv' for scale_by_adam, .* Pass a transform of"),
        (
            optax.adamw(1e-3),
            hs.sgd(1e-3),
            "the state holds mu of 'conv' for scale_by_adam, which tx does not",
        ),
        (optax.adabelief(1e-3), hs.adamw(1e-3), "no place for '0/count' of the state"),
        (optax.amsgrad(1e-3), hs.adamw(1e-3), "no place for '0/count'"),
        (hs.adamw(1e-3), hs.adamw(1e-3), "no place for '0/count'"),
        (
            optax.MultiSteps(optax.adamw(1e-3), 2),
            hs.adamw(1e-3),
            "no place for 'mini_step' .* such as its inner_state",
        ),
        (
            optax.adamw(1e-3),
            hs.store_state(optax.adamw(1e-3), "bfloat16"),
            "store_state keeps the state of any",
        ),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(theirs, tx, says):
    with pytest.raises(ValueError, match=f"from_optax: .*{says}"):
        hs.from_optax(theirs.init(weights(jnp.float32)), tx, weights())


def test_a_state_of_other_weights_or_of_codes_is_refused():
    state, _ = of_rule(optax.adamw(1e-3), ("mu", "nu"))
    other = {**weights(), "conv": jnp.ones((3, 3), jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"mu of 'conv' has shape \(64, 80\), expected \(3, 3\)"):
        hs.from_optax(state, hs.adamw(1e-3), other)
    codes = jax.tree.map(lambda x: x.astype(jnp.uint8), state)
    with pytest.raises(TypeError, match=r"mu of 'conv' is uint8; .* by to_optax"):
        hs.from_optax(codes, hs.adamw(1e-3), weights())
    tx = hs.adamw(1e-3)
    with pytest.raises(ValueError, match="to_optax: optax_tx keeps trace of 'conv' for trace"):
        hs.to_optax(tx.init(weights()), tx, weights(), optax.sgd(1e-3, 0.9))
    with pytest.raises(ValueError, match="to_optax: the state is not of tx"):
        hs.to_optax(
            hs.lion(1e-3).init(weights()), hs.adamw(1e-3, param_storage="master"), weights(), optax.adamw(1)
        )
