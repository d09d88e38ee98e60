"""Random words against what others published."""

import importlib.util
import pathlib

import numpy as np
import pytest

from halfstep_spec.numbers.random_words import (
    Role,
    fold,
    leaf_id,
    leaf_key,
    mix,
    random_words,
    role_of,
    threefry2x32,
    unmixed_words,
)
from halfstep_spec.numbers.seeds import seed_words

PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "random_words.py"

# Random123, tests/kat_vectors at 9545ff6: threefry2x32 20, columns counter, key, answer.
_PUBLISHED = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "answer"), _PUBLISHED)
def test_threefry_gives_random123_published_words(counter, key, answer):
    assert tuple(int(word[0]) for word in threefry2x32(key, counter)) == answer


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31 - 1])
def test_fold_is_jax_fold_in(seed):
    jax = pytest.importorskip("jax")
    for x in (0, 1, 7, 2**31, 2**32 - 1):
        ours = np.concatenate(fold(seed_words(seed), x))
        theirs = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), np.uint32(x)))
        np.testing.assert_array_equal(ours, np.asarray(theirs))


def test_leaf_id_gives_published_fnv_1a_words():
    # Fowler, Noll, Vo: test vectors of FNV-1a, 32 bits.
    published = {"": 0x811C9DC5, "a": 0xE40C292C, "b": 0xE70C2DE5, "foobar": 0xBF9CF968}
    assert {name: leaf_id(name) for name in published} == published


def test_mix_is_a_permutation_on_a_block():
    x = np.arange(2**20, dtype=np.uint32)
    assert np.unique(mix(x)).size == x.size


def test_words_do_not_depend_on_the_shape_or_the_part():
    whole = random_words(3, 1, "w", Role.MU, (6, 4))
    np.testing.assert_array_equal(whole.ravel()[8:], random_words(3, 1, "w", Role.MU, (16,), offset=8))


def test_streams_of_roles_leaves_steps_and_seeds_are_unrelated():
    """Words of two streams agree in a bit with chance 1/2: z < 5 over 32 x 65,536 bits."""
    base = random_words(0, 1, "w", Role.PARAM, (65536,))
    others = [
        random_words(0, 1, "w", Role.STATE, (65536,)),
        random_words(0, 1, "w", role_of("diff"), (65536,)),
        random_words(0, 2, "w", Role.PARAM, (65536,)),
        random_words(0, 1, "v", Role.PARAM, (65536,)),
        random_words(1, 1, "w", Role.PARAM, (65536,)),
        random_words(1 << 32, 1, "w", Role.PARAM, (65536,)),
        random_words(0, 1, "w", Role.PARAM, (65536,), offset=1),
        random_words(0, 1, "w", Role.PARAM, (65536,), offset=2**32),
    ]
    bits = 32 * 65536
    for other in others:
        agreeing = bits - int(np.bitwise_count(base ^ other).sum())
        assert abs(agreeing - bits / 2) < 5 * np.sqrt(bits) / 2


def test_weight_mu_and_nu_read_three_fields_of_one_word():
    weight, mu, nu = (random_words(0, 1, "w", role, (1000,)) for role in (Role.PARAM, Role.MU, Role.NU))
    for role, words in ((Role.PARAM, weight), (Role.MU, mu), (Role.NU, nu)):
        field = weight >> np.uint32({Role.PARAM: 16, Role.MU: 8, Role.NU: 0}[role]) & np.uint32(0xFFFF)
        np.testing.assert_array_equal(words >> np.uint32(16), field)


def test_dithers_of_blocks_are_unrelated_over_steps():
    """Of any two blocks, as each step has a multiplier of its own: the largest of 12 lags, and the mean."""
    steps = 2000
    sums = np.stack([unmixed_words(0, t, "w", Role.MU, (64 * 32,))[::32] for t in range(1, steps + 1)])
    d = (2.0 * (sums >> np.uint32(16)) + 1) / 2**17 - 0.5
    assert abs(d.mean()) < 4 / np.sqrt(12 * steps)  # of a step, all may be alike
    for lag in (1, 2, 3, 4, 5, 6, 7, 8, 13, 21, 32, 55):
        for first in (0, 3, 8):
            assert abs(np.mean(d[:, first] * d[:, first + lag]) * 12) < 4.5 / np.sqrt(steps), lag
        assert abs(np.mean(d[:-1, 0] * d[1:, lag]) * 12) < 4.5 / np.sqrt(steps), lag


def test_k0_is_odd_so_that_no_two_elements_share_a_word():
    words = [random_words(0, step, "w", Role.PARAM, (65536,)) for step in range(1, 9)]
    assert all(leaf_key(0, step, leaf_id("w"), 0)[0] % 2 == 1 for step in range(1, 9))
    assert all(np.unique(x).size == x.size for x in words)


@pytest.fixture(scope="module")
def benchmark():
    """Return `benchmarks/random_words.py`: the statistics by which the words were chosen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PATH.parent)
        found = importlib.util.spec_from_file_location("random_words", PATH)
        assert found
        assert found.loader
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        yield module


def test_the_statistics_are_of_the_contract_s_words(benchmark):
    """The benchmark has the words as a function of keys, to try keys that no seed gives."""
    (k0,), (k1,) = benchmark.keys(np.array([7], np.uint32), seed=5, leaf="a")
    words = benchmark.contract(k0, k1, np.arange(64, dtype=np.uint32))
    np.testing.assert_array_equal(words, random_words(5, 7, "a", Role.PARAM, (64,)))


def test_rounding_cannot_tell_fields_of_words_from_random_numbers(benchmark):
    """Each of 32 figures is roughly normal, the worst of three: five sd come up once in 18,000 runs."""
    found = benchmark.statistics(benchmark.contract, 512, 4096) | benchmark.multipliers(65536)
    assert {name: z for name, z in found.items() if not abs(z) < 5} == {}


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (lambda k0, k1, index: index * k0 + k1, "lag 1"),
        (lambda k0, k1, index: mix(index + k0 % np.uint32(64)), "time, sums of elements"),
        (lambda k0, k1, index: mix((index ^ k0) & np.uint32(0xFFF) ^ k1), "repeats 2^16"),
        (lambda k0, k1, index: mix(index * k0 + k1) & np.uint32(0xFFFF00FF), "bytes"),
        (lambda k0, k1, index: mix(index // 2 * k0 + k1), "pairs"),
    ],
)
def test_words_that_are_not_random_are_seen(benchmark, words, seen):
    assert abs(benchmark.statistics(words, 64, 4096)[seen]) > 10


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=r"outside \[0, 2\^64\)"):
        seed_words(seed)
