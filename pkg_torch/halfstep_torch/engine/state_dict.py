"""What a state dict of an `Optimizer` holds, and what one must hold to be loaded.

torch's own loader casts every state array to the dtype of its parameter. This one keeps every bit and dtype,
and loads nothing that would go on with other numbers: another chain, other names, shapes or formats are
refused, before anything is changed. Numbers of the param groups (`lr`, `betas`, ...) and seeds are taken from
the state dict, as torch takes them; how state is stored (`mu_dtype`, `nu_dtype`) is not a number, and must
agree.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.chain import Chain
from halfstep_torch.engine.leaves import check_scale_bytes
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.state_array import StateArray

SPEC_VERSION = 1
LAST_STEP = 2**31 - 1
"""Where the count stops (contract W5)."""

# The entry of each saved param group that holds what torch's own format has no place for.
_HEADER = "halfstep"


def make_header(chain: Chain, names: Sequence[str]) -> dict[str, Any]:
    """Return what a saved group says besides its values; plain types, so that `weights_only=True` loads it.

    Args:
        chain: the transform.
        names: leaf names of the group's parameters.
    """
    links = [link.name for link in chain.links]
    return {
        "spec_version": SPEC_VERSION,
        "links": links,
        "seeds": [link.seed for link in chain.links],
        "names": list(names),
    }


def add_headers(state_dict: dict[str, Any], headers: Sequence[dict[str, Any]]) -> None:
    """Write a header into every saved group."""
    for group, header in zip(state_dict["param_groups"], headers, strict=True):
        group[_HEADER] = header


def describe_formats(state_dict: dict[str, Any]) -> None:
    """Write formats as plain types, so that `weights_only=True` loads them."""
    for group in state_dict["param_groups"]:
        for key, value in group.items():
            if isinstance(value, Format):
                group[key] = value.description


def read_groups(
    state_dict: Mapping[str, Any], headers: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[Any]]:
    """Return copies of the saved param groups, without headers; ids of the state by leaf name; and the seeds.

    Args:
        state_dict: what is to be loaded.
        headers: what this optimizer would write.

    Raises:
        TypeError: if it is no optimizer's state dict.
        ValueError: if its headers and this optimizer's do not agree.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise TypeError(
            "load_state_dict: the argument is not a state dict with 'state' and 'param_groups'. "
            "Pass what state_dict() returned."
        )
    groups = copy.deepcopy(list(state_dict["param_groups"]))
    if len(groups) != len(headers):
        raise ValueError(
            f"load_state_dict: the state dict has {len(groups)} param groups, this optimizer "
            f"{len(headers)}. Build it with the groups of the run that was saved."
        )
    ids: list[dict[str, Any]] = []
    seeds: list[Any] = []
    for i, (group, mine) in enumerate(zip(groups, headers, strict=True)):
        saved = group.pop(_HEADER, None)
        if saved is None:
            raise ValueError(
                f"load_state_dict: param group {i} was not written by halfstep_torch: it has no {_HEADER!r} "
                "entry. Pass a state dict of the same optimizer class."
            )
        _compare(saved, mine, i)
        ids.append(dict(zip(saved["names"], group["params"], strict=True)))
        seeds = saved["seeds"]
    return groups, ids, seeds


def _compare(saved: Mapping[str, Any], mine: Mapping[str, Any], group: int) -> None:
    if saved["spec_version"] != mine["spec_version"]:
        raise ValueError(
            f"load_state_dict: the state dict follows version {saved['spec_version']} of the spec, this "
            f"package version {mine['spec_version']}. Load it with the halfstep that wrote it."
        )
    if saved["links"] != mine["links"]:
        raise ValueError(
            f"load_state_dict: the state dict is of the chain {', '.join(saved['links'])}, this optimizer of "
            f"{', '.join(mine['links'])}. Build the chain of the run that was saved."
        )
    if len(saved["names"]) != len(mine["names"]):
        raise ValueError(
            f"load_state_dict: param group {group} has {len(saved['names'])} parameters in the state dict, "
            f"{len(mine['names'])} here. Build the optimizer with the parameters of the run that was saved."
        )
    for name in mine["names"]:
        if name not in saved["names"]:
            raise ValueError(
                f"load_state_dict: parameter {name!r} is not in group {group} of the state dict, and names "
                "decide the random words. Pass the parameters with the names of the run that was saved."
            )


