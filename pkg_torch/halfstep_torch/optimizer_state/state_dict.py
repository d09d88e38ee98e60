"""Reading a state dict of an `Optimizer`, with all checks.

torch's own loader casts every state array to the dtype of its parameter. This one keeps every bit and dtype.
It raises an error if the chain, names, shapes or formats differ, before anything is changed, because the run
would otherwise resume with other numbers. Numbers of the param groups (`lr`, `betas`, ...) and seeds come
from the state dict, as in torch. Formats of state (`mu_dtype`, `nu_dtype`) must agree.
"""

import copy
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from halfstep.checkpoint.header import check_spec_version
from halfstep_torch.distributed.placement import placed_copy
from halfstep_torch.distributed.shards import is_sharded, local_part
from halfstep_torch.leaves.checks import check_scale_bytes
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.leaves.names import leaf_names
from halfstep_torch.links.chain import HEADER
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.seeds import LinkSeed
from halfstep_torch.optimizer_state.form import (
    SavedState,
    check_form,
    check_group_counts,
    check_header,
    check_parameter_counts,
    check_seeds,
    saved_step,
)
from halfstep_torch.optimizer_state.others_state import may_be_parameter
from halfstep_torch.say_once import say_once
from halfstep_torch.storage.state_array import StateArray
from halfstep_torch.storage.stored_moment import State

Ids = dict[str, int | str]
"""Ids in a state dict for the parameters of a group, by leaf name."""
OTHER_FORMATS = (
    "Build the optimizer with the recipe and the dtypes of the run that was saved, or move its "
    "float32_state_dict here by load_float32_state_dict."
)


def check_counts(state_dict: SavedState, ids: Sequence[Ids]) -> None:
    """Raise ValueError if the counts in a header and in the state differ, as after a cast of the file."""
    for i, (group, of_group) in enumerate(zip(state_dict["param_groups"], ids, strict=True)):
        entries = [(name, state_dict["state"].get(key)) for name, key in of_group.items()]
        kept = {
            saved_step("load_state_dict", name, entry["step"])
            for name, entry in entries
            if entry and "step" in entry
        }
        header = group[HEADER]
        counts = set(map(int, header.get("counts", "").split()))
        # A part of a group has only some of its counts.
        in_part = len(header.get("names", ())) > len(of_group)
        strange = sorted(kept - counts if in_part and counts else counts - kept)
        if kept and strange:
            raise ValueError(
                f"load_state_dict: param group {i} has the steps {sorted(counts)} in its header, and in its "
                f"state {sorted(kept)}: whoever wrote the file has cast its tensors. Save them as they are."
            )


def read_groups(
    state_dict: SavedState, headers: Sequence[Group]
) -> tuple[list[Group], list[Ids], list[LinkSeed]]:
    """Return copies of the saved param groups without headers, their ids by leaf name, and their seeds."""
    check_form("load_state_dict", state_dict)
    groups = copy.deepcopy(list(state_dict["param_groups"]))
    check_group_counts("load_state_dict", len(groups), len(headers))
    ids, seeds, before = [], [], [0, 0]
    for i, (group, expected) in enumerate(zip(groups, headers, strict=True)):
        saved = group.pop(HEADER, None)
        if saved is None:
            raise ValueError(
                f"load_state_dict: param group {i} was not written by halfstep_torch: it has no {HEADER!r} "
                "entry. Pass a state dict of the same optimizer class, or pass torch's own to "
                "load_float32_state_dict."
            )
        check_header("load_state_dict", i, saved)
        names = _saved_names(group, saved, before[0], expected["names"])
        _compare(saved, expected, i, len(names))
        if len(names) != len(group["params"]):
            raise ValueError(
                f"load_state_dict: param group {i} has {len(names)} names and {len(group['params'])} "
                "parameters in the state dict. The file is damaged: load another."
            )
        ids.append(_match(names, expected["names"], group["params"], i, before))
        before = [before[0] + len(group["params"]), before[1] + len(expected["names"])]
        seeds.append(saved["seeds"])
    known = {key for group_ids in ids for key in group_ids.values()}
    strangers = [key for key in state_dict["state"] if key not in known and may_be_parameter(key, known)]
    if strangers:
        raise ValueError(
            f"load_state_dict: the state dict holds state of {min(map(str, strangers))}, which is no "
            "parameter of its groups. Pass what state_dict() returned."
        )
    return groups, ids, seeds


