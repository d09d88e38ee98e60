"""State dicts that do not fit, or are damaged: each is told by name, and nothing of it is applied."""

import copy
import itertools

import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import assert_same_snapshots, parameters, run, snapshot

DELETED = object()
OTHER_FORMATS = (
    "Build the optimizer with the recipe and the dtypes of the run that was saved, or move its "
    "float32_state_dict here by load_float32_state_dict."
)
WRONG = [DELETED, None, "x", {}, float("nan"), torch.tensor([1.0, 2.0])]


def trained(named: bool) -> hs.AdamW:
    shapes = {"a": (8, 16), "b": (5,)}
    params = {name: torch.nn.Parameter(torch.ones(shape).bfloat16()) for name, shape in shapes.items()}
    groups: list = [{"params": [(name, p) if named else p]} for name, p in params.items()]
    groups[1]["lr"] = 0.5
    nu_dtype = hs.scaled("ufloat8_e5m3", min_size=0)
    optimizer = hs.AdamW(groups, lr=1e-2, nu_dtype=nu_dtype, param_storage="split16", compile=False)
    step(optimizer)
    return optimizer


def step(optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def places(x, way=()):
    """Yield the way to everything in a state dict."""
    for key in x if isinstance(x, dict) else range(min(len(x), 1)) if isinstance(x, list) else ():
        yield (*way, key)
        yield from places(x[key], (*way, key))


def with_(saved, way, wrong):
    """Return a copy with something else in one place."""
    changed = copy.deepcopy(saved)
    *before, last = way
    of = changed
    for key in before:
        of = of[key]
    if wrong is DELETED:
        del of[last]
    else:
        of[last] = wrong
    return changed


def refusal(function, *arguments) -> str | None:
    """Return what a function says that refuses its arguments; None where it takes them."""
    try:
        function(*arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("named", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_damaged_state_dict_is_told_by_name_and_changes_nothing_or_is_loaded_and_steps(named):
    optimizer = trained(named)
    saved = copy.deepcopy(optimizer.state_dict())
    told = 0
    for way, wrong in itertools.product(places(saved), WRONG):
        if isinstance(wrong, torch.Tensor) and way[-1] == "maximize":
            continue  # nothing asks whether a tensor is true before a step does
        before, groups = snapshot(optimizer), str(optimizer.param_groups)
        message = refusal(optimizer.load_state_dict, with_(saved, way, wrong))
        if message is None:
            step(optimizer)
            optimizer = trained(named)
            continue
        told += 1
        assert message.startswith(("load_state_dict: ", "AdamW: ", "scaled")), (way, wrong)
        assert_same_snapshots(before, snapshot(optimizer))
        assert str(optimizer.param_groups) == groups
    assert told > 100


@pytest.mark.parametrize("wrong", WRONG[1:], ids=str)
def test_a_damaged_state_of_torch_is_told_by_name_and_changes_nothing(wrong):
    optimizer = trained(True)
    theirs = torch.optim.AdamW([{"params": group["params"]} for group in optimizer.param_groups])
    step(theirs)
    saved = copy.deepcopy(theirs.state_dict())
    ways = [("state",), ("state", 1), ("state", 1, "step"), ("state", 1, "exp_avg"), ("param_groups",)]
    for way in [*ways, ("param_groups", 0), ("param_groups", 0, "params"), ("param_groups", 0, "lr")]:
        before, groups = snapshot(optimizer), str(optimizer.param_groups)
        message = refusal(hs.load_float32_state_dict, optimizer, with_(saved, way, wrong))
        if message is None:
            optimizer = trained(True)
            continue
        assert message.startswith(("load_float32_state_dict: ", "AdamW: ")), way
        assert_same_snapshots(before, snapshot(optimizer))
        assert str(optimizer.param_groups) == groups


@pytest.mark.parametrize(
    ("count", "kind"),
    [(1, "1"), (None, "None"), (torch.tensor(1.0), r"float32\[\]"), (torch.ones(1).long(), "")],
)
def test_a_count_that_no_step_can_add_to_is_refused_before_anything_moves(count, kind):
    optimizer = trained(True)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        p.grad = torch.ones_like(p)
    kept = optimizer.state[params[-1]]["step"]
    before = snapshot(optimizer)
    optimizer.state[params[-1]]["step"] = count
    with pytest.raises(TypeError, match=rf"^AdamW: the step of '.*' is {kind}.*, not a tensor int64\[\]\. "):
        optimizer.step()
    optimizer.state[params[-1]]["step"] = kept
    assert_same_snapshots(before, snapshot(optimizer))


HEADER = ("param_groups", 0, "halfstep")
EDITS = [
    ((("param_groups",), []),
     "load_state_dict: the state dict has 0 param groups, this optimizer 1. "
     "Build it with the groups of the run that was saved."),
    ((HEADER, DELETED),
     "load_state_dict: param group 0 was not written by halfstep_torch: it has no 'halfstep' entry. "
     "Pass a state dict of the same optimizer class, or pass torch's own to load_float32_state_dict."),
    (((*HEADER, "counts"), "2 x"),
     "load_state_dict: 'counts' in 'halfstep' of group 0 are '2 x'. The file is damaged: load another."),
    (((*HEADER, "spec_version"), 1),
     "load_state_dict: the state dict follows version 1 of the contract, this package version 4. "
     "Load it with the halfstep that wrote it. To go on with this version, carry the run over in float32: "
     "weights by float32_params there and set_float32_params here, the state by to_optax and from_optax, "
     "in torch float32_state_dict and load_float32_state_dict."),
    (((*HEADER, "links"), ["scale_by_lion"]),
     "load_state_dict: the state dict is of the chain scale_by_lion, this optimizer of scale_by_adam, "
     "add_decayed_weights, scale_by_learning_rate, round_stochastically. "
     "Build the chain of the run that was saved, or move its float32_state_dict here by "
     "load_float32_state_dict."),
    (((*HEADER, "names"), ["a/w", "a/b"]),
     "load_state_dict: param group 0 has 2 parameters in the state dict, 3 here. "
     "Build the optimizer with the parameters of the run that was saved."),
    (((*HEADER, "names"), ["a/w", "a/bias", "scale"]),
     "load_state_dict: parameter 'a/b' is not in group 0 of the state dict, and names decide the random "
     "words. Pass the parameters with the names of the run that was saved. "
     "register_names(model), with prefix= if needed, sets them where none are passed."),
    ((("state", 0, "exp_avg"), DELETED),
     "load_state_dict: the state of 'a/w' holds exp_avg_sq, step; this optimizer keeps exp_avg, "
     f"exp_avg_sq, step. {OTHER_FORMATS}"),
    ((("state", 1, "exp_avg_sq"), torch.zeros(5)),
     f"load_state_dict: exp_avg_sq of 'a/b' is float32 in the state dict, bfloat16 here. {OTHER_FORMATS}"),
    ((("state", 1, "exp_avg"), torch.zeros(6, dtype=torch.bfloat16)),
     "load_state_dict: exp_avg of 'a/b' has shape (6,) in the state dict, (5,) here. "
     "Build the model of the run that was saved, and the optimizer with its recipe, dtypes and "
     "param_storage."),
    ((("state", 2, "exp_avg"), torch.zeros(0, dtype=torch.bfloat16, device="meta")),
     "load_state_dict: exp_avg of 'scale' is torch.strided on meta. Pass dense arrays with numbers: load "
     "the file without map_location='meta'."),
    ((("state", 1, "exp_avg"), torch.zeros(5, dtype=torch.bfloat16).to_sparse()),
     "load_state_dict: exp_avg of 'a/b' is torch.sparse_coo on cpu. Pass dense arrays with numbers: load "
     "the file without map_location='meta'."),
    ((("state", 1, "step"), torch.tensor(2, device="meta")),
     "load_state_dict: the step of 'a/b' is on the device meta, without a number. Load the file without "
     "map_location='meta'."),
    ((("param_groups", 0, "lr"), torch.tensor(0.1, device="meta")),
     "AdamW: lr is on the device meta, without a number. Use a float, or load the file without "
     "map_location='meta'."),
    ((("state", 7), {"step": torch.tensor(1)}),
     "load_state_dict: the state dict holds state of 7, which is no parameter of its groups. "
     "Pass what state_dict() returned."),
    ((("param_groups", 0, "lr"), -1.0),
     "AdamW: lr=-1.0 is negative. Use a number >= 0, or maximize=True to ascend."),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), EDITS, ids=[message[17:60] for _, message in EDITS])
def test_what_does_not_fit_is_refused_and_nothing_changes(change, message):
    params, others = parameters(), parameters()
    optimizer, other = hs.AdamW(params, seed=3), hs.AdamW(others, seed=4)
    run(params, optimizer, range(2))
    run(others, other, range(3))
    saved = with_(optimizer.state_dict(), *change)
    before, groups = snapshot(other), copy.deepcopy(other.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=r"load_state_dict|AdamW") as error:
        other.load_state_dict(saved)
    assert str(error.value) == message
    assert_same_snapshots(before, snapshot(other))
    assert other.state_dict()["param_groups"] == groups


def test_float32_arrays_without_numbers_are_refused_and_nothing_changes():
    optimizer = trained(named=True)
    before, wide = snapshot(optimizer), hs.float32_state_dict(optimizer)
    weights = hs.float32_params(optimizer)
    wide["state"][1]["exp_avg"] = wide["state"][1]["exp_avg"].to("meta")
    cure = "is on the device meta, without numbers. Load the file without map_location='meta'"
    with pytest.raises(ValueError, match=f"load_float32_state_dict: exp_avg of 'b' {cure}"):
        hs.load_float32_state_dict(optimizer, wide)
    with pytest.raises(ValueError, match=f"set_float32_params: 'b' {cure}"):
        hs.set_float32_params(optimizer, {**weights, "b": weights["b"].to("meta")})
    assert_same_snapshots(before, snapshot(optimizer))
    step(optimizer)


def test_formats_of_another_recipe_are_told_as_those_of_the_state_dict():
    saved, other = (hs.AdamW(parameters(), recipe=recipe) for recipe in ("one_pass", "eight_bit"))
    step(saved)
    with pytest.raises(ValueError, match="param group 0 of the state dict has mu_dtype=") as error:
        other.load_state_dict(saved.state_dict())
    assert str(error.value).endswith(f"which this optimizer's options refuse. {OTHER_FORMATS}")


@pytest.mark.parametrize("saved", [None, [], {"state": {}}])
def test_what_is_no_state_dict_is_refused(saved):
    with pytest.raises(TypeError) as error:
        hs.AdamW(parameters()).load_state_dict(saved)
    assert str(error.value) == (
        "load_state_dict: the argument is not a state dict with 'state' and 'param_groups'. "
        "Pass what state_dict() returned."
    )


def test_a_file_whose_counts_were_cast_is_refused():
    """Step 301 is 300 in bfloat16; the count stands in the header, too."""
    optimizer = trained(True)
    for entry in optimizer.state.values():
        entry["step"].fill_(301)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(saved))
    for entry in saved["state"].values():
        entry["step"] = entry["step"].bfloat16()
    with pytest.raises(ValueError, match=r"has the steps \[301\] in its header, and in its state \[300\]"):
        optimizer.load_state_dict(saved)
