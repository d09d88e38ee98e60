"""A step is built once and run again: whatever makes it stale is noticed, and nothing more is kept."""

import contextlib
import gc
import sys
import weakref

import numpy as np
import pytest
import torch

import halfstep
import halfstep_torch as hs
from halfstep_torch.engine.key import Facts, read
from halfstep_torch.engine.plan import Stream
from halfstep_torch.engine.step_numbers import KeysAhead, leaves_of, stream_keys
from halfstep_torch.leaves.checks import LAST_STEP
from halfstep_torch.numbers.random_words import as_int32
from on_torch.steps import assert_same_snapshots, give_gradients, parameters, run, snapshot, step_by_ones


class Wrapped(torch.nn.Parameter):
    """A parameter of a subclass that wraps other tensors, as far as a step can see."""

    __tensor_flatten__ = None


class WrappedTensor(torch.Tensor):
    """A gradient of such a subclass."""

    __tensor_flatten__ = None


def named(shapes=((16, 16), (4, 1), (300, 300))):
    return parameters(shapes={f"w{i}": shape for i, shape in enumerate(shapes)})


def stepped(steps: int = 2, **options):
    """Return parameters and an optimizer that has made some steps, the last of them by its launch."""
    pairs = named()
    optimizer = hs.AdamW(pairs, lr=1e-2, seed=3, compile=False, **options)
    run(pairs, optimizer, range(steps))
    assert not optimizer._launches[None].is_new
    give_gradients(pairs, steps)
    return pairs, optimizer


def key_of(pairs, optimizer) -> dict[str, list]:
    weights, states = [param for _, param in pairs], [optimizer.state[param] for _, param in pairs]
    tensors = [x for state in states for x in state.values()]
    reading = read(weights, [p.grad for p in weights], tensors)
    fields = {field: [*items] for field, items in reading.facts._asdict().items()}
    return {**fields, "tensors": [*map(id, tensors)], "names": [[*state] for state in states]}


def outcome(pairs, optimizer, built_anew: bool):
    """Return the error of a step and all that the optimizer then has, with or without its last launch."""
    if built_anew:
        optimizer._launches.clear()
    error = None
    try:
        optimizer.step()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, [] if error else [
        *snapshot(optimizer),
        *(p.detach().view(torch.int16).numpy() for _, p in pairs),
    ]


def with_data(of, new):
    def change(pairs, optimizer):
        x = of(pairs, optimizer)
        x.data = new(x.data)

    return change


def weight(pairs, optimizer):
    return pairs[0][1]


def column(pairs, optimizer):
    return pairs[1][1]


def moment(pairs, optimizer):
    return optimizer.state[pairs[0][1]]["exp_avg"]


def long_moment(pairs, optimizer):
    return optimizer.state[pairs[2][1]]["exp_avg"]


def set_class(of, cls):
    def change(pairs, optimizer):
        of(pairs, optimizer).__class__ = cls

    return change


def thaw_another(pairs, optimizer):
    pairs[1][1].grad = None


def give_wide_gradient(pairs, optimizer):
    for _, param in pairs:
        grad, param.grad = param.grad, None
        param.grad_dtype = torch.float32
        param.grad = grad.float()


def give_sparse_gradient(pairs, optimizer):
    pairs[0][1].grad = pairs[0][1].grad.to_sparse()


def move_away(pairs, optimizer):
    param = pairs[0][1]
    param.grad = None
    there = torch.nn.Parameter(torch.empty_like(param, device="meta"))
    torch.utils.swap_tensors(param, there)
    param.grad = torch.empty_like(param)


def give_transposed_gradient(pairs, optimizer):
    pairs[2][1].grad = pairs[2][1].grad.t()


def rename_state(pairs, optimizer):
    state = optimizer.state[pairs[0][1]]
    kept = dict(state)
    state.clear()
    state.update({{"exp_avg": "momentum_buffer"}.get(key, key): x for key, x in kept.items()})


def replace_state(pairs, optimizer):
    state = optimizer.state[pairs[0][1]]
    state["exp_avg"] = state["exp_avg"].view_as(state["exp_avg"])


def count_by_hand(pairs, optimizer):
    optimizer.state[pairs[0][1]]["step"].fill_(40)


