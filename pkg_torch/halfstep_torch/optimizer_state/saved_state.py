"""The state of an optimizer to a state dict in torch's form with headers, and back."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from halfstep_torch.engine.byte_form import as_bytes, from_bytes
from halfstep_torch.engine.groups import ReadGroup, plain_value, shown_rates
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.slots import count_on_device
from halfstep_torch.leaves.group_names import Group, StateDict
from halfstep_torch.links.chain import HEADER
from halfstep_torch.optimizer_state.form import SavedState
from halfstep_torch.optimizer_state.others_state import (
    check_keys,
    check_others,
    copied,
    others_of,
    without,
)
from halfstep_torch.optimizer_state.state_dict import (
    OTHER_FORMATS,
    Ids,
    check_counts,
    check_saved_state,
    load_group,
    load_states,
    read_groups,
    replace_groups,
)
from halfstep_torch.say_once import say_once
from halfstep_torch.sharded.how_stepped import state_placements
from halfstep_torch.sharded.state_home import StateOwner

_IN_PLACE = (
    "No load takes it. Put back what a step wrote there, or delete the parameter's state, which restarts it."
)


def with_headers(optimizer: StateOwner, state_dict: StateDict) -> StateDict:
    """Return torch's state dict with arrays in byte form, and a header for each group.

    Foreign entries in the state are returned unchanged. A state that `load` would reject raises here.
    """
    state = state_dict["state"]
    ids = [key for group in state_dict["param_groups"] for key in group["params"]]
    check_keys(state, set(ids))
    group_of = functools.cache(optimizer._group)
    for i in range(len(optimizer.param_groups)):
        assert group_of(i).values is not None  # group_of raises for a number that a load rejects
    for key, (i, name, param) in zip(ids, optimizer._named(), strict=True):
        if entry := state.get(key):
            _, own, others = checked_entry("state_dict", group_of(i), name, param, entry)
            state[key] = {**as_bytes(own), **others}
    for group, header in zip(state_dict["param_groups"], headers_of(optimizer), strict=True):
        group.update({key: plain_value(value) for key, value in group.items()}, **{HEADER: header})
    return state_dict


def checked_entry(
    caller: str,
    group: ReadGroup,
    name: str,
    param: Tensor,
    entry: SavedState,
    saved_plan: Callable[[], Plan] | None = None,
) -> tuple[Plan | None, StateDict, StateDict]:
    """Return the plan of a parameter with state, its own state, and its foreign entries.

    Args:
        caller: the name in messages.
        group: the group of the parameter.
        name: its leaf name.
        param: the parameter.
        entry: its state, from a state dict or the optimizer.
        saved_plan: a function that makes the plan with saved dtypes, or None for the current state.

    Raises:
        TypeError: if the state has a wrong type.
        ValueError: if the state does not fit the parameter.
    """
    way_out = _IN_PLACE if saved_plan is None else ""
    others = others_of(entry, group.choices.chain)
    check_others(caller, name, param, others, way_out)
    own = without(entry, others)
    if not own:
        return None, own, others
    plan = group.plan(name, param)
    own = from_bytes(own, {key: spec.dtype for key, spec in plan.arrays.items()})
    saved = plan if saved_plan is None else saved_plan()
    check_saved_state(caller, name, param, plan.arrays, saved.arrays, own, way_out)
    return plan, own, others


class _Checked(NamedTuple):
    """The checked states of a state dict, by parameter.

    Attributes:
        plans: the plan of each parameter.
        states: placements and arrays.
        others: entries that belong to no moment.
        steps: group and count of each parameter.
    """

    plans: dict[Tensor, Plan]
    states: dict[Tensor, tuple[dict[str, tuple | None], SavedState]]
    others: dict[Tensor, StateDict]
    steps: list[tuple[int, int]]


def _checked_states(
    optimizer: StateOwner,
    state_dict: SavedState,
    saved_groups: Sequence[Group],
    ids: Sequence[Ids],
) -> _Checked:
    """Check the state of every parameter. Nothing of the optimizer is changed."""
    checked, group_of = _Checked({}, {}, {}, []), functools.cache(optimizer._group)
    for i, name, param in optimizer._named():
        entry = state_dict["state"].get(ids[i][name])
        if not entry:
            continue
        saved_plan = functools.partial(_saved_plan, optimizer, i, saved_groups[i], name, param)
        plan, saved, checked.others[param] = checked_entry(
            "load_state_dict", group_of(i), name, param, entry, saved_plan
        )
        if plan is not None:
            checked.plans[param] = plan
            placements = state_placements(plan, param)
            checked.states[param] = {key: placements.get(key) for key in plan.arrays}, saved
            checked.steps.append((i, max(int(saved["step"]), 1)))
    return checked


def load(
    optimizer: StateOwner, state_dict: SavedState, set_rest: Callable[[], object] = lambda: None
) -> None:
    """Restore from a state dict, as `Optimizer.load_state_dict` does.

    `set_rest` sets other parts of the run, such as weights. If it fails, the load failed while it copied.
    """
    state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
    for hook in _hooks(optimizer, "_optimizer_load_state_dict_pre_hooks"):
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    saved_groups, ids, seeds = read_groups(state_dict, headers_of(optimizer))
    check_counts(state_dict, ids)
    known = {key for of_group in ids for key in of_group.values()}
    of_no_parameter = {key: copy.deepcopy(x) for key, x in state_dict["state"].items() if key not in known}
    checked = _checked_states(optimizer, state_dict, saved_groups, ids)
    show_rates = shown_rates(optimizer, checked.steps)
    groups = [
        load_group(group, saved, choices.options, choices.schedule is not None)
        for group, saved, choices in zip(
            optimizer.param_groups, saved_groups, optimizer._choices, strict=True
        )
    ]
    was_half, optimizer._half_loaded = optimizer._half_loaded, "the last load"
    try:
        replace_groups(
            optimizer.param_groups, groups, lambda: [optimizer._group(i).values for i in range(len(groups))]
        )
    except BaseException:  # the groups are unchanged
        optimizer._half_loaded = was_half
        raise
    for choices, chain_seeds, group in zip(optimizer._choices, seeds, optimizer.param_groups, strict=True):
        choices.chain = choices.chain.with_seeds(chain_seeds)
        group[HEADER] = choices.chain.header()
    for show_rate in show_rates:
        show_rate()
    optimizer.drop_launches("a state dict was loaded")
    optimizer._by_param.clear()
    load_states(
        optimizer.state,
        checked.states,
        lambda param, state: optimizer._home.placed(param, checked.plans[param], state),
    )
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("capturable") else ():
            if param in checked.states:
                count_on_device(param, optimizer.state[param])
    for param, kept in checked.others.items():
        if kept:
            optimizer.state[param] |= copied(kept, param.device)
    optimizer.state.update(of_no_parameter)
    set_rest()
    optimizer._half_loaded = None
    for hook in _hooks(optimizer, "_optimizer_load_state_dict_post_hooks"):
        hook(optimizer)


def _saved_plan(optimizer: StateOwner, i: int, saved: Group, name: str, param: Tensor) -> Plan:
    """Return the plan of a parameter with the dtypes of its saved group and the options here."""
    try:
        return optimizer._group(i, saved).plan(name, param)
    except (TypeError, ValueError) as error:
        dtypes = ", ".join(f"{key}={value}" for key, value in saved.items() if key.endswith("_dtype"))
        raise ValueError(
            f"load_state_dict: param group {i} of the state dict has {dtypes}, which this optimizer's "
            f"options refuse. {OTHER_FORMATS}"
        ) from error


def _hooks(optimizer: StateOwner, name: str) -> list[Callable]:
    """Return the hooks that torch keeps under a name."""
    if not hasattr(optimizer, name):
        say_once(f"{optimizer._name}: torch keeps no {name} any more: hooks of load_state_dict do not run.")
    return list(getattr(optimizer, name, {}).values())


def headers_of(optimizer: StateOwner) -> list[Group]:
    """Return the header of every param group."""
    names: list[list[str]] = [[] for _ in optimizer.param_groups]
    counts: list[set[int]] = [set() for _ in optimizer.param_groups]
    for i, name, param in optimizer._named():
        names[i].append(name)
        if "step" in (state := optimizer.state.get(param, {})):
            counts[i].add(int(state["step"]))
    rows = zip((choices.chain for choices in optimizer._choices), names, counts, strict=True)
    return [chain.header(leaves, sorted(of_group)) for chain, leaves, of_group in rows]


def may_make_state(optimizer: StateOwner) -> bool:
    """Whether torch.distributed.checkpoint may be calling this step to make state.

    Its call has learning rates and gradients of 0. Such a step changes no weight and is not counted.
    """
    if optimizer.state:
        return False
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    rates = [group.get("lr") for group in optimizer.param_groups]
    # A rate on meta has no number, and the step raises an error with its name.
    at_zero = all(
        rate is not None and not getattr(rate, "is_meta", False) and float(rate) == 0 for rate in rates
    )
    return at_zero and all(param.grad is not None for param in params)