def load_group(group: Mapping[str, Any], saved: Mapping[str, Any], scheduled: bool) -> dict[str, Any]:
    """Return a group's entries after loading: the saved value where there is one.

    Args:
        group: of this optimizer.
        saved: of the state dict, without its header.
        scheduled: whether this group's lr is a function of the step, kept outside it.
    """
    entries = {**group, **saved, "params": group["params"]}
    for key in group:
        # Formats are compared array by array, names by their leaf names: both stay as they are here.
        if key.endswith("_dtype") or key == "param_names":
            entries[key] = group[key]
    if scheduled:
        entries.pop("lr", None)
    return entries


def replace_groups(
    groups: Sequence[dict[str, Any]], entries: Sequence[dict[str, Any]], check: Callable[[], object]
) -> None:
    """Replace the entries of param groups, unless `check` then raises.

    Args:
        groups: of an optimizer; the dicts stay the same objects.
        entries: what they are to hold.
        check: raises if the groups hold what they must not.
    """
    before = [dict(group) for group in groups]
    try:
        for group, new in zip(groups, entries, strict=True):
            group.clear()
            group.update(new)
        check()
    except Exception:
        for group, old in zip(groups, before, strict=True):
            group.clear()
            group.update(old)
        raise


def load_state(
    name: str,
    param: Tensor,
    arrays: Mapping[str, StateArray],
    saved_arrays: Mapping[str, StateArray],
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state of one parameter: copies of the saved arrays, in their own dtypes, on its device.

    Args:
        name: of the parameter.
        param: the weights.
        arrays: what this optimizer keeps for it.
        saved_arrays: what it would keep with the dtypes that the saved groups name.
        saved: its entry of the state dict.

    Raises:
        ValueError: if the arrays are not those that this optimizer would keep.
    """
    if set(saved) != {"step", *arrays}:
        raise ValueError(
            f"load_state_dict: the state of {name!r} holds {', '.join(sorted(saved))}; this optimizer keeps "
            f"{', '.join(sorted(['step', *arrays]))}. Build the chain of the run that was saved."
        )
    step = int(saved["step"])
    if not 0 <= step <= LAST_STEP:
        raise ValueError(
            f"load_state_dict: the step of {name!r} is {step}, outside [0, 2^31 - 1]. "
            "Load the state of a run."
        )
    state: dict[str, Any] = {"step": torch.tensor(step, dtype=torch.int64, device="cpu")}
    for key, spec in arrays.items():
        array = saved[key]
        if hasattr(array, "__tensor_flatten__"):
            raise TypeError(
                f"load_state_dict: {key} of {name!r} is a {type(array).__name__}. Pass plain dense tensors."
            )
        if array.dtype != spec.dtype:
            raise ValueError(
                f"load_state_dict: {key} of {name!r} is {dtype_name(array.dtype)} in the state dict, "
                f"{dtype_name(spec.dtype)} here. "
                "Build the optimizer with the dtypes of the run that was saved."
            )
        theirs, ours = saved_arrays.get(key, spec).scale_of, spec.scale_of
        if theirs != ours and theirs and ours:
            raise ValueError(
                f"load_state_dict: {key} of {name!r} is of {theirs.name} in blocks of {theirs.block_size} in "
                f"the state dict, of {ours.name} in blocks of {ours.block_size} here. "
                "Build the optimizer with the dtypes of the run that was saved."
            )
        if array.shape != spec.shape(param.shape):
            raise ValueError(
                f"load_state_dict: {key} of {name!r} has shape {tuple(array.shape)} in the state dict, "
                f"{spec.shape(param.shape)} here. Build the model of the run that was saved."
            )
        check_scale_bytes("load_state_dict", name, key, spec, array)
        state[key] = array.detach().to(param.device, copy=True, memory_format=torch.contiguous_format)
    return state
