"""The param groups of `Muon`: which parameters it steps, and which are left to AdamW."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from halfstep.rules.muon import MatrixAxes
from halfstep.rules.muon_split import MatrixChoice, announce, split
from halfstep_torch.leaves.checks import check_params
from halfstep_torch.leaves.found_names import with_names_found
from halfstep_torch.leaves.group_names import Group, parameter_names
from halfstep_torch.leaves.names import leaf_names
from halfstep_torch.say_once import say_once

OUTPUT_AXIS = 0


def muon_groups(params: Iterable, matrices: MatrixChoice = None) -> list[dict]:
    """Return the param groups by which `Muon` splits named parameters, and print the split once.

    Args:
        params: pairs (name, parameter).
        matrices: as in `Muon`.

    Raises:
        TypeError: if `matrices` is neither a function nor a mapping, or gives something else.
        ValueError: if a pattern of it matches nothing, or nothing is left to Muon.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8))
        >>> groups = muon_groups(model.named_parameters())
        >>> groups[1]["weight_decay"] = 0.0  # of what AdamW steps
        >>> optimizer = hs.Muon(groups, lr=0.02)

    Source: ours.
    """
    return split_groups("muon_groups", params, matrices, None)


def split_groups(caller: str, params: Iterable, matrices: MatrixChoice, names: list | None) -> list[dict]:
    """Return groups that all have `use_muon`: a group without it is split."""
    params = check_params(caller, params)
    listed = list(with_names_found(caller, params) if names is None else params)
    given = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    given = [{**g, "params": [x] if isinstance(x := g["params"], Tensor) else list(x)} for g in given]
    for group in given:
        if not isinstance(group.get("use_muon", True), bool):
            raise TypeError(
                f"{caller}: use_muon={group['use_muon']!r} in a param group is neither True (Muon) nor False "
                "(AdamW). Use False, or leave it out, so that names and axes decide."
            )
    name_of = parameter_names(caller, names) or {}
    pairs = [
        _named(caller, name_of, x) for group in given if "use_muon" not in group for x in group["params"]
    ]
    if not pairs:
        return given
    named = list(zip(leaf_names([name for name, _ in pairs]), [param for _, param in pairs], strict=True))
    twice = _tied(names or ())
    tied = [leaf for leaf, param in named if id(param) in twice]
    choices = split(caller, named, matrices, OUTPUT_AXIS, tied)
    announce(caller, choices)
    axes = {id(param): choice.axes for (_, param), choice in zip(named, choices, strict=True)}
    groups: list[dict] = []
    for group in given:
        groups += [group] if "use_muon" in group else _split_by_axes(caller, group, name_of, axes)
    if len(groups) > len(given) > 1:
        say_once(
            f"{caller}: {len(given)} param groups became {len(groups)}, so places of groups changed. If a "
            "library freezes groups or sets rates by place, give each group use_muon=True or False."
        )
    return groups


def _split_by_axes(
    caller: str, group: dict, name_of: Mapping, axes: Mapping[int, MatrixAxes | None]
) -> list[dict]:
    """Return the groups into which a group is split: one for each kind of matrix, then one for AdamW."""
    by_axes: dict[MatrixAxes | None, list] = {}
    for name, param in (_named(caller, name_of, x) for x in group["params"]):
        by_axes.setdefault(axes[id(param)], []).append((name, param))
    made = []
    for kind, params in sorted(by_axes.items(), key=lambda item: item[0] is None):
        chosen: Group = {"params": params, "use_muon": kind is not None}
        if kind is not None and tuple(kind) != (1 - OUTPUT_AXIS, OUTPUT_AXIS):
            chosen |= kind._asdict()
        made.append({**group, **chosen})
    return made


def _named(caller: str, name_of: Mapping, x: Tensor | tuple[str, Tensor]) -> tuple[str, Tensor]:
    """Return a parameter with its name; raise ValueError for one that has none."""
    if isinstance(x, tuple):
        return x
    if x in name_of:
        return name_of[x], x
    raise ValueError(
        f"{caller}: a parameter of shape {tuple(x.shape)} has no name, and names tell embeddings and heads "
        "from hidden matrices. Pass model.named_parameters(), or groups that say use_muon=True or False. "
        "Where a trainer builds the optimizer, call halfstep_torch.register_names(model) before, or give it "
        "names=list(model.named_parameters()) as an argument."
    )


def _tied(names: Iterable) -> set[int]:
    """Return the parameters with two names."""
    seen: set[int] = set()
    return {id(param) for _, param in names if id(param) in seen or seen.add(id(param))}
