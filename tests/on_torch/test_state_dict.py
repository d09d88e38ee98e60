"""State dicts: every bit and dtype survives."""

import contextlib
import copy
import functools
import itertools
import pickle
import unittest.mock
import weakref

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import halfstep_torch as hs
from halfstep_spec import PARAM_STORAGES
from halfstep_torch.say_once import say_once
from on_torch.steps import assert_same_snapshots, parameters, run, snapshot, step_by_ones, through_a_file

FORMATS = [("bfloat16", "bfloat16"), ("float16", "float32"), (None, None)]


def form(x):
    """Return the types of an entry, and lengths: what LeRobot asks of a file before it loads it."""
    if isinstance(x, dict):
        return {key: form(value) for key, value in x.items()}
    return [form(value) for value in x] if isinstance(x, (list, tuple)) else type(x)


@pytest.mark.parametrize("recipe", ["one_pass", "eight_bit", "four_bit", "near_float32", "full_precision"])
def test_groups_of_a_new_optimizer_have_the_form_of_those_that_were_saved(recipe):
    params = parameters(torch.bfloat16)
    optimizer = hs.AdamW(params, recipe=recipe)
    new = form(optimizer.state_dict()["param_groups"])
    run(params, optimizer, range(2))
    assert form(optimizer.state_dict()["param_groups"]) == new