def _compare(saved: SavedState, expected: Group, group: int, count: int) -> None:
    check_spec_version("load_state_dict", "state dict", saved["spec_version"])
    if saved["links"] != expected["links"]:
        raise ValueError(
            f"load_state_dict: the state dict is of the chain {', '.join(saved['links'])}, this optimizer of "
            f"{', '.join(expected['links'])}. Build the chain of the run that was saved, or move its "
            "float32_state_dict here by load_float32_state_dict."
        )
    check_seeds("load_state_dict", group, saved["seeds"], expected["seeds"])
    check_parameter_counts("load_state_dict", group, count, len(expected["names"]))


def _saved_names(group: Group, header: SavedState, before: int, names: Sequence[str]) -> list[str]:
    """Return the leaf names of a saved group, in the order of its parameters.

    `names` are the names in this optimizer's group. torch.distributed.checkpoint uses names as ids, sorts
    them in this optimizer's order, and may write a header without names. If a trainer keeps a group's entries
    by parameter and splits the group, each part has the header of the whole.
    """
    ids = group["params"]
    if ids and all(isinstance(name, str) for name in ids):
        return leaf_names(ids)
    if "names" in header:
        is_part = len(ids) == len(names) < len(header["names"]) and set(names) <= set(header["names"])
        return list(names if is_part else header["names"])
    # ZeroRedundancyOptimizer writes the names of one process's share beside all processes' parameters.
    if len(group.get("param_names", ())) == len(ids):
        return leaf_names(group["param_names"])
    return _places(before, len(ids))


def _places(before: int, count: int) -> list[str]:
    """Return the names of nameless parameters, numbered after earlier ones (contract W7)."""
    return [str(before + k) for k in range(count)]


def _match(
    saved: Sequence[str], names: Sequence[str], ids: Sequence[int | str], group: int, before: Sequence[int]
) -> Ids:
    """Return the ids of a saved group by this optimizer's parameter names."""
    if sorted(saved) == sorted(names):
        return dict(zip(saved, ids, strict=True))
    unnamed = list(saved) == _places(before[0], len(saved)) or list(names) == _places(before[1], len(names))
    if unnamed or all(isinstance(name, str) for name in ids):
        say_once(
            "load_state_dict: parameters have names on one side alone, and are matched by their place. Names "
            "decide the random words, so the run continues with other words. Use the same names on both "
            "sides."
        )
        return dict(zip(names, ids, strict=True))
    name = next(name for name in names if name not in saved)
    raise ValueError(
        f"load_state_dict: parameter {name!r} is not in group {group} of the state dict, and names "
        "decide the random words. Pass the parameters with the names of the run that was saved. "
        "register_names(model), with prefix= if needed, sets them where none are passed."
    )


def load_group(group: Group, saved: SavedState, options: Collection[str], scheduled: bool) -> Group:
    """Return a group's entries after loading, with saved values if there are any.

    `options` are the entries that select the group's chain. `scheduled` is whether its lr is a function of
    the step.
    """
    entries = {**group, **saved, "params": group["params"]}
    for key in {*saved, *group}:
        # These entries are kept: arrays check the formats, links the options, and leaf names the names.
        if key.endswith("_dtype") or key in options or key == "param_names":
            entries.pop(key, None)
            entries.update({key: group[key]} if key in group else {})
    if scheduled:
        entries["lr"] = group["lr"]
    if entries.get("capturable") and group["params"]:
        device = group["params"][0].device
        entries |= {key: _there(group.get(key), x, device) for key, x in entries.items() if key != "params"}
    return entries


