"""The split of `Muon`: each param group's parameters for Muon, and for AdamW."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from halfstep.rules.muon import MatrixAxes
from halfstep.rules.muon_split import MatrixChoice, announce, split, split_some
from halfstep_torch.leaves.checks import check_params
from halfstep_torch.leaves.found_names import with_names_found
from halfstep_torch.leaves.group_names import Group, parameter_names
from halfstep_torch.leaves.names import leaf_names

OUTPUT_AXIS = 0
AxesOf = dict[str, MatrixAxes | None]
"""Axes of a parameter's matrices by leaf name, or None if AdamW steps it."""


def muon_groups(params: Iterable, matrices: MatrixChoice = None) -> list[Group]:
    """Return param groups for Muon and for AdamW, and print the split once.

    Args:
        params: pairs (name, parameter).
        matrices: as in `Muon`.

    Raises:
        TypeError: if `matrices` is neither a function nor a mapping, or gives a wrong type.
        ValueError: if a pattern in `matrices` matches nothing, or Muon gets no parameter.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8))
        >>> groups = muon_groups(model.named_parameters())
        >>> groups[1]["weight_decay"] = 0.0  # for AdamW
        >>> optimizer = hs.Muon(groups, lr=0.02)

    Source: ours.
    """
    groups, axes = split_groups("muon_groups", params, matrices, None)
    made: list[Group] = []
    for group in groups:
        made += [group] if group.get("use_muon") is not None else _split_by_axes(group, axes)
    return made


def split_groups(
    caller: str, params: Iterable, matrices: MatrixChoice, names: list | None
) -> tuple[list[Group], AxesOf]:
    """Return param groups, with names unless `use_muon` decides, and the axes for these names."""
    params = check_params(caller, params)
    listed = list(with_names_found(caller, params) if names is None else params)
    given = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    given = [{**group, "params": _listed(group)} for group in given]
    for group in given:
        check_use_muon(caller, group)
    name_of = parameter_names(caller, names) or {}
    undecided = [group for group in given if group.get("use_muon") is None]
    for group in undecided:
        group["params"] = _named(caller, name_of, group)
    pairs = [pair for group in undecided for pair in group["params"]]
    if not pairs:
        return given, {}
    named = list(zip(leaf_names([name for name, _ in pairs]), [param for _, param in pairs], strict=True))
    twice = _tied(names or ())
    tied = [leaf for leaf, param in named if id(param) in twice]
    choices = split(caller, named, matrices, OUTPUT_AXIS, tied)
    announce(caller, choices)
    return given, {choice.name: choice.axes for choice in choices}


def check_use_muon(caller: str, group: Group) -> None:
    """Raise TypeError unless a param group's `use_muon` is True, False or None."""
    if not isinstance(group.get("use_muon"), bool | None):
        raise TypeError(
            f"{caller}: use_muon={group['use_muon']!r} in a param group is neither True (Muon) nor False "
            "(AdamW). Use False, or leave it out, so that names and axes decide."
        )


def _split_by_axes(group: Group, axes: AxesOf) -> list[Group]:
    """Return the groups into which a group is split: one for each kind of matrix, then one for AdamW."""
    by_axes: dict[MatrixAxes | None, list] = {}
    leaves = leaf_names([name for name, _ in group["params"]])
    for leaf, pair in zip(leaves, group["params"], strict=True):
        by_axes.setdefault(axes[leaf], []).append(pair)
    made = []
    for kind, params in sorted(by_axes.items(), key=lambda item: item[0] is None):
        chosen: Group = {"params": params, "use_muon": kind is not None}
        if kind is not None and tuple(kind) != (1 - OUTPUT_AXIS, OUTPUT_AXIS):
            chosen |= kind._asdict()
        made.append({**group, **chosen})
    return made


def split_new(caller: str, group: Group, names: Mapping, axes: AxesOf, patterns: MatrixChoice) -> Group:
    """Return a new param group with names, and add its new parameters to `axes`."""
    if names or "param_names" in group:
        params = _named(caller, names, {**group, "params": _listed(group)})
    else:
        [found] = with_names_found(caller, [group])
        params = _named(caller, names, found)
    leaves = zip(leaf_names([name for name, _ in params]), params, strict=True)
    new = [(leaf, param) for leaf, (_, param) in leaves if leaf not in axes]
    if new:
        choices = split_some(caller, new, patterns, OUTPUT_AXIS)
        announce(caller, choices)
        axes |= {choice.name: choice.axes for choice in choices}
    return {**group, "params": params}


def _listed(group: Group) -> list:
    given = group["params"]
    return [given] if isinstance(given, Tensor) else list(given)


def _named(caller: str, name_of: Mapping, group: Group) -> list[tuple[str, Tensor]]:
    """Return a group's parameters with their names. Raise ValueError if one has no name."""
    params = group["params"]
    if len(group.get("param_names", ())) == len(params):
        bare = [x[1] if isinstance(x, tuple) else x for x in params]
        return list(zip(group["param_names"], bare, strict=True))
    for x in params:
        if not isinstance(x, tuple) and x not in name_of:
            raise ValueError(
                f"{caller}: a parameter of shape {tuple(x.shape)} has no name, and names tell embeddings and "
                "heads from hidden matrices. Pass model.named_parameters(), or groups that say use_muon=True "
                "or False. Where a trainer builds the optimizer, call halfstep_torch.register_names(model) "
                "before, or give it names=list(model.named_parameters()) as an argument."
            )
    return [x if isinstance(x, tuple) else (name_of[x], x) for x in params]


def _tied(names: Iterable) -> set[int]:
    """Return the parameters with two names."""
    seen: set[int] = set()
    return {id(param) for _, param in names if id(param) in seen or seen.add(id(param))}
