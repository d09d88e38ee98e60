"""Names of leaves come from key paths, so masks, partitions and frameworks do not change the bits."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import halfstep_jax as hs
from halfstep_jax.leaves import named_leaves
from on_jax.steps import assert_trees_same, gradients, run, weights


class Pair(NamedTuple):
    left: object
    right: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """As an Equinox module is: a dataclass whose fields are children."""

    kernel: object
    value: object


@jax.tree_util.register_pytree_node_class
class Opaque:
    """A node without key paths: its children are numbered."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        (1.0, [""]),
        ({"a": {"b": 1.0}}, ["a/b"]),
        ({"a": [1.0, (2.0,)]}, ["a/0", "a/1/0"]),
        ({3: 1.0, 5: Pair(1.0, 2.0)}, ["3", "5/left", "5/right"]),
        (Layer(1.0, 2.0), ["kernel", "value"]),
        ({"x": Layer(1.0, 2.0)}, ["x/kernel", "x/value"]),
        ({"value": 1.0}, ["value"]),
        (Layer(Layer(1.0, 2.0), {"value": 3.0}), ["kernel/kernel", "kernel/value", "value/value"]),
        (Opaque(1.0, {"a": 2.0}), ["0", "1/a"]),
        ({"dé/ñ": 1.0}, ["dé/ñ"]),
    ],
)
def test_a_name_is_the_key_path(tree, names):
    assert [name for name, _ in named_leaves(tree)] == names


@pytest.mark.parametrize(
    "boxed", [nnx.Param, lambda x: nn.Partitioned(x, names=("a",))], ids=["nnx", "linen"]
)
def test_the_value_of_a_variable_of_flax_is_no_part_of_the_name(boxed):
    tree = {"attn": Layer(boxed(jnp.ones(2)), boxed(jnp.ones(2)))}
    assert [name for name, _ in named_leaves(tree)] == ["attn/kernel", "attn/value"]


@pytest.mark.parametrize("masked", [False, True])
def test_an_attribute_called_value_has_the_words_of_its_key_in_a_dict(masked):
    p, g = weights(50), gradients(3, 50)
    tx = hs.adamw(1e-3)
    if masked:
        tx = optax.masked(tx, lambda params: jax.tree.map(lambda _: True, params) | {"b": False})
    as_layer, _ = run(tx, {"a": Layer(p, p), "b": p}, {"a": Layer(g, g), "b": g})
    as_dict, _ = run(tx, {"a": {"kernel": p, "value": p}, "b": p}, {"a": {"kernel": g, "value": g}, "b": g})
    assert_trees_same([as_layer["a"].kernel, as_layer["a"].value], list(as_dict["a"].values()))


def trees():
    params = {
        "a": weights(50, seed=1),
        "b": weights(50, seed=2),
        "c": [weights(50, seed=3), weights(50, seed=4)],
    }
    rows = jax.tree.map(lambda p: gradients(3, 50), params)
    return params, rows


def test_leaves_of_one_shape_get_different_words():
    p, g = weights(50), gradients(3, 50)
    params, _ = run(hs.adamw(1e-3), {"a": p, "b": p}, {"a": g, "b": g})
    assert bool((params["a"] != params["b"]).any())


def test_masking_a_leaf_out_does_not_change_the_others():
    params, rows = trees()
    mask = {"a": False, "b": True, "c": [False, True]}
    whole, _ = run(hs.adamw(1e-3), params, rows)
    tx = optax.chain(
        optax.masked(hs.adamw(1e-3), mask),
        optax.masked(optax.set_to_zero(), jax.tree.map(lambda m: not m, mask)),
    )
    masked, _ = run(tx, params, rows)
    assert_trees_same([masked["b"], masked["c"][1]], [whole["b"], whole["c"][1]])
    assert_trees_same([masked["a"], masked["c"][0]], [params["a"], params["c"][0]])


def test_a_partition_does_not_change_a_leaf():
    params, rows = trees()
    whole, _ = run(hs.adamw(1e-3), params, rows)
    labels = {"a": "one", "b": "two", "c": ["one", "two"]}
    tx = optax.partition({"one": hs.adamw(1e-3), "two": hs.adamw(1e-3)}, labels)
    assert_trees_same(run(tx, params, rows)[0], whole)


def test_the_mask_of_weight_decay_leaves_other_leaves_alone():
    params, rows = trees()
    decayed, _ = run(hs.adamw(1e-3, weight_decay=0.1), params, rows)
    plain, _ = run(hs.adamw(1e-3, weight_decay=0.0), params, rows)
    mask = {"a": True, "b": False, "c": [False, True]}
    for given in (mask, lambda _: mask):
        masked, _ = run(hs.adamw(1e-3, weight_decay=0.1, mask=given), params, rows)
        assert_trees_same([masked["a"], masked["c"][1]], [decayed["a"], decayed["c"][1]])
        assert_trees_same([masked["b"], masked["c"][0]], [plain["b"], plain["c"][0]])


def test_the_order_of_a_dict_or_a_leaf_more_does_not_change_a_leaf():
    params, rows = trees()
    whole, _ = run(hs.adamw(1e-3), params, rows)
    more = run(hs.adamw(1e-3), params | {"aa": weights(7)}, rows | {"aa": gradients(3, 7)})[0]
    assert_trees_same({k: more[k] for k in params}, whole)


