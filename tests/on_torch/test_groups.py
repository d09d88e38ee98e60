"""Param groups, and copies of an optimizer: each has its own numbers, and goes on with the same bits."""

import collections
import copy
import functools
import inspect
import json
import pickle
import re

import numpy as np
import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.links.group_entries import ASKS_FOR_NOTHING, ELSEWHERE
from halfstep_torch.rules.named import optimizer_arguments
from on_torch.steps import assert_same_snapshots, snapshot, step_by_ones


def test_a_group_added_later_counts_its_own_steps():
    a, b = (torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = hs.AdamW([("a", a)])
    for p in (a, b):
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.add_param_group({"params": [("b", b)], "lr": 0.5})
    optimizer.step()
    assert optimizer.state[a]["step"] == 2
    assert optimizer.state[b]["step"] == 1
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]


def test_a_refused_group_is_not_added():
    a, b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = hs.AdamW([("a", a)])
    with pytest.raises(ValueError, match="eps"):
        optimizer.add_param_group({"params": [("b", b)], "eps": -1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("b", b)]})
    assert len(optimizer.param_groups) == 2


def test_the_group_the_caller_passes_is_not_written_to_when_lr_is_a_schedule():
    group = {"params": [torch.nn.Parameter(torch.ones(3))], "lr": lambda step: 0.1}
    optimizer = hs.AdamW([group])
    assert callable(group["lr"])
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_groups_of_a_torch_optimizer_can_be_taken_over():
    for theirs, ours in ((torch.optim.AdamW, hs.AdamW), (torch.optim.SGD, hs.SGD)):
        optimizer = ours(theirs([torch.nn.Parameter(torch.ones(2))], lr=0.25).param_groups)
        assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("theirs", "ours", "decay", "way_out"),
    [("Adam", hs.AdamW, "decoupled", "Use Adam"), ("AdamW", hs.Adam, "added to the gradient", "Use AdamW")],
)
def test_groups_and_states_of_another_kind_of_decay_are_refused(theirs, ours, decay, way_out):
    p = torch.nn.Parameter(torch.ones(2))
    other = getattr(torch.optim, theirs)([p], weight_decay=0.1)
    message = rf"whose weight_decay is 0\.1; here decay is {decay}\. {way_out}, or weight_decay=0\.$"
    with pytest.raises(ValueError, match=message):
        ours(other.param_groups)
    step_by_ones(other)
    with pytest.raises(ValueError, match=message):
        hs.load_float32_state_dict(ours([p]), other.state_dict())
    other.param_groups[0]["weight_decay"] = 0.0
    hs.load_float32_state_dict(ours([p]), other.state_dict())
    assert ours(other.param_groups).param_groups[0]["weight_decay"] == 0


def test_groups_can_be_logged_as_json():
    format = hs.scaled("ufloat8_e5m3", 64)
    groups = [
        {"params": [("a", torch.nn.Parameter(torch.ones(2)))], "nu_dtype": format},
        {"params": [("b", torch.nn.Parameter(torch.ones(2)))], "mu_dtype": torch.bfloat16},
    ]
    optimizer = hs.AdamW(groups, lr=lambda count: 0.1, mu_dtype=hs.relative("int4", 32))
    logged = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    again = json.loads(json.dumps(logged))
    assert [group["lr"] for group in again] == [0.1, 0.1]
    assert again[0]["nu_dtype"] == format.description
    assert again[1]["mu_dtype"] == "bfloat16"


