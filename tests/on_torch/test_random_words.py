"""Random words: the spec's, wherever they are made, and torch's own generators left alone."""

import numpy as np
import pytest
import torch

import halfstep_spec as spec
import halfstep_torch as hs
from halfstep_spec.numbers.random_words import unmixed_words
from halfstep_torch.leaves.names import leaf_name, leaf_names
from halfstep_torch.numbers import random_words
from halfstep_torch.numbers.random_words import leaf_keys, words_from


@pytest.mark.parametrize("offset", [0, 1, 2**31 - 3, 2**32 - 5, 2**32, 3 * 2**32 + 17])
@pytest.mark.parametrize("role", list(hs.Role))
def test_words_are_those_of_the_spec(role, offset):
    ours = hs.random_words(2**63 + 5, 12345, "layer/w", role, (3, 5), offset)
    theirs = spec.random_words(2**63 + 5, 12345, "layer/w", role, (3, 5), offset)
    assert ours.dtype == torch.uint32
    np.testing.assert_array_equal(ours.numpy(), theirs)


def test_words_are_the_same_by_numpy_and_by_torch(monkeypatch):
    by_numpy = hs.random_words(3, 1, "w", hs.Role.NU, (65, 7))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(random_words, "_ONE_THREAD", -1)
    monkeypatch.setattr(random_words, "_NUMPY", None)
    assert torch.equal(by_numpy.view(torch.int32), hs.random_words(3, 1, "w", 2, (65, 7)).view(torch.int32))


@pytest.mark.parametrize("shape", [(), (0,), (1,), 7, [2, 3]])
def test_words_take_any_shape(shape):
    ours = hs.random_words(1, 1, "w", hs.Role.PARAM, shape)
    expected = (shape,) if isinstance(shape, int) else tuple(shape)
    assert ours.shape == expected
    np.testing.assert_array_equal(ours.numpy(), spec.random_words(1, 1, "w", 0, expected))


def test_a_leaf_is_its_name_or_its_id():
    by_name, by_id = (hs.random_words(0, 1, leaf, 0, 4) for leaf in ("a/b", hs.leaf_id("a/b")))
    assert torch.equal(by_name.view(torch.int32), by_id.view(torch.int32))


def test_a_seed_is_an_integer_or_two_words():
    seeds = (2**33 + 5, (2, 5), torch.tensor([2, 5]), np.array([2, 5], np.uint32), np.uint64(2**33 + 5))
    words = [hs.random_words(seed, 1, "w", 0, 4).view(torch.int32) for seed in seeds]
    assert all(torch.equal(words[0], other) for other in words[1:])


def test_keys_of_many_leaves_are_those_of_each():
    leaves, steps = [hs.leaf_id(name) for name in "abcde"], [1, 7, 7, 1, 2**31]
    rows = leaf_keys(2**40 + 1, steps, leaves, (0, 2))
    for row, step, leaf in zip(rows, steps, leaves, strict=True):
        k0, k1 = spec.leaf_key(2**40 + 1, step, leaf, 0)
        assert row.tolist() == [k0.item(), k1.item(), spec.leaf_key(2**40 + 1, step, leaf, 2)[1].item()]


@pytest.mark.parametrize(
    ("name", "leaf"),
    [
        ("weight", "weight"),
        ("a.b.0.weight", "a/b/0/weight"),
        ("module.a.weight", "a/weight"),
        ("_orig_mod.a.weight", "a/weight"),
        ("module._orig_mod.module.a", "a"),
        ("_orig_mod.module.a", "a"),
        ("a.module.b", "a/module/b"),
        ("modules.a", "modules/a"),
        ("module", "module"),
        ("layers.0._orig_mod.w", "layers/0/w"),
        ("a._fsdp_wrapped_module.b._checkpoint_wrapped_module.w", "a/b/w"),
        ("encoder.module.w", "encoder/module/w"),
    ],
)
def test_leaf_names_drop_wrappers_but_no_module_of_that_name(name, leaf):
    assert leaf_name(name) == leaf


@pytest.mark.parametrize("role", list(hs.Role))
def test_rounding_has_the_field_of_a_role_at_the_top_of_its_words(role):
    k0, k1 = (np.int32(key[0].view(np.int32)) for key in spec.leaf_key(0, 1, 0, hs.Role.PARAM))
    own = np.int32(spec.leaf_key(0, 1, 0, role)[1][0].view(np.int32))
    words = words_from(torch.arange(1000, dtype=torch.int32), int(k0), {0: int(k1), role: int(own)})
    if role in (0, 1, 2):  # by the key of role 0 alone
        words = words_from(torch.arange(1000, dtype=torch.int32), int(k0), {0: int(k1)})
    due = spec.random_words(0, 1, 0, role, (1000,)) >> np.uint32(16)
    np.testing.assert_array_equal((words(role).numpy() >> 16) & 0xFFFF, due)


def test_what_dithers_blocks_is_mixed_by_nobody():
    k0, k1 = (int(np.asarray(key).reshape(-1).view(np.int32)[0]) for key in spec.leaf_key(0, 1, 0, 0))
    due = unmixed_words(0, 1, 0, hs.Role.MU, (1000,))
    words = words_from(torch.arange(1000, dtype=torch.int32), k0, {0: k1})(hs.Role.MU, False)
    np.testing.assert_array_equal(words.view(torch.uint32).numpy(), due)
    whole = random_words.whole_words(k0, k1, (2, 500), None, mixed=False)
    np.testing.assert_array_equal(whole.view(torch.uint32).numpy().reshape(-1), due)


def test_the_word_that_roles_share_is_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(random_words, "mix", lambda xp, x: made.append(0) or x)
    words = words_from(torch.arange(4, dtype=torch.int32), 1, {0: 0, 3: 0})
    for role in (0, 1, 2, 1, 3):
        words(role)
    assert len(made) == 2


def test_making_words_leaves_the_global_generators_alone():
    torch.manual_seed(3)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    hs.random_words(0, 1, "w", 0, 1000)
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_names_that_agree_but_for_module_in_front_keep_what_they_have_more_of_it():
    bare = ["weight", "module.weight", "module.bias"]
    assert (
        leaf_names(bare)
        == leaf_names([f"module.{name}" for name in bare])
        == ["weight", "module/weight", "bias"]
    )


def test_a_model_may_have_a_part_called_module_beside_others():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.weight = torch.nn.LayerNorm(8), torch.nn.Parameter(torch.ones(8))

    optimizer = hs.AdamW(Net().named_parameters())
    assert [name for name, _, _ in optimizer.plans()] == ["weight", "module/weight", "bias"]