def replace_count(pairs, optimizer):
    optimizer.state[pairs[0][1]]["step"].data = torch.tensor(40)


def demand_compiling(pairs, optimizer):
    optimizer._compile.choice = "auto"


# By the field of the key that alone changes, and whose it is.
STALE = {
    ("classes", "weight"): set_class(weight, Wrapped),
    ("memory", "weight"): with_data(weight, torch.clone),
    ("dtypes", "weight"): with_data(weight, lambda x: x.view(torch.float16)),
    ("shapes", "weight"): with_data(column, lambda x: x[:2]),
    ("in_order", "weight"): with_data(weight, torch.t),
    ("classes", "gradient"): set_class(lambda pairs, _: pairs[0][1].grad, WrappedTensor),
    ("grad_dtypes", "gradient"): give_wide_gradient,
    ("sizes", "gradient"): with_data(lambda pairs, _: pairs[1][1].grad, lambda x: x[:2]),
    ("in_order", "gradient"): give_transposed_gradient,
    ("names", "state"): rename_state,
    ("tensors", "state"): replace_state,
    ("memory", "moment"): with_data(long_moment, torch.clone),
    ("dtypes", "moment"): with_data(moment, lambda x: x.view(torch.float16)),
    ("memory", "count"): replace_count,
    ("sizes", "moment"): with_data(moment, lambda x: x[:4]),
}
# What more than one entry says, or another function.
ALSO_STALE = {
    "a parameter without a gradient": thaw_another,
    "a sparse gradient": give_sparse_gradient,
    "no state": lambda pairs, optimizer: optimizer.state.clear(),
    "the state of one parameter": lambda pairs, optimizer: optimizer.state.pop(pairs[0][1]),
    "no count": lambda pairs, optimizer: optimizer.state[pairs[0][1]].pop("step"),
    "a state that is no tensor": lambda pairs, optimizer: optimizer.state[pairs[0][1]].update(exp_avg=1.0),
    "parameters in another order": lambda pairs, optimizer: optimizer.param_groups[0]["params"].reverse(),
    "a parameter less": lambda pairs, optimizer: optimizer.param_groups[0]["params"].pop(),
    "a weight of another size": lambda pairs, optimizer: pairs[0][1].set_(torch.zeros(8, 16).bfloat16()),
    "a weight on another device": move_away,
    "another choice of compiling": demand_compiling,
    "counts that a user sets": count_by_hand,
    "a gradient that autograd knows": lambda pairs, _: pairs[0][1].grad.requires_grad_(),
}


def compared_with_one_built_anew(change):
    """Change two equal runs, one of which loses its launch, and compare their next steps.

    Return whether the launch of the other was run again.
    """
    (pairs, optimizer), (others, reference) = stepped(), stepped()
    kept = optimizer._launches[None]
    for of in ((pairs, optimizer), (others, reference)):
        with torch.no_grad():
            change(*of)
    (error, ours), (expected, theirs) = outcome(pairs, optimizer, False), outcome(others, reference, True)
    assert error == expected
    assert_same_snapshots(ours, theirs)
    return optimizer._launches.get(None) is kept


@pytest.mark.parametrize("part", STALE, ids=" of a ".join)
def test_every_part_of_the_key_makes_a_launch_stale(part):
    assert not compared_with_one_built_anew(STALE[part])


def test_every_field_of_the_key_is_one_of_these():
    # test_sharded_launch.py changes placements, and the test of strided weights their strides.
    assert {*Facts._fields} == {field for field, _ in STALE} - {"tensors", "names"}


@pytest.mark.parametrize("part", STALE, ids=" of a ".join)
def test_no_other_field_of_the_key_says_the_same(part):
    pairs, optimizer = stepped()
    before = key_of(pairs, optimizer)
    with torch.no_grad():
        STALE[part](pairs, optimizer)
    after = key_of(pairs, optimizer)
    changed = {field for field in before if before[field] != after[field]}
    # A wide gradient has more bytes, a transposed weight strides, and a state that is replaced an address.
    follow = {"grad_dtypes": {"sizes"}, "in_order": {"shapes"}, "tensors": {"memory"}}
    assert changed - follow.get(part[0], set()) == {part[0]}