def test_a_group_has_the_bits_of_an_optimizer_of_its_own():
    """By its own numbers, formats, roundings and storage; a run that goes on has them too."""
    own = {
        "a": {"lr": 0.1, "betas": (0.5, 0.9), "weight_decay": 0.0, "mu_dtype": "float32"},
        "b": {"nu_dtype": torch.float32, "eps": 1e-3},
        "c": {"maximize": True},
        "d": {"param_storage": "split16"},
        "e": {"nu_rounding": "nearest_unchecked"},
    }
    params = {name: torch.nn.Parameter(torch.full((40,), 0.7).bfloat16()) for name in own}
    copies = copy.deepcopy(params)
    together = hs.AdamW([{"params": [(name, params[name])], **own[name]} for name in own], lr=1e-2)
    alone = [hs.AdamW([(name, copies[name])], **{"lr": 1e-2} | own[name]) for name in own]
    for step in range(3):
        for name in own:
            generator = torch.Generator().manual_seed(step)
            params[name].grad = copies[name].grad = torch.randn(40, generator=generator).bfloat16()
        for optimizer in (together, *alone):
            optimizer.step()
    assert_same_snapshots(snapshot(together), [x for each in alone for x in snapshot(each)])
    kept = {name: together.state[p] for name, p in params.items()}
    assert kept["a"]["exp_avg"].dtype == kept["b"]["exp_avg_sq"].dtype == torch.float32
    assert {name for name in own if "extra_bits" in kept[name]} == {"d"}
    resumed = hs.AdamW([{"params": [(name, params[name])], **own[name]} for name in own])
    resumed.load_state_dict(copy.deepcopy(together.state_dict()))
    storages = [group["param_storage"] for group in resumed.param_groups]
    assert storages == ["stochastic", "stochastic", "stochastic", "split16", "stochastic"]
    for optimizer in (resumed, *alone):
        step_by_ones(optimizer)
    assert_same_snapshots(snapshot(resumed), [x for each in alone for x in snapshot(each)])


def test_a_storage_that_is_written_into_a_group_later_is_refused():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = hs.AdamW([("p", p)], 0.1)
    optimizer.param_groups[0]["param_storage"] = "master"
    p.grad = torch.ones_like(p)
    message = (
        "param_storage of param group 0 was 'stochastic' when it was added, .* move the float32_state_dict"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert (p == 1).all()
    # By the way that the message names, and not by the state as it is.
    optimizer.param_groups[0]["param_storage"] = "stochastic"
    other = hs.AdamW([("p", p)], param_storage="master")
    with pytest.raises(ValueError, match="or move its float32_state_dict here by load_float32_state_dict"):
        other.load_state_dict(optimizer.state_dict())
    hs.load_float32_state_dict(other, hs.float32_state_dict(optimizer))
    other.step()
    assert (p < 1).all()


@pytest.mark.parametrize("maximize", ["no", "yes", None, 2.0, [False]])
def test_only_a_bool_decides_whether_a_step_ascends(maximize):
    """Every string but the empty one is true."""
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    problem = "maximize of param group 0 is .* not a bool. Use True or False."
    with pytest.raises(TypeError, match=problem):
        hs.AdamW([("p", p)], maximize=maximize)
    with pytest.raises(TypeError, match=problem):
        hs.AdamW([{"params": [("p", p)], "maximize": maximize}])
    optimizer = hs.AdamW([("p", p)])
    saved = optimizer.state_dict()
    saved["param_groups"][0]["maximize"] = maximize
    with pytest.raises(TypeError, match=problem):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["maximize"] is False
    optimizer.param_groups[0]["maximize"] = maximize
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match=problem):
        optimizer.step()
    assert (p == 1).all()


class Listed(collections.UserList):
    """A sequence that is no list, as the ListConfig of OmegaConf is none."""


@pytest.mark.parametrize("kind", [list, Listed, np.array], ids=["list", "sequence", "array"])
def test_betas_may_be_any_sequence(kind):
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = hs.AdamW([{"params": [("p", p)], "betas": kind([0.8, 0.9])}], betas=kind([0.9, 0.95]))
    assert tuple(optimizer.defaults["betas"]) == (0.9, 0.95)
    assert json.loads(json.dumps(optimizer.state_dict()["param_groups"][0]["betas"])) == [0.8, 0.9]
    for wrong in ("ab", {0.9: 1, 0.95: 2}, {0.9, 0.95}, kind([0.9]), 0.9):
        with pytest.raises(TypeError, match=r"is not a pair\. Use a pair such as"):
            hs.AdamW([("p", p)], betas=wrong)
    with pytest.raises(TypeError, match="lr='1e-3' is not a number"):
        hs.AdamW([("p", p)], lr="1e-3")


