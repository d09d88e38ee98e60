"""Whatever is wrong with a state dict, it is told by name, and nothing of it is applied."""

import copy
import itertools

import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import assert_same_snapshots, snapshot

DELETED = object()
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