@pytest.mark.parametrize("what", ALSO_STALE)
def test_other_changes_are_noticed(what):
    kept = what in (
        "a gradient that autograd knows",
        "counts that a user sets",
        "a parameter without a gradient",
    )
    assert compared_with_one_built_anew(ALSO_STALE[what]) == kept


def test_a_strided_weight_with_other_strides_makes_a_launch_stale():
    outcomes = []
    for built_anew in (False, True):
        memory = torch.linspace(-1, 1, 1024).bfloat16()
        pairs = [("w", torch.nn.Parameter(memory.as_strided((8, 8), (1, 16))))]
        optimizer = hs.AdamW(pairs, lr=1e-2, compile=False)
        run(pairs, optimizer, range(2))
        kept = optimizer._launches[None]
        pairs[0][1].data = memory.as_strided((8, 8), (1, 32))
        give_gradients(pairs, 2)
        outcomes.append(outcome(pairs, optimizer, built_anew))
        assert optimizer._launches[None] is not kept
    (error, ours), (expected, theirs) = outcomes
    assert error is expected is None
    assert_same_snapshots(ours, theirs)


def set_entry(**entries):
    return lambda pairs, optimizer: optimizer.param_groups[0].update(entries)


def replace_group(pairs, optimizer):
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}


ENTRIES = {
    "lr": set_entry(lr=0.5),
    "betas": set_entry(betas=(0.5, 0.9)),
    "a number out of range": set_entry(lr=-1.0),
    "maximize": set_entry(maximize=True),
    "maximize that is no bool": set_entry(maximize="no"),
    "a format": set_entry(mu_dtype="float32"),
    "an option": set_entry(param_storage="nearest"),
    "an entry that nothing reads": set_entry(weight_decy=0.1),
    "a group in place of another": replace_group,
}


@pytest.mark.parametrize("what", ENTRIES)
def test_entries_that_are_other_objects_are_read_and_checked(what):
    compared_with_one_built_anew(ENTRIES[what])


def test_a_rate_that_decides_no_format_leaves_the_launch_as_it_is():
    """As OneCycleLR writes the momentum at every step; moments may be stored otherwise at another rate."""
    outcomes, kept = [], []
    for built_anew in (False, True):
        pairs, optimizer = stepped()
        optimizer.param_groups[0]["betas"] = (0.8, 0.99)
        kept.append(optimizer._launches[None])
        outcomes.append(outcome(pairs, optimizer, built_anew))
        kept.append(optimizer._launches[None])
    (_, ours), (_, theirs) = outcomes
    assert_same_snapshots(ours, theirs)
    assert kept[0] is kept[1]
    assert kept[2] is not kept[3]


def test_a_decay_that_begins_reaches_the_weights_of_its_mask_alone():
    """The plans of the others stay: one that stays says nothing of the next."""
    outcomes = []
    for built_anew in (False, True):
        pairs = named()
        decay = hs.add_decayed_weights(mask=lambda name, _: name == "w0")
        optimizer = hs.Optimizer(pairs, hs.chain(hs.scale_by_adam(), decay, hs.round_stochastically()))
        for step in range(3):
            give_gradients(pairs, step)
            optimizer.param_groups[0]["weight_decay"] = 0.0 if step < 2 else 0.5
            error, ours = outcome(pairs, optimizer, built_anew)
        outcomes.append((error, ours))
    (error, ours), (expected, theirs) = outcomes
    assert error is expected is None
    assert_same_snapshots(ours, theirs)


def fill_rate(entries):
    entries["lr"].fill_(0.3)


def set_first_beta(entries):
    entries["betas"][0] = 0.7


@pytest.mark.parametrize("change", [fill_rate, set_first_beta])
def test_entries_that_change_in_place_are_read_at_every_step(change):
    outcomes = []
    for built_anew in (False, True):
        pairs, optimizer = stepped()
        optimizer.param_groups[0].update(lr=torch.tensor(1e-2), betas=[0.5, 0.9])
        optimizer.step()
        change(optimizer.param_groups[0])
        outcomes.append(outcome(pairs, optimizer, built_anew))
    (error, ours), (expected, theirs) = outcomes
    assert error is expected is None
    assert_same_snapshots(ours, theirs)