class Open(hs.AdamW):
    """A subclass that hands its arguments on."""

    def __init__(self, params, **options):
        super().__init__(params, **options)


class Closed(hs.AdamW):
    """A subclass that has arguments of its own."""

    def __init__(self, params, rate=1e-3):
        super().__init__(params, lr=rate)


@pytest.mark.parametrize("make", [Open, Closed])
def test_groups_of_a_subclass_are_read_as_those_of_its_base(make):
    a, b = (torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = make([{"params": [("a", a)], "recipe": "one_pass"}, {"params": [("b", b)]}])
    step_by_ones(optimizer)
    assert [optimizer.state[p]["exp_avg"].element_size() for p in (a, b)] == [1, 2]
    for key in ("compile", "names", "state_device", "seed"):
        with pytest.raises(ValueError, match=f"{key}=1 in a param group; it is the same for all groups"):
            make([{"params": [("a", a)], key: 1}])


def test_a_recipe_in_a_group_of_a_chain_is_refused():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    tx = hs.chain(hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3), hs.round_stochastically())
    with pytest.raises(ValueError, match="recipe='one_pass' in a param group is unknown"):
        hs.Optimizer([{"params": [("p", p)], "recipe": "one_pass"}], tx)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("recipe", "one_pass", "is read when the group is added"),
        ("seed", 3, "is the same for all groups"),
        ("amsgrad", True, "amsgrad=True is not supported"),
        ("capturable", "yes", "capturable='yes' is not supported"),
        ("weight_decy", 0.1, "Did you mean weight_decay?"),
        ("learning_rate", 0.1, "is unknown"),
    ],
)
def test_an_entry_that_nothing_reads_is_refused_in_the_middle_of_a_run(key, value, problem):
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = hs.AdamW([{"params": [("p", p)], "tag": 1, "amsgrad": False}])
    for step in range(2):
        p.grad = torch.ones_like(p)
        optimizer.param_groups[0]["another tag"] = step
        optimizer.step()
    optimizer.param_groups[0][key] = value
    before = p.detach().clone()
    with pytest.raises(ValueError, match=problem):
        optimizer.step()
    assert torch.equal(p, before)
    del optimizer.param_groups[0][key]
    optimizer.step()
    assert not torch.equal(p, before)


PICKLED = {
    "8-bit floats": functools.partial(hs.AdamW, recipe="full_precision"),
    "LAMB16": hs.Lamb16,
    "float32 weights": functools.partial(hs.SGD, momentum=0.9, param_storage="master"),
}


@pytest.mark.parametrize("make", PICKLED.values(), ids=PICKLED)
def test_arrays_of_every_dtype_survive_a_pickle(make):
    """torch writes 8-bit floats, and cannot read them: a pickle holds bytes."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 4096).reshape(64, 64).to(torch.bfloat16))
    optimizer = make([("p", p)])
    p.grad = p.detach().clone()
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer))
    assert_same_snapshots(snapshot(optimizer), snapshot(again))
    for each in (optimizer, again):
        step_by_ones(each)
    assert_same_snapshots(snapshot(optimizer), snapshot(again))


def test_adafactor_takes_the_arguments_of_transformers_that_ask_for_nothing():
    """Their defaults are what this one does; a fixed rate is a chain."""
    p = torch.nn.Parameter(torch.ones(3))
    hs.Adafactor([("p", p)], scale_parameter=True, relative_step=True, warmup_init=False)
    for name in ("scale_parameter", "relative_step"):
        way = rf"^Adafactor: {name}=False is not supported\. Use {name}=True\. For a rate that is not rel"
        with pytest.raises(ValueError, match=way):
            hs.Adafactor([("p", p)], **{name: False})
    with pytest.raises(ValueError, match=r"warmup_init=True is not supported\. Use warmup_init=False\.$"):
        hs.Adafactor([("p", p)], warmup_init=True)
    links = hs.scale_by_factored_rms(), hs.clip_by_block_rms(1.0), hs.scale_by_learning_rate(1e-3)
    hs.Optimizer([("p", p)], hs.chain(*links, hs.round_stochastically()))


def test_flat_arrays_in_place_of_named_parameters_are_refused_with_the_way_out():
    """As DeepSpeed's ZeRO puts them there; without names they are stepped."""
    model = torch.nn.Linear(3, 3)
    named = hs.AdamW(model.parameters()), hs.AdamW(model.named_parameters())  # the first finds names
    unnamed = hs.AdamW(model.parameters(), names=())
    for optimizer in (*named, unnamed):
        flat = torch.nn.Parameter(torch.ones(6))
        flat.grad = torch.ones(6)
        optimizer.param_groups[0]["params"] = [flat]
    way = r"flat arrays .* without names: pass model\.parameters\(\) and names=\(\)\."
    for optimizer in named:
        with pytest.raises(ValueError, match=way):
            optimizer.step()
    unnamed.step()
    assert (unnamed.param_groups[0]["params"][0] < 1).all()