def stored(params, lr, fmt, seed=0, **_):
    """Return Adam whose moments another link stores, by a seed of its own."""
    adam = hs.scale_by_adam(mu_dtype="float32", nu_dtype="float32")
    links = hs.store_state(adam, fmt, seed=seed), hs.scale_by_learning_rate(lr)
    return hs.Optimizer(params, hs.chain(*links, hs.round_stochastically(seed // 2)))


RESUMED = {
    **{f"{mu}, {nu}": {"mu_dtype": mu, "nu_dtype": nu} for mu, nu in FORMATS},
    **{storage: {"param_storage": storage} for storage in PARAM_STORAGES if storage != "stochastic"},
    "scaled": {"mu_dtype": hs.scaled("int8", 4, 0, 0), "nu_dtype": hs.scaled("ufloat8_e5m3", 4, 0, 0)},
    "packed": {"mu_dtype": hs.relative("int4", 4, 0, 0), "nu_dtype": hs.codebook("udynamic8", 4, 0, 0)},
    "SGD": {"make": hs.SGD, "momentum": 0.9, "nesterov": True},
    "Lion": {"make": hs.Lion, "mu_rounding": "stochastic"},
    "LAMB16": {"make": hs.Lamb16, "trust_power": 0.382},
    "stored": {"make": stored, "fmt": "bfloat16"},
    "stored and scaled": {"make": stored, "fmt": hs.scaled("float8_e4m3fn", 4, 0, 0)},
    "Muon": {"make": hs.Muon, "adam_lr": 1e-3},
    "NorMuon": {"make": hs.Muon, "adam_lr": 1e-3, "normalize": "rows"},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(options, dtype):
    options = {"make": hs.AdamW} | options
    make = functools.partial(options.pop("make"), **options)
    params = parameters(dtype)
    optimizer = make(params, lr=1e-2, weight_decay=0.1, seed=2**60 + 1)
    run(params, optimizer, range(4))
    saved = through_a_file({"model": {name: p.detach() for name, p in params}, "opt": optimizer.state_dict()})
    run(params, optimizer, range(4, 9))

    resumed = parameters(dtype)
    # The seed and the numbers of the groups come from the state dict, formats do not.
    other = make(resumed, lr=0.5)
    with torch.no_grad():
        for name, p in resumed:
            p.copy_(saved["model"][name])
    other.load_state_dict(saved["opt"])
    run(resumed, other, range(4, 9))
    assert_same_snapshots(snapshot(optimizer), snapshot(other))


def test_the_step_is_kept_on_the_cpu_whatever_the_default_device():
    params = parameters()
    optimizer = hs.AdamW(params)
    with torch.device("meta"):
        step_by_ones(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}


def test_the_state_is_torchs_flat_dict_in_its_own_dtypes():
    params = parameters()
    optimizer = hs.AdamW(params, mu_dtype="float32", nu_dtype="bfloat16")
    run(params, optimizer, range(2))
    for entry in through_a_file(optimizer.state_dict())["state"].values():
        dtypes = {key: value.dtype for key, value in entry.items()}
        assert dtypes == {"step": torch.int64, "exp_avg": torch.float32, "exp_avg_sq": torch.bfloat16}
        assert entry["step"].shape == ()


def test_the_loaded_state_is_a_copy():
    params = parameters()
    optimizer = hs.AdamW(params)
    run(params, optimizer, range(2))
    other_params = parameters()
    other = hs.AdamW(other_params)
    before = snapshot(optimizer)
    other.load_state_dict(optimizer.state_dict())
    run(other_params, other, range(5))
    assert_same_snapshots(before, snapshot(optimizer))


def test_roundings_and_formats_stay_those_of_the_optimizer_that_loads():
    chosen = {"mu_rounding": "stochastic", "nu_rounding": "stochastic", "param_storage": "nearest"}
    params, loading = parameters(), parameters()
    saved = hs.AdamW(params, mu_rounding="nearest", nu_rounding="nearest_unchecked", param_storage="nearest")
    run(params, saved, range(2))
    other = hs.AdamW(loading, **chosen)
    other.load_state_dict(through_a_file(saved.state_dict()))
    assert {name: other.param_groups[0][name] for name in chosen} == chosen
    run(loading, other, [2])


def test_the_caller_s_state_dict_is_not_changed():
    params = parameters()
    optimizer = hs.AdamW(params)
    run(params, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    again = copy.deepcopy(saved)
    hs.AdamW(parameters()).load_state_dict(saved)
    assert saved["param_groups"] == again["param_groups"]


def test_a_state_moves_between_layouts():
    weight = torch.nn.Parameter(
        torch.randn((4, 4, 3, 3), generator=torch.Generator().manual_seed(0)).bfloat16()
    )
    optimizer, runs = hs.AdamW([("w", weight)]), []
    run([("w", weight)], optimizer, range(2))
    for layout in (torch.contiguous_format, torch.channels_last):
        p = torch.nn.Parameter(weight.detach().clone(memory_format=layout))
        assert p.is_contiguous(memory_format=layout)
        other = hs.AdamW([("w", p)])
        other.load_state_dict(optimizer.state_dict())
        run([("w", p)], other, range(2, 5))
        runs.append(snapshot(other))
    assert_same_snapshots(*runs)


def test_a_state_dict_has_the_number_of_a_schedule_which_survives_loading():
    params = parameters()
    optimizer = hs.AdamW(params, lr=lambda step: 0.5 / (step + 1))
    run(params, optimizer, range(2))
    saved = through_a_file(optimizer.state_dict())
    assert saved["param_groups"][0]["lr"] == 0.25
    fixed_params = parameters()
    fixed = hs.AdamW(fixed_params, lr=0.125)
    fixed.load_state_dict(saved)
    assert fixed.param_groups[0]["lr"] == 0.25
    run(fixed_params, fixed, range(1))
    fixed.param_groups[0]["lr"] = 7.0
    optimizer.load_state_dict(fixed.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5 / 3  # of the third step, which `fixed` made
    run(params, optimizer, range(1))
    assert optimizer.param_groups[0]["lr"] == 0.5 / 4


def test_a_tensor_lr_survives():
    params = parameters()
    optimizer = hs.AdamW(params, lr=torch.tensor(0.25))
    other = hs.AdamW(parameters(), lr=torch.tensor(0.5))
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert torch.equal(other.param_groups[0]["lr"], torch.tensor(0.25))
    assert other.param_groups[0]["lr"] is not optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("flatten", [False, True])
def test_a_checkpoint_of_torch_distributed_is_loaded_by_name(flatten):
    """By whatever order the parameters have, and with the seed of the run that was saved."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    models = [torch.nn.Linear(3, 2, dtype=torch.bfloat16) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    orders = [list(model.named_parameters()) for model in models]
    first, second = hs.AdamW(orders[0], lr=0.1, seed=9), hs.AdamW(orders[1][::-1], lr=0.2)
    run(orders[0], first, range(2))
    saved = get_optimizer_state_dict(models[0], first, options=options)
    models[1].load_state_dict(models[0].state_dict())
    set_optimizer_state_dict(models[1], second, saved, options=options)
    for order, optimizer in zip(orders, (first, second), strict=True):
        run(order, optimizer, range(2, 4))
    for (_, p), (_, q) in zip(*orders, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(x, second.state[q][key]) for key, x in first.state[p].items())


def _split_by_torch(saved, model, part, optimizer):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, saved, options=options)
    set_optimizer_state_dict(part, optimizer, flat, options=options)


def _split_by_places(saved, model, part, optimizer):
    """As a trainer does that keeps entries of groups by parameter: the header is of the old group."""
    state_dict = saved.state_dict()
    (group,) = state_dict["param_groups"]
    ids = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    names = [name for name, _ in part.named_parameters()]
    states = {place: state_dict["state"][ids[name]] for place, name in enumerate(names)}
    entries = {key: x for key, x in group.items() if key != "param_names"}
    optimizer.load_state_dict(
        {"state": states, "param_groups": [{**entries, "params": list(range(len(names)))}]}
    )


@pytest.mark.parametrize("split", [_split_by_torch, _split_by_places])
def test_a_group_that_is_split_goes_on_with_the_bits_of_the_whole(split):
    """Another split of a pipeline: each stage has some of the parameters, with counts of their own."""
    model = torch.nn.ModuleDict({str(i): torch.nn.Linear(3, 2, dtype=torch.bfloat16) for i in range(4)})
    params = list(model.named_parameters())
    whole = hs.AdamW(params, lr=0.1, seed=9)
    run(params[:5], whole, range(3))
    for _, p in params[:5]:
        p.grad = None
    run(params[5:], whole, range(2))
    copies = copy.deepcopy(model)
    for layers in ("01", "23"):
        part = torch.nn.ModuleDict({layer: copies[layer] for layer in layers})
        named = list(part.named_parameters())
        optimizer = hs.AdamW(named, lr=0.2)
        split(whole, model, part, optimizer)
        for _, p in named:
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
    for _, p in params:
        p.grad = torch.full_like(p, 0.5)
    whole.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), copies.parameters(), strict=True))


def _stages(seed, split):
    """Return a model of four layers, its stages, and an optimizer of each."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({str(i): torch.nn.Linear(8, 8, dtype=torch.bfloat16) for i in range(4)})
    stages = [torch.nn.ModuleDict({layer: model[layer] for layer in layers}) for layers in split]
    options = {"lr": 1e-2, "seed": seed, **hs.recipes.near_float32}
    return model, stages, [hs.AdamW(stage.named_parameters(), **options) for stage in stages]


def _flat(stages, optimizers):
    """As torchtitan's container: the flat states of all stages in one dict, which one DCP call takes."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flats = [
        get_optimizer_state_dict(*pair, options=options) for pair in zip(stages, optimizers, strict=True)
    ]
    return {key: x for flat in flats for key, x in flat.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("saved", "loaded"), [("0 1 2 3", "01 23"), ("01 23", "0 1 2 3"), ("0123", "01 23"), ("0 123", "01 23")]
)
def test_a_checkpoint_of_one_pipeline_split_goes_on_in_another(saved, loaded, tmp_path):
    def steps(run, numbers):
        model, _, optimizers = run
        for step in numbers:
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            for optimizer in optimizers:
                optimizer.step()

    before, after = _stages(3, saved.split()), _stages(4, loaded.split())
    steps(before, range(3))
    dcp.save({"model": before[0].state_dict(), "optimizer": _flat(*before[1:])}, checkpoint_id=str(tmp_path))
    state = {"model": after[0].state_dict(), "optimizer": _flat(*after[1:])}
    dcp.load(state, checkpoint_id=str(tmp_path))
    after[0].load_state_dict(state["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for stage, optimizer in zip(*after[1:], strict=True):
        set_optimizer_state_dict(stage, optimizer, state["optimizer"], options=options)
    for run_of in (before, after):
        steps(run_of, range(3, 5))
    states = [
        {p: optimizer.state[p] for optimizer in run[2] for p in optimizer.state} for run in (before, after)
    ]
    for p, q in zip(before[0].parameters(), after[0].parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(x, states[1][q][key]) for key, x in states[0][p].items())


def test_a_part_with_a_name_that_the_whole_lacks_is_refused():
    a, b, c = (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3))
    saved = hs.AdamW([("a", a), ("b", b)]).state_dict()
    saved["param_groups"][0] |= {"params": [0], "param_names": []}
    with pytest.raises(ValueError, match="param group 0 has 2 parameters in the state dict, 1 here"):
        hs.AdamW([("c", c)]).load_state_dict(saved)


@pytest.mark.parametrize("names", ["saved", "here"])
def test_named_and_unnamed_states_load_into_each_other_by_place_and_say_so(names, caplog):
    say_once.cache_clear()
    named, bare = parameters(), parameters()
    optimizers = hs.AdamW(named, lr=0.1), hs.AdamW([p for _, p in bare], lr=0.1)
    first, second = optimizers if names == "saved" else optimizers[::-1]
    run(named if names == "saved" else bare, first, range(2))
    second.load_state_dict(through_a_file(first.state_dict()))
    for (_, p), (_, q) in zip(*((named, bare) if names == "saved" else (bare, named)), strict=True):
        assert all(torch.equal(x, second.state[q][key]) for key, x in first.state[p].items())
    assert sum("matched by their place" in record.getMessage() for record in caplog.records) == 1


def test_loading_frees_the_old_state_before_it_asks_for_new_memory():
    params = parameters()
    optimizer = hs.AdamW(params)
    run(params, optimizer, range(2))
    saved = through_a_file(optimizer.state_dict())
    old = weakref.ref(optimizer.state[params[0][1]]["exp_avg"])
    alive = []
    other = torch.Tensor.to
    with unittest.mock.patch.object(
        torch.Tensor, "to", lambda x, *args, **options: alive.append(old()) or other(x, *args, **options)
    ):
        optimizer.load_state_dict(saved)
    assert len(alive) == 6
    assert alive == [None] * 6


@contextlib.contextmanager
def memory_ending_at(call, name):
    """Raise at one call of a method of tensors, and hold that the error comes out."""
    whole, calls = getattr(torch.Tensor, name), itertools.count(1)

    def until_memory_ends(x, *args, **options):
        if next(calls) == call:
            raise RuntimeError("not enough memory")
        return whole(x, *args, **options)

    with (
        unittest.mock.patch.object(torch.Tensor, name, until_memory_ends),
        pytest.raises(RuntimeError, match="not enough memory"),
    ):
        yield


def test_a_load_that_fails_while_it_copies_stops_the_run_until_one_succeeds():
    """As where memory ends at the second of three parameters: some state is new, some gone, some old."""
    params = parameters()
    optimizer = hs.AdamW(params)
    run(params, optimizer, range(2))
    saved = through_a_file(optimizer.state_dict())
    run(params, optimizer, range(2, 5))
    with memory_ending_at(3, "to"):
        optimizer.load_state_dict(saved)
    for use in (optimizer.step, optimizer.state_dict, copy.deepcopy(optimizer).step):
        with pytest.raises(RuntimeError, match="AdamW: the last load failed while it copied"):
            use()
    with pytest.raises(TypeError, match="state dict"):
        optimizer.load_state_dict("no state")
    with pytest.raises(RuntimeError, match="failed while it copied"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


@pytest.mark.parametrize("fails", ["state", "weights"])
def test_a_file_that_is_half_loaded_stops_the_run_until_it_is_loaded_again(fails, tmp_path):
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    params = [*model.named_parameters()]
    optimizer = hs.AdamW(params)
    run(params, optimizer, range(2))
    hs.save_state(tmp_path / "run", model, optimizer)
    saved = [p.detach().clone() for p in model.parameters()]
    run(params, optimizer, range(2, 5))
    with memory_ending_at(2, "to" if fails == "state" else "copy_"):
        hs.load_state(tmp_path / "run", model, optimizer)
    save = functools.partial(hs.save_state, tmp_path, model)
    for use in (hs.AdamW.step, save, hs.float32_params, hs.float32_state_dict, hs.stored_params):
        with pytest.raises(RuntimeError, match="AdamW: the last load failed while it copied"):
            use(optimizer)
    hs.load_state(tmp_path / "run", model, optimizer)
    assert all(map(torch.equal, model.parameters(), saved))
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


def test_float32_weights_that_are_half_set_stop_the_run_until_they_are_set_again():
    params = [*torch.nn.Linear(3, 2, dtype=torch.bfloat16).named_parameters()]
    optimizer = hs.AdamW(params, param_storage="split16")
    run(params, optimizer, range(2))
    values = {name: torch.full(p.shape, 0.3) for name, p in params}
    with memory_ending_at(2, "copy_"):
        hs.set_float32_params(optimizer, values)
    for use in (hs.AdamW.step, hs.AdamW.state_dict, hs.float32_params):
        with pytest.raises(RuntimeError, match="AdamW: set_float32_params failed while it copied"):
            use(optimizer)
    hs.set_float32_params(optimizer, values)
    assert all(map(torch.equal, hs.float32_params(optimizer).values(), values.values()))
    optimizer.step()


def test_setting_float32_weights_does_not_make_up_for_a_load_that_failed():
    params = [*torch.nn.Linear(3, 2, dtype=torch.bfloat16).named_parameters()]
    optimizer = hs.AdamW(params)
    run(params, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    with memory_ending_at(2, "to"):
        optimizer.load_state_dict(saved)
    hs.set_float32_params(optimizer, {name: torch.ones(p.shape) for name, p in params})
    with pytest.raises(RuntimeError, match="AdamW: the last load failed while it copied"):
        optimizer.step()


def test_a_hook_that_raises_after_loading_finds_all_of_it_loaded(tmp_path):
    """Weights of a file, and those that `train()` puts back."""
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = hs.AdamWScheduleFree(model.named_parameters(), lr=0.1)
    run([*model.named_parameters()], optimizer, range(2))
    hs.save_state(tmp_path / "run", model, optimizer)
    trained = [p.detach().clone() for p in model.parameters()]
    optimizer.eval()
    averaged = copy.deepcopy(optimizer.state_dict())

    def refuse(_):
        raise ValueError("mine")

    for from_file in (True, False):
        torch.nn.init.zeros_(model.weight)
        other = hs.AdamWScheduleFree(model.named_parameters(), lr=0.1)
        other.register_load_state_dict_post_hook(refuse)
        with pytest.raises(ValueError, match="mine"):
            hs.load_state(tmp_path / "run", model, other) if from_file else other.load_state_dict(averaged)
        other.train()
        assert all(map(torch.equal, model.parameters(), trained))


def test_numbers_of_numpy_are_plain_in_a_state_dict():
    optimizer = hs.AdamW(parameters(), lr=np.float64(1e-3), betas=np.array([0.9, 0.95]))
    (group,) = through_a_file(optimizer.state_dict())["param_groups"]
    assert [type(x) for x in (group["lr"], *group["betas"])] == [float] * 3


OF_OTHERS = {
    "slow": torch.arange(4.0),
    "flag": torch.tensor([True]),
    "wide": torch.ones(2).double(),
    "n": [1],
}


def with_state_of_others(optimizer, p):
    optimizer.state[p].update(copy.deepcopy(OF_OTHERS))
    optimizer.state["lookahead"] = {"k": 5}
    optimizer.state["rounds"] = 3


def has_state_of_others(optimizer, p):
    kept = {key: optimizer.state[p][key] for key in OF_OTHERS}
    assert all(torch.equal(kept[key], OF_OTHERS[key]) for key in ("slow", "flag", "wide"))
    assert [kept[key].dtype for key in ("slow", "flag", "wide")] == [torch.float32, torch.bool, torch.float64]
    assert (kept["n"], optimizer.state["lookahead"], optimizer.state["rounds"]) == ([1], {"k": 5}, 3)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"recipe": "four_bit"}, {"param_storage": "split16"}],
    ids=["default", "four_bit", "split16"],
)
def test_state_that_others_keep_is_saved_and_restored(options, steps):
    """As a wrapper (Lookahead) keeps slow weights beside the moments, also before the first step."""
    weights = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2)]
    a, b = (hs.AdamW([("w", p)], compile=False, **options) for p in weights)
    for _ in range(steps):
        step_by_ones(a)
    with_state_of_others(a, weights[0])
    b.load_state_dict(through_a_file(a.state_dict()))
    weights[1].data.copy_(weights[0].data)
    has_state_of_others(b, weights[1])
    assert b.state[weights[1]]["slow"].data_ptr() != a.state[weights[0]]["slow"].data_ptr()
    for _ in range(2):
        step_by_ones(a), step_by_ones(b)
    has_state_of_others(b, weights[1])
    assert torch.equal(*weights)
    for again in (copy.deepcopy(b), pickle.loads(pickle.dumps(b))):
        has_state_of_others(again, again.param_groups[0]["params"][0])
    assert sorted(hs.float32_state_dict(b)["state"]) == [0]


def without_key(key):
    return lambda entry: entry.pop(key)


def with_value(key, change):
    return lambda entry: entry.update({key: change(entry[key])})


# Edits of a parameter's state, and of a message what names the edit; "" where a load takes the state.
EDITS = {
    "nothing": (lambda entry: None, ""),
    "restarted": (lambda entry: entry.clear(), ""),
    "others' array": (lambda entry: entry.update(slow=torch.ones(3)), ""),
    "others' array on meta": (
        lambda entry: entry.update(slow=torch.ones(3, device="meta")), r"slow of 'w' is on meta"
    ),
    "no array": (without_key("exp_avg"), r"the state of 'w' holds exp_avg_sq, .*keeps exp_avg,"),
    "no step": (without_key("step"), r"the state of 'w' holds exp_avg, "),
    "a text": (with_value("exp_avg", str), r"exp_avg of 'w' is a str\."),
    "sparse": (with_value("exp_avg", torch.Tensor.to_sparse), r"exp_avg of 'w' is torch.sparse_coo on cpu\."),
    "on meta": (with_value("exp_avg", lambda x: x.to("meta")), r"exp_avg of 'w' is torch.strided on meta\."),
    "short": (with_value("exp_avg", lambda x: x[:1].clone()), r"exp_avg of 'w' has shape \(1, 64\) in the"),
    "cast": (with_value("exp_avg", torch.Tensor.double), r"exp_avg of 'w' is float64 in the state dict, "),
    "columns": (with_value("exp_avg", lambda x: x.t().contiguous().t()), ""),
    "no scale": (with_value("exp_avg_sq_scale", lambda x: x * 0 + 254), r"exp_avg_sq_scale of 'w' holds"),
    "a negative step": (with_value("step", lambda x: x * 0 - 3), r"the step of 'w' is -3, no whole number"),
    "a step of None": (with_value("step", lambda x: None), r"the step of 'w' is a NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_a_state_is_refused_when_it_is_saved_just_if_no_load_would_take_it(edit, tmp_path):
    change, message = EDITS[edit]
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    options = {"nu_dtype": hs.scaled("ufloat8_e5m3"), "compile": False}
    optimizer = hs.AdamW(model.named_parameters(), **options)
    step_by_ones(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    change(optimizer.state[model.w]), change(saved["state"][0])
    again = hs.AdamW(model.named_parameters(), **options)
    if not message:
        again.load_state_dict(saved)
        again.load_state_dict(optimizer.state_dict())
        return
    with pytest.raises((TypeError, ValueError), match=rf"^load_state_dict: {message}"):
        again.load_state_dict(saved)
    with pytest.raises((TypeError, ValueError), match=rf"^state_dict: {message}") as caught:
        optimizer.state_dict()
    if "step of" not in message:
        assert "Put back what a step wrote there, or delete the parameter's state" in str(caught.value)
    with pytest.raises((TypeError, ValueError), match=rf"^save_state: {message}"):
        hs.save_state(tmp_path / "run", model, optimizer)
    del optimizer.state[model.w]
    again.load_state_dict(optimizer.state_dict())
    hs.save_state(tmp_path / "run", model, optimizer)


def test_a_file_is_loaded_over_a_state_that_cannot_be_saved(tmp_path):
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = hs.AdamW(model.named_parameters())
    step_by_ones(optimizer)
    hs.save_state(tmp_path / "run", model, optimizer)
    del optimizer.state[model.weight]["exp_avg"]
    hs.load_state(tmp_path / "run", model, optimizer)
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (2, 2)


def test_keys_and_numbers_that_no_load_takes_are_refused_when_they_are_saved():
    optimizer = hs.AdamW([("w", torch.nn.Parameter(torch.ones(4)))])
    step_by_ones(optimizer)
    optimizer.param_groups[0]["eps"] = -1.0
    with pytest.raises(ValueError, match=r"^AdamW: eps=-1.0 "):
        optimizer.state_dict()
    optimizer.param_groups[0]["eps"] = 1e-8
    optimizer.state[7] = {"slow": 1}
    with pytest.raises(ValueError, match=r"^state_dict: state\[7\] is of no parameter, and no load takes it"):
        optimizer.state_dict()
    optimizer.state["lookahead"] = optimizer.state.pop(7)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["lookahead"] == {"slow": 1}


def test_a_file_of_ours_names_state_of_others_that_it_does_not_hold(tmp_path, caplog):
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = hs.AdamW(model.named_parameters())
    optimizer.state[model.weight]["slow"] = torch.ones(2, 2)
    hs.save_state(tmp_path / "a", model, optimizer)
    assert "the state of 'weight' has slow of another library" in caplog.text
    hs.load_state(tmp_path / "a", model, optimizer)