def test_a_format_is_read_again_only_if_its_description_has_changed():
    p = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = hs.AdamW([("w", p)], mu_dtype=hs.scaled("int8"), mu_rounding="stochastic", compile=False)
    reads, read = [], optimizer._group
    optimizer._group = lambda *args: reads.append(args) or read(*args)  # pyright: ignore
    step_by_ones(optimizer)
    reads.clear()
    optimizer.step()
    assert not reads
    optimizer.param_groups[0]["mu_dtype"]["block_size"] = 64
    with pytest.raises(ValueError, match="exp_avg_scale of 'w' has shape"):
        optimizer.step()
    assert reads


def test_keys_that_are_made_ahead_are_those_of_each_step():
    streams, names = [Stream(3, "", False, (0, 4)), Stream(9, "b/", True, (1,))], ["w", "v", "u"]
    keys = KeysAhead(streams, leaves_of(streams, names))
    part = keys.part(np.array([2, 0]))
    for first in (1, 2, 3, 60, 61, 400, 5000, 5001, 4999, LAST_STEP - 1, LAST_STEP):
        for others in (7, 8):  # counts of an expert that is skipped
            steps = [first, first + others, first]
            expected = as_int32(stream_keys(streams, steps, names)).T
            np.testing.assert_array_equal(keys.at(steps), expected)
            np.testing.assert_array_equal(part.at([steps[2], steps[0]]), expected[:, [2, 0]])


def bytes_of_tensors() -> int:
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        with contextlib.suppress(Exception):
            if isinstance(x, torch.Tensor):
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("recipe", [None, "four_bit"])
def test_a_launch_keeps_no_gradient_and_no_more_bytes_from_step_to_step(recipe):
    pairs, optimizer = stepped(recipe=recipe)
    sizes = []
    for step in range(3):
        give_gradients(pairs, step)
        grads = [weakref.ref(param.grad) for _, param in pairs if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert len(grads) == 3
        assert not [grad for grad in grads if grad() is not None]
        sizes.append(bytes_of_tensors())
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("recipe", [None, "four_bit"])
def test_a_launch_that_is_dropped_is_freed_at_once(recipe):
    """It refers to state, for which there may be no memory twice."""
    pairs = named()
    optimizer = hs.AdamW(pairs, compile=True, recipe=recipe)
    for step in range(4):
        give_gradients(pairs[: 1 + step % 3], step)
        optimizer.step()
        optimizer.zero_grad()
    kept = weakref.ref(optimizer._launches[None])
    gc.disable()
    try:
        optimizer._launches.clear()
        assert kept() is None
        array = weakref.ref(optimizer.state[pairs[0][1]]["exp_avg"])
        optimizer.state.clear()
        assert array() is None
    finally:
        gc.enable()


def test_a_warm_step_calls_40_functions_whatever_the_number_of_weights():
    def files_of_calls(count):
        pairs = named([(8, 8)] * count)
        optimizer = hs.AdamW(pairs, compile=True)
        run(pairs, optimizer, range(4))
        give_gradients(pairs, 4)
        files = []

        def profile(frame, event, _):
            if event == "call" and frame.f_code.co_filename.startswith(folders):
                files.append(frame.f_code.co_filename)

        sys.setprofile(profile)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        return files

    folders = tuple(folder for module in (halfstep, hs) for folder in module.__path__)
    of_100 = files_of_calls(100)
    assert 10 < len(of_100) <= 40
    assert len({*of_100}) <= 12
    assert len(files_of_calls(200)) == len(of_100)


def test_a_warm_step_starts_no_garbage_collection():
    """Objects for each of a thousand parameters would: of all objects of a program, at every tenth step."""
    pairs = named([(2, 2)] * 1000)
    optimizer = hs.AdamW(pairs, compile=True)
    give_gradients(pairs, 0)
    for _ in range(2):
        optimizer.step()
    gc.collect()
    before = gc.get_stats()
    for _ in range(10):
        optimizer.step()
    started = [
        after["collections"] - x["collections"] for x, after in zip(before, gc.get_stats(), strict=True)
    ]
    assert sum(started) <= 1  # what the loop itself allocates may fill the last of 700 places