WITHOUT_PARAMETERS = {
    "adamw": hs.AdamW,
    "sgd": hs.SGD,
    "muon": lambda groups, **kw: hs.Muon([{**group, "use_muon": False} for group in groups], **kw),
    "schedule free": hs.AdamWScheduleFree,
    "round_weights": lambda groups, **kw: hs.round_weights(torch.optim.SGD(groups, lr=1e-3), **kw),
}


@pytest.mark.parametrize("make", WITHOUT_PARAMETERS)
@pytest.mark.parametrize("names", ["found", "passed", "keyword", "none"])
def test_a_group_without_parameters_may_stand_anywhere(make, names):
    """As where LoRA trains no bias: its trainers pass the empty group on. Named or not, it can be saved."""
    for order in (1, -1):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4, bias=False).bfloat16()
        params = list(model.named_parameters() if names == "passed" else model.parameters())
        groups = [{"params": params}, {"params": [], "weight_decay": 0.0}][::order]
        given = {"keyword": list(model.named_parameters()), "none": ()}.get(names)
        if make == "round_weights" and names == "passed" and order == 1:
            continue  # torch's own class refuses these
        if make == "round_weights" and names == "passed":
            groups[0]["param_names"] = []
        optimizer = WITHOUT_PARAMETERS[make](groups, **({} if given is None else {"names": given}))
        step_by_ones(optimizer)
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0][::order]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step_by_ones(optimizer)


@pytest.mark.parametrize("named", [True, False])
def test_a_group_without_parameters_may_be_added_before_and_after(named):
    a, b = (("a", torch.nn.Parameter(torch.ones(3))), ("b", torch.nn.Parameter(torch.ones(3))))
    params = [a, b] if named else [a[1], b[1]]
    optimizer = hs.AdamW([{"params": []}], names=())
    for listed in (params[:1], [], params[1:], []):
        optimizer.add_param_group({"params": listed})
    step_by_ones(optimizer)
    assert [group.get("param_names") for group in optimizer.param_groups] == (
        [[], ["a"], [], ["b"], []] if named else [None] * 5
    )


OTHER_KINDS = {
    dtype: torch.zeros(4, 4, dtype=dtype)
    for dtype in (torch.uint8, torch.int8, torch.float64, torch.complex64)
}


@pytest.mark.parametrize("make", [hs.AdamW, hs.Muon, hs.SGD, hs.AdamWScheduleFree])
def test_a_frozen_parameter_may_be_of_any_kind_until_it_has_a_gradient(make):
    """As quantized weights under adapters (uint8), and rotary tables (complex64)."""
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    for dtype, x in OTHER_KINDS.items():
        setattr(model, str(dtype).removeprefix("torch."), torch.nn.Parameter(x.clone(), requires_grad=False))
    optimizer = make(model.named_parameters())
    model.w.grad = torch.ones_like(model.w)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    values = hs.float32_params(optimizer)
    assert {str(x.dtype).removeprefix("torch.") for x in values.values()} == {
        "float32",
        *(key for key, _ in model.named_parameters() if key != "w"),
    }
    hs.set_float32_params(optimizer, values)
    hs.load_float32_state_dict(optimizer, hs.float32_state_dict(optimizer))
    hs.describe(optimizer), hs.memory_report(model, optimizer), hs.diagnose(model, optimizer)
    optimizer.step()
    before = model.w.detach().clone()
    model.float64.requires_grad_(True).grad = torch.ones(4, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"the weight 'float64' is float64; weights are float32, bfloat16"):
        optimizer.step()
    assert torch.equal(model.w, before)


