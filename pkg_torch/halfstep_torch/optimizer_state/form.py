"""Checks of a state dict's form: mappings, lists and numbers.

A file may come from another program, or be truncated or edited. An error names the place in the state dict
and is raised before anything is changed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from halfstep_torch.leaves.checks import LAST_STEP
from halfstep_torch.numbers.seeds import LinkSeed, as_seed

SavedState: TypeAlias = Mapping[str, Any]
"""State dict, or an entry or a group in it, before its form is checked."""
_DAMAGED = "The file is damaged: load another."


def check_form(
    caller: str, state_dict: SavedState, way_out: str = "Pass what state_dict() returned."
) -> None:
    """Raise TypeError unless groups and states are placed as in a state dict of `torch.optim`."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise TypeError(
            f"{caller}: the argument is not a state dict with 'state' and 'param_groups'. {way_out}"
        )
    state, groups = state_dict["state"], state_dict["param_groups"]
    parts = [("'state'", state, Mapping), ("'param_groups'", groups, Sequence)]
    if isinstance(groups, Sequence):
        parts += [(f"param group {i}", group, Mapping) for i, group in enumerate(groups)]
        mappings = [(i, group) for i, group in enumerate(groups) if isinstance(group, Mapping)]
        parts += [(f"'params' of group {i}", group.get("params"), Sequence) for i, group in mappings]
    for what, x, kind in parts:
        _check_kind(caller, what, x, kind, way_out)
    for i, group in enumerate(groups):
        for key in group["params"]:
            if not isinstance(key, (int, str)):
                raise TypeError(
                    f"{caller}: a parameter of group {i} is a {type(key).__name__}, not a number or a name. "
                    f"{way_out}"
                )
            if (entry := state.get(key)) is not None:
                _check_kind(caller, f"the state of {key}", entry, Mapping, way_out)


def check_group_counts(caller: str, saved: int, here: int) -> None:
    """Raise ValueError if the number of param groups differs."""
    if saved != here:
        raise ValueError(
            f"{caller}: the state dict has {saved} param groups, this optimizer {here}. "
            "Build it with the groups of the run that was saved."
        )


def check_parameter_counts(caller: str, group: int, saved: int, here: int) -> None:
    """Raise ValueError if the number of parameters in a group differs."""
    if saved != here:
        raise ValueError(
            f"{caller}: param group {group} has {saved} parameters in the state dict, {here} here. "
            "Build the optimizer with the parameters of the run that was saved."
        )


def check_header(caller: str, group: int, header: SavedState) -> None:
    """Raise TypeError or ValueError unless a group's header has the form written by `state_dict`."""
    _check_kind(caller, f"'halfstep' of group {group}", header, Mapping, _DAMAGED)
    for name, kind in (("spec_version", int), ("links", Sequence), ("seeds", Sequence)):
        _check_kind(caller, f"{name!r} in 'halfstep' of group {group}", header.get(name), kind, _DAMAGED)
    counts = header.get("counts", "")
    _check_kind(caller, f"'counts' in 'halfstep' of group {group}", counts, str, _DAMAGED)
    if not all(map(str.isdecimal, counts.split())):
        raise ValueError(f"{caller}: 'counts' in 'halfstep' of group {group} are {counts!r}. {_DAMAGED}")
    for name in ("links", *(["names"] if "names" in header else [])):
        _check_kind(caller, f"{name!r} in 'halfstep' of group {group}", header[name], Sequence, _DAMAGED)
        for text in header[name]:
            _check_kind(caller, f"one of {name!r} in 'halfstep' of group {group}", text, str, _DAMAGED)


def check_seeds(caller: str, group: int, saved: LinkSeed, expected: LinkSeed) -> None:
    """Raise TypeError or ValueError unless the saved seeds match this optimizer's in form.

    The list `expected` has numbers, None, and pairs for a link that wraps another.
    """
    if not isinstance(expected, (tuple, list)):
        if expected is not None:
            as_seed(caller, saved)
        return
    _check_kind(caller, f"one of 'seeds' in 'halfstep' of group {group}", saved, Sequence, _DAMAGED)
    if len(saved) != len(expected):
        raise ValueError(
            f"{caller}: param group {group} has {len(saved)} seeds in the state dict, {len(expected)} here. "
            f"{_DAMAGED}"
        )
    for saved_seeds, expected_seeds in zip(saved, expected, strict=True):
        check_seeds(caller, group, saved_seeds, expected_seeds)


def saved_step(caller: str, name: str, value: object) -> int:
    """Return a parameter's saved step count, from a number or a tensor with one number. Otherwise raise."""
    if isinstance(value, Tensor) and value.is_meta:
        raise ValueError(
            f"{caller}: the step of {name!r} is on the device meta, without a number. Load the file without "
            "map_location='meta'."
        )
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float)):
        raise TypeError(
            f"{caller}: the step of {name!r} is a {type(value).__name__}. Load the state of a run."
        )
    if not (0 <= value <= LAST_STEP and value == int(value)):
        raise ValueError(
            f"{caller}: the step of {name!r} is {value}, no whole number in [0, 2^31 - 1]. "
            "Load the state of a run."
        )
    return int(value)


def _check_kind(caller: str, what: str, x: object, kind: type, way_out: str) -> None:
    if not isinstance(x, kind) or (isinstance(x, str) and kind is not str):
        wanted = {Mapping: "a dict", Sequence: "a list", int: "an integer", str: "a string"}[kind]
        raise TypeError(f"{caller}: {what} is a {type(x).__name__}, not {wanted}. {way_out}")