def _there(before: object, saved: object, device: torch.device) -> object:
    """Return a number of a capturable group, as a tensor on the device if it is or was saved as one."""
    if isinstance(before, Tensor) and isinstance(saved, (int, float)):
        return torch.full_like(before, saved, device=device)
    if type(saved) is tuple:
        several = before if type(before) is tuple and len(before) == len(saved) else (None,) * len(saved)
        return tuple(_there(x, y, device) for x, y in zip(several, saved, strict=True))
    return saved.to(device) if isinstance(saved, Tensor) else saved


def replace_groups(groups: Sequence[Group], entries: Sequence[Group], check: Callable[[], object]) -> None:
    """Replace the entries of param groups in place, and undo it if `check` raises."""
    before = [dict(group) for group in groups]
    try:
        for group, new in zip(groups, entries, strict=True):
            group.clear()
            group.update(new)
        check()
    except BaseException:
        for group, old in zip(groups, before, strict=True):
            group.clear()
            group.update(old)
        raise


def check_saved_state(
    caller: str,
    name: str,
    param: Tensor,
    arrays: Mapping[str, StateArray],
    saved_arrays: Mapping[str, StateArray],
    saved: SavedState,
    way_out: str = "",
) -> None:
    """Raise TypeError or ValueError unless a saved state fits this optimizer.

    `arrays` are its state arrays for the parameter, and `saved_arrays` the same with the saved groups'
    dtypes. `way_out` is the end of messages about a state that is not from a file.
    """
    if set(saved) != {"step", *arrays}:
        raise ValueError(
            f"{caller}: the state of {name!r} holds {', '.join(sorted(saved))}; this optimizer keeps "
            f"{', '.join(sorted(['step', *arrays]))}. {way_out or OTHER_FORMATS}"
        )
    saved_step(caller, name, saved["step"])
    for key, spec in arrays.items():
        array, what = saved[key], f"{caller}: {key} of {name!r}"
        if not isinstance(array, Tensor) or (hasattr(array, "__tensor_flatten__") and not is_sharded(array)):
            raise TypeError(f"{what} is a {type(array).__name__}. {way_out or 'Pass plain dense tensors.'}")
        here = local_part(array)
        if here.layout != torch.strided or (here.is_meta and not param.is_meta):
            cure = way_out or "Pass dense arrays with numbers: load the file without map_location='meta'."
            raise ValueError(f"{what} is {here.layout} on {here.device}. {cure}")
        if array.dtype != spec.dtype:
            raise ValueError(
                f"{what} is {dtype_name(array.dtype)} in the state dict, {dtype_name(spec.dtype)} here. "
                f"{way_out or OTHER_FORMATS}"
            )
        of_saved = saved_arrays.get(key, spec)
        saved_format, fmt = of_saved.scale_of or of_saved.codes_of, spec.scale_of or spec.codes_of
        if saved_format and fmt and saved_format.label != fmt.label:
            raise ValueError(
                f"{what} is of {saved_format.text} in the state dict, of {fmt.text} here. {OTHER_FORMATS}"
            )
        if array.shape != spec.shape(param.shape):
            cure = (
                "Build the model of the run that was saved, and the optimizer with its recipe, dtypes and "
                "param_storage."
            )
            raise ValueError(
                f"{what} has shape {tuple(array.shape)} in the state dict, {spec.shape(param.shape)} here. "
                f"{way_out or cure}"
            )
        check_scale_bytes(caller, name, key, spec, here, way_out or "The file is damaged: load another.")


def load_states(
    states: MutableMapping[Tensor, State],
    saved: Mapping[Tensor, tuple[Mapping[str, tuple | None], SavedState]],
    home: Callable[[Tensor, State], State],
) -> None:
    """Copy saved arrays in their dtypes to an optimizer's state, freeing old arrays one by one.

    So old and new state are not in memory at the same time. For each parameter, `saved` has a placement for
    each array (`placed_copy`) and the saved state. `home` moves a parameter's state to its device.
    """
    for param in [param for param in states if param not in saved]:
        del states[param]
    for param, (placements, entry) in saved.items():
        states.pop(param, None)  # frees its memory before new memory is allocated
        state: State = {"step": torch.tensor(int(entry["step"]), dtype=torch.int64, device="cpu")}
        for key, where in placements.items():
            state[key] = placed_copy(entry[key], param, where)
        states[param] = home(param, state)