def written(optimizer, groups):
    optimizer.param_groups = groups


def appended(optimizer, groups):
    optimizer.param_groups.append(groups[-1])


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("way", [written, appended])
@pytest.mark.parametrize("make", [hs.AdamW, hs.Lamb, hs.AdamWScheduleFree])
def test_groups_that_are_written_into_the_optimizer_are_those_of_add_param_group(make, way, named):
    """As Lightning's fine-tuning callbacks resume a run that has unfrozen layers."""
    runs = []
    for written_in in (False, True):
        pairs = [(name, torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))) for name in "ab"]
        params = [p for _, p in pairs]
        optimizer = make(pairs[:1] if named else params[:1], lr=1e-2)
        step_by_ones(optimizer)
        first = optimizer.param_groups[0]
        names = {"param_names": ["b"]} if named else {}
        if written_in:
            way(optimizer, [dict(first), {**first, "params": params[1:], "lr": 0.1, **names}])
        else:
            optimizer.add_param_group({"params": params[1:], "lr": 0.1, **names})
        for _ in range(2):
            step_by_ones(optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 0.1]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        runs.append(params)
    if named:
        assert all(map(torch.equal, *runs))


def test_groups_may_be_taken_out_and_merged():
    pairs = [(name, torch.nn.Parameter(torch.ones(3))) for name in "abc"]
    groups = [{"params": []}, *({"params": [pair], "lr": 0.1 * i} for i, pair in enumerate(pairs, 1))]
    optimizer = hs.AdamW(groups)
    step_by_ones(optimizer)
    del optimizer.param_groups[0]  # as DeepSpeed does with a group without parameters
    step_by_ones(optimizer)
    assert [int(optimizer.state[p]["step"]) for _, p in pairs] == [2, 2, 2]
    before = [p.detach().clone() for _, p in pairs]
    del optimizer.param_groups[0]
    step_by_ones(optimizer)
    moved = [(p - x).abs().mean().item() for (_, p), x in zip(pairs, before, strict=True)]
    assert moved[0] == 0
    assert moved[1:] == pytest.approx([0.2, 0.3], rel=0.1)  # a step of Adam is about its rate


def test_a_group_that_does_not_fit_is_refused_and_what_was_written_stays():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = hs.AdamW([("a", p)])
    step_by_ones(optimizer)
    wrong = {**optimizer.param_groups[0], "params": [torch.nn.Parameter(torch.ones(3))], "eps": -1.0}
    optimizer.param_groups.append({**wrong, "param_names": ["b"]})
    before = p.detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="eps"):
            step_by_ones(optimizer)
    assert len(optimizer.param_groups) == 2
    assert torch.equal(p, before)
    optimizer.param_groups.pop()
    step_by_ones(optimizer)
    assert optimizer.state[p]["step"] == 2


def test_round_weights_takes_groups_that_are_written_into_it():
    pairs = [(name, torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))) for name in "ab"]
    optimizer = hs.round_weights(torch.optim.AdamW(pairs[:1], lr=1e-2))
    step_by_ones(optimizer)
    optimizer.param_groups.append({"params": [pairs[1][1]], "param_names": ["b"], "lr": 0.1})
    step_by_ones(optimizer)
    assert {int(state["round_step"]) for state in optimizer.state.values()} == {1, 2}
    assert pairs[1][1][0].item() == pytest.approx(0.9, abs=0.01)
    del optimizer.param_groups[0]
    step_by_ones(optimizer)
    assert optimizer.state[pairs[0][1]]["round_step"] == 2


