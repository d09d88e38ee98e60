"""Random words are the reference's, wherever and however they are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfstep_jax as hs
import halfstep_spec as spec
from halfstep.random_words import threefry2x32
from halfstep_jax import Role
from halfstep_jax.numbers.random_words import _block_words, _index, leaf_keys
from halfstep_jax.numbers.seeds import seed_words
from halfstep_spec.numbers.random_words import unmixed_words
from on_jax.steps import assert_trees_same, sharded, take_step

WORD = st.integers(0, 2**32 - 1)


def assert_equal(actual, expected):
    np.testing.assert_array_equal(np.asarray(actual), expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**64 - 1),
    step=WORD,
    leaf=st.one_of(st.text(), WORD),
    role=st.sampled_from(list(hs.Role)),
    offset=st.one_of(
        st.integers(0, 2**64 - 7), st.sampled_from([2**32 - 3, 2**32, 3 * 2**32 - 1, 2**64 - 6])
    ),
)
def test_words_are_those_of_the_reference(seed, step, leaf, role, offset):
    expected = spec.random_words(seed, step, leaf, role, (2, 3), offset)
    assert_equal(hs.random_words(seed, np.uint32(step), leaf, role, (2, 3), offset), expected)


def test_words_under_jit_with_traced_seed_and_step():
    words = jax.jit(lambda seed, step: hs.random_words(seed, step, "a/b", hs.Role.NU, (4, 5), 2**32 - 7))
    expected = spec.random_words(2**33 + 9, 12, "a/b", 2, (4, 5), 2**32 - 7)
    assert_equal(words(jnp.array([2, 9], jnp.uint32), jnp.int32(12)), expected)


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), (("x", "y"), None), (None, "x"), (None, None)])
def test_sharded_words_are_those_of_the_whole_array(axes):
    whole = sharded(np.zeros((16, 8), np.float32), *axes)
    part = jax.jit(
        lambda x: hs.random_words(3, 4, "w", hs.Role.PARAM, x.shape) + x.astype(jnp.uint32),
        out_shardings=whole.sharding,
    )
    assert_equal(part(whole), spec.random_words(3, 4, "w", 0, (16, 8)))
    text = part.lower(whole).compile().as_text()
    assert not [word for word in ("all-gather", "all-reduce", "collective", "all-to-all") if word in text]


def test_a_shard_with_its_offset_has_its_part_of_the_words():
    whole = spec.random_words(1, 1, "w", 0, (8, 4))
    mesh = sharded(np.zeros(8), "x").sharding.mesh

    def shard():
        row = jax.lax.axis_index("x")
        parts = [hs.random_words(1, 1, "w", hs.Role.PARAM, (2, 4), offset=8 * k) for k in range(4)]
        return jax.lax.select_n(row, *parts)

    spec_of_rows = jax.sharding.PartitionSpec("x")
    words = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(), out_specs=spec_of_rows, check_vma=False))()
    assert_equal(words, whole)


# Slices of arrays too large to hold: XLA computes what is asked for.
@pytest.mark.parametrize(
    ("shape", "start"),
    [
        ((2**20, 2**13), (2**19 + 3, 8000)),
        ((3, 2**16 + 1, 2**16 + 1), (2, 65000, 65500)),
        ((2**17, 2**16 + 1), (2**16 - 1, 0)),  # the row begins at 2^32 - 1
        ((2**33,), (2**32 - 2,)),
        ((5, 2**33), (4, 2**32 - 1)),
        ((1, 1, 2**32), (0, 0, 2**32 - 3)),
        ((2**16, 2**16, 1), (2**16 - 1, 2**16 - 3, 0)),
    ],
)
def test_arrays_of_more_than_2_to_the_32_elements_have_the_right_index(shape, start):
    offset = 2**40 + 2**32 - 5
    stop = tuple(min(s + 3, n) for s, n in zip(start, shape, strict=True))

    def index():
        return [jax.lax.slice(jnp.broadcast_to(half, shape), start, stop) for half in _index(shape, offset)]

    hi, lo = (np.asarray(half).astype(object) for half in jax.jit(index)())
    axes = [np.arange(s, e).astype(object) for s, e in zip(start, stop, strict=True)]
    expected = offset
    for axis, (positions, stride) in enumerate(
        zip(axes, np.cumprod((1, *shape[:0:-1]), dtype=object)[::-1], strict=True)
    ):
        expected = expected + (positions * int(stride)).reshape(
            [-1 if a == axis else 1 for a in range(len(shape))]
        )
    np.testing.assert_array_equal(hi * 2**32 + lo, expected)


def test_words_of_an_array_larger_than_memory_have_a_shape():
    shape = (2**20, 2**20)
    words = jax.eval_shape(lambda: hs.random_words(0, 1, "w", hs.Role.NU, shape))
    assert (words.shape, words.dtype) == (shape, jnp.uint32)


@pytest.mark.parametrize(
    ("shape", "block_size"),
    [((6, 64), 32), ((5, 37), 8), ((2, 3, 5, 7), 16), ((4, 10), "row"), ((4, 10), 40), ((0, 8), 4)],
)
def test_words_of_blocks_are_those_of_the_reference(shape, block_size):
    fmt = spec.relative("int4", block_size, 0, 0)
    due = fmt.of_first_elements(unmixed_words(2**40, 7, "w", Role.MU, shape))
    keys = leaf_keys(seed_words("f", 2**40), 7, [spec.leaf_id("w")], (Role.PARAM,))
    key = keys.of_leaf(keys.indices()[0])
    np.testing.assert_array_equal(key.block_words(Role.MU, shape, block_size), due)


def test_words_of_a_block_that_passes_2_to_the_32_are_those_of_its_first_element():
    """Blocks of 1,000 of 5,000 columns: element 2^32 is column 2,296 of row 858,993."""
    shape, k0, k1 = (2**20, 5000), np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)
    corner = (858_993, 1990), (858_994, 3010)
    words = jax.jit(lambda: jax.lax.slice(_block_words((shape, None, 1000), k0, k1), *corner))
    first = 858_993 * 5000 + np.arange(1990, 3010, dtype=np.uint64) // np.uint64(1000) * np.uint64(1000)
    low, high = first.astype(np.uint32), (first >> np.uint64(32)).astype(np.uint32)
    assert set(high[10:1010]) == {0}
    assert set(high[1010:]) == {1}
    assert_equal(words()[0], low * k0 + k1 + np.uint32(0x9E3779B9) * high)


def test_the_links_of_an_alias_make_the_keys_of_a_step_once():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    for storage in ("stochastic", "split8", "compensated"):
        tx = hs.lion(1e-3, weight_decay=0.1, param_storage=storage)
        step = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
        assert step.count(" = scan[") == 1, storage


def test_a_storage_behind_links_of_another_seed_has_words_of_its_own():
    params, gradient = {"w": jnp.full(64, 0.3, jnp.bfloat16)}, {"w": jnp.linspace(-1, 1, 64)}
    links = hs.scale_by_lion(seed=1), hs.scale_by_learning_rate(1e-3)
    stored = hs.store_params(optax.chain(*links), seed=2)
    chained = optax.chain(*links, hs.round_stochastically(2))
    weights = [take_step(tx, params, tx.init(params), gradient)[0] for tx in (stored, chained)]
    assert_trees_same(*weights)


def test_fold_is_fold_in_of_jax():
    key = jax.random.wrap_key_data(jnp.array([7, 9], jnp.uint32), impl="threefry2x32")
    expected = jax.random.key_data(jax.random.fold_in(key, 123))
    words = threefry2x32((jnp.uint32(7), jnp.uint32(9)), (jnp.uint32(0), jnp.uint32(123)))
    assert_equal(jnp.stack(words), expected)


def test_settings_of_jax_change_nothing():
    expected = spec.random_words(5, 6, "w", 1, (9,))
    with jax.threefry_partitionable(False), jax.default_prng_impl("rbg"):
        assert_equal(hs.random_words(5, 6, "w", hs.Role.MU, (9,)), expected)
    with jax.enable_x64(True):
        assert_equal(hs.random_words(5, 6, "w", hs.Role.MU, (9,)), expected)