@pytest.mark.parametrize("compiled", [True, False])
def test_none_leaves_pass_through(compiled):
    params, rows = trees()
    whole, _ = run(hs.adamw(1e-3), params, rows)
    tx = hs.adamw(1e-3)
    step = jax.jit(tx.update) if compiled else tx.update
    # None in params too: as Equinox filters a model.
    params, rows = params | {"b": None, "f": None}, rows | {"b": None, "f": None}
    state = tx.init(params)
    for k in range(3):
        updates, state = step(jax.tree.map(lambda r, k=k: r[k], rows), state, params)
        params = optax.apply_updates(params, updates)
    assert params["b"] is None
    assert state[0].mu["b"] is None
    assert_trees_same(params["a"], whole["a"])


def test_a_missing_gradient_leaves_weight_and_moments_as_they_are():
    params, rows = trees()
    tx = hs.adamw(1e-3)
    state = tx.init(params)
    g = jax.tree.map(lambda r: r[0], rows)
    _, state = jax.jit(tx.update)(g, state, params)
    updates, after = jax.jit(tx.update)(g | {"a": None}, state, params)
    assert updates["a"] is None
    assert_trees_same([after[0].mu["a"], after[0].nu["a"]], [state[0].mu["a"], state[0].nu["a"]])
    assert_trees_same(hs.apply_updates(params, updates, 0, 1)["a"], params["a"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: hs.adamw(1e-3, recipe="eight_bit"),
        lambda: hs.adamw(1e-3, recipe="one_pass"),
        lambda: hs.lion(1e-3, recipe="eight_bit"),
    ],
)
def test_a_missing_gradient_leaves_codes_as_they_are(make):
    tx, params = make(), {"v": weights((64, 64)), "w": weights((64, 64))}
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    updates, after = tx.update(params | {"v": None}, state, params)
    assert updates["v"] is None
    codes = [[x for name, x in state_leaves(s) if name.endswith("/v")] for s in (state, after)]
    assert len(codes[0]) > 0
    assert_trees_same(*codes)


def state_leaves(state):
    paths = jax.tree_util.tree_leaves_with_path(state)
    return [("/" + jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in paths]


def test_a_missing_gradient_of_dithered_codes_is_refused():
    tx = hs.adamw(1e-3, recipe="four_bit")
    params = {"v": weights((64, 64)), "w": weights((64, 64)), "small": weights(3)}
    state = tx.init(params)
    # Too small for codes of 4 bits.
    assert tx.update(params | {"small": None}, state, params)[0]["small"] is None
    with pytest.raises(ValueError, match=r"the gradient of 'v' is None, and its mu, in codes of 4 bits"):
        tx.update(params | {"v": None}, state, params)
    zeros = params | {"v": jnp.zeros_like(params["v"])}
    assert tx.update(zeros, state, params)[0]["v"].shape == (64, 64)


def test_a_wrapped_transform_that_drops_an_array_is_named():
    tx = hs.store_state(optax.sgd(1e-3, momentum=0.9), "bfloat16")
    params = {"v": weights(8), "w": weights(8)}
    with pytest.raises(ValueError, match=r"dropped or added arrays of its state, such as '0/trace/v'"):
        tx.update(params | {"v": None}, tx.init(params), params)


def test_an_empty_tree_takes_a_step():
    for tree in ({}, None, {"a": None}):
        tx = hs.adamw(1e-3)
        updates, state = jax.jit(tx.update)(tree, tx.init(tree), tree if tree is not None else {})
        assert jax.tree.leaves(updates) == []
        assert int(state[0].count) == 1


def test_a_single_array_is_a_tree():
    p, rows = weights(50), gradients(3, 50)
    one, _ = run(hs.adamw(1e-3), p, rows)
    variable, _ = run(hs.adamw(1e-3), nnx.Param(p), nnx.Param(rows))
    assert_trees_same(variable.get_value(), one)  # both are called ""
    with pytest.raises(TypeError, match=r"the weight '' \(the params are one array\) is int32"):
        hs.adamw(1e-3).init(jnp.ones(3, jnp.int32))


def test_map_params_finds_what_stands_in_the_tree_of_the_params():
    params, _ = trees()
    mask = {"a": True, "b": False, "c": [False, False]}
    for tx, kept in ((hs.adamw(optax.constant_schedule(1.0)), 4), (optax.masked(hs.adam(1e-3), mask), 1)):
        state = tx.init(params)
        mark = {"transform_non_params": lambda _: "other"}
        leaves = jax.tree.leaves(optax.tree.map_params(tx, lambda _: "param", state, **mark))
        assert leaves.count("param") == 2 * kept
        assert leaves.count("other") == len(jax.tree.leaves(state)) - 2 * kept


def test_updates_of_params_in_float32_and_16_bits_side_by_side():
    params = {"a": weights(50), "b": weights(50, "float32"), "c": weights(50, "float16")}
    rows = jax.tree.map(lambda _: gradients(3, 50), params)
    after, _ = run(hs.adamw(1e-3), params, rows)
    assert jax.tree.map(lambda x: str(x.dtype), after) == {"a": "bfloat16", "b": "float32", "c": "float16"}
    for name in params:
        alone, _ = run(hs.adamw(1e-3), {name: params[name]}, {name: rows[name]})
        assert_trees_same(after[name], alone[name])
    assert jnp.isfinite(after["c"]).all()


def test_a_box_beside_plain_arrays_and_other_values_has_its_name_alone():
    """`value` is a part of a name where it is no box's."""
    tree = {"box": nnx.Param(jnp.ones(2)), "own": Layer(1.0, 2.0), "plain": 3.0}
    assert [name for name, _ in named_leaves(tree)] == ["box", "own/kernel", "own/value", "plain"]