TAGS = {"rho": 0.05, "adaptive": True, "centered": False, "lr_scale": 0.7, "name": "head", "k": 6, "wd": [1]}


@pytest.mark.parametrize("make", [hs.AdamW, hs.SGD, hs.Lion, hs.Adafactor, hs.Muon, hs.AdamWScheduleFree])
def test_tags_of_others_are_kept_saved_and_restored(make):
    """As SAM writes `rho` into the groups of the optimizer that it wraps."""
    a, b = ([torch.nn.Parameter(torch.ones(4, 4))] for _ in range(2))
    optimizer, again = (make([{"params": [("0.w", *p)], **tags}]) for p, tags in ((a, TAGS), (b, {})))
    step_by_ones(optimizer)
    again.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups + again.param_groups:
        assert {key: group[key] for key in TAGS} == TAGS
    assert step_by_ones(again) is None


# Whatever `torch.optim.lr_scheduler` and `swa_utils` write into groups.
SCHEDULED = "initial_lr max_lr min_lr swa_lr base_momentum max_momentum".split()


def test_every_class_keeps_what_torchs_schedulers_write():
    kinds = [x for x in map(vars(hs).get, hs.__all__) if isinstance(x, type) and issubclass(x, hs.Optimizer)]
    tags = dict.fromkeys([*SCHEDULED, "weight_decay_mult"], 0.5)
    for kind in kinds:
        rule = {"tx": hs.scale_by_learning_rate(1.0)} if kind is hs.Optimizer else {"lr": 1e-3}
        optimizer = kind([{"params": [("0.w", torch.nn.Parameter(torch.ones(4, 4)))], **tags}], **rule)
        step_by_ones(optimizer)
        assert all(tags.items() <= group.items() for group in optimizer.param_groups)


def test_the_scheduled_keys_are_all_that_torch_writes():
    source = inspect.getsource(torch.optim.lr_scheduler) + inspect.getsource(torch.optim.swa_utils)
    written = set(re.findall(r"""group(?:\[|\.setdefault\()"(\w+)"(?:\] = |,)""", source))
    assert written - {"lr", "betas", "momentum"} == set(SCHEDULED)


@pytest.mark.parametrize(
    ("make", "key", "way_out"),
    [
        (hs.AdamW, "beta1", r"Did you mean betas\?"),
        (hs.AdamW, "lrr", r"Did you mean lr\?"),
        (hs.AdamW, "LR", r"Did you mean lr\?"),
        (hs.AdamW, "b2", r"Did you mean betas\?"),
        (hs.AdamW, "schedule", r"Did you mean lr, which may be a function of the step\?"),
        (hs.SGD, "momentun", r"Did you mean momentum\?"),
        (hs.Adam, "cautious", "Its entries are betas"),
        (hs.SGD, "cautious", "Its entries are accumulator_dtype"),
        (hs.AdamW, "nesterov", "Its entries are betas"),
    ],
)
def test_a_misspelt_entry_and_an_option_of_another_class_are_refused(make, key, way_out):
    with pytest.raises(ValueError, match=rf"{key}=True in a param group is unknown\. {way_out}"):
        make([{"params": [torch.nn.Parameter(torch.ones(4))], key: True}])


def test_every_option_of_an_optimizer_is_known_to_the_groups_of_the_others():
    kinds = [x for x in map(vars(hs).get, hs.__all__) if isinstance(x, type) and issubclass(x, hs.Optimizer)]
    options = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
    assert options - {"self", "params", "others"} <= ELSEWHERE | ASKS_FOR_NOTHING.keys()


def test_a_misspelt_argument_of_a_subclass_is_refused():
    parameters = inspect.signature(hs.AdamW).parameters
    arguments = {**{name: x.default for name, x in parameters.items()}, "params": []}
    optimizer_arguments(hs.AdamW, **arguments)
    with pytest.raises(TypeError, match=r"unknown argument nu_roundng\. Did you mean nu_rounding\?$"):
        optimizer_arguments(hs.AdamW, **arguments, nu_roundng="nearest")
