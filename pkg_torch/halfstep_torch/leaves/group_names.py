"""Names of the parameters in param groups, and seeds of optimizers without names."""

import collections
import operator
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from halfstep_torch.leaves.names import leaf_names
from halfstep_torch.numbers.random_words import fold
from halfstep_torch.numbers.seeds import LinkSeed
from halfstep_torch.say_once import say_once

Group = dict[str, Any]
"""A param group: torch's own type."""
StateDict = dict[str, Any]
"""A state dict of an optimizer, a parameter or a handle. Torch exports no name of its type."""
_NAMELESS: collections.Counter = collections.Counter()
"""Number of optimizers without names that this process has built, by seeds."""


def parameter_names(caller: str, names: Iterable | None) -> dict[Tensor, str] | None:
    """Return the argument `names` of an optimizer as a dict by parameter."""
    if names is None:
        return None
    pairs = list(names.items()) if isinstance(names, Mapping) else list(names)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[1], Tensor):
            raise TypeError(
                f"{caller}: names holds {type(pair).__name__}, not pairs (name, parameter). "
                "Pass list(model.named_parameters())."
            )
    return {param: name for name, param in pairs}


def with_names(caller: str, params: Tensor | Iterable, names: Mapping[Tensor, str]) -> list:
    """Return parameters as pairs (name, parameter)."""
    listed = [params] if isinstance(params, Tensor) else list(params)
    bare = [x[1] if isinstance(x, (tuple, list)) else x for x in listed]
    for param in bare:
        if param not in names:
            raise ValueError(
                f"{caller}: a parameter of shape {tuple(param.shape)} has no name in names. "
                "Pass list(model.named_parameters()) of the whole model."
            )
    return [(names[param], param) for param in bare]


def given_names(groups: Iterable[Group]) -> list[str | None]:
    """Return the given name of every parameter in groups, or None."""
    return [name for group in groups for name in group.get("param_names", [None] * len(group["params"]))]


def settle_empty_groups(groups: Sequence[Group], new: Group) -> None:
    """Allow empty groups beside any other group, because torch requires names in all groups or in none."""
    if not isinstance(new, dict) or isinstance(new.get("params", set()), set):
        return  # torch raises for these
    given = new["params"]
    params = new["params"] = [given] if isinstance(given, Tensor) else list(given)
    if params:
        named = "param_names" in new or any(isinstance(x, tuple) for x in params)
        empty = [group for group in groups if not group["params"]]
    else:
        named, empty = any("param_names" in group for group in groups), [new]
    for group in empty:
        group.pop("param_names", None)
        group.update({"param_names": []} if named else {})


class NamedMembers:
    """The names of all groups' parameters, kept by parameter.

    A list of parameters may be filtered, sorted or replaced in place. torch reads its list of names by
    position, so this class sets that list to the parameters' names.
    """

    def __init__(self):
        self._names: dict[Tensor, str] = {}
        self._seen: set[Tensor] = set()
        self._listed: list[list[Tensor]] = []
        self._leaves: list[list[str]] = []

    def places(self) -> dict[Tensor, int]:
        """Return the index of each parameter's last group."""
        return {param: i for i, listed in enumerate(self._listed) for param in listed}

    def regrouped(self) -> "NamedMembers":
        """Return the same names, for groups that are read again."""
        members = NamedMembers()
        members._names, members._seen = self._names, self._seen
        return members

    def named(
        self, caller: str, groups: Sequence[Group], state: MutableMapping[Tensor, object]
    ) -> Iterator[tuple[int, str, Tensor]]:
        """Return triples: group index, leaf name (contract W7) or position, parameter.

        If a parameter has replaced another, `state` gives it the arrays of the other.

        Raises:
            ValueError: if a parameter was inserted into a list of parameters and has no name, or if
                parameters were replaced and some state belongs to none of them.
        """
        params = [group["params"] for group in groups]
        if not _same(params, self._listed):
            for i, group in enumerate(groups):
                if "param_names" in group:
                    group["param_names"] = self._names_of(caller, i, group)
            leaves = _leaves_of(groups)
            self._carry_state(caller, params, leaves, state)
            self._leaves, self._listed = leaves, [list(listed) for listed in params]
        places = [i for i, listed in enumerate(params) for _ in listed]
        return zip(places, chain(*self._leaves), chain(*params), strict=True)

    def _carry_state(
        self,
        caller: str,
        params: Sequence[list[Tensor]],
        leaves: Sequence[list[str]],
        state: MutableMapping[Tensor, object],
    ) -> None:
        """Move the state of replaced parameters to the parameters that now have their names."""
        here = {param for listed in params for param in listed}
        moves: list[tuple[str, Tensor, Tensor]] = []
        for i, listed in enumerate(self._listed[: len(params)]):
            gone = {
                leaf: param
                for leaf, param in zip(self._leaves[i], listed, strict=True)
                if param not in here and state.get(param)
            }
            new = [pair for pair in zip(leaves[i], params[i], strict=True) if pair[1] not in self._seen]
            moves += [(leaf, gone.pop(leaf), param) for leaf, param in new if leaf in gone]
            if new and gone:
                raise ValueError(
                    f"{caller}: parameters of param group {i} were replaced, and the state of "
                    f"{', '.join(map(repr, gone))} belongs to no parameter now. Keep the order and the "
                    "number of parameters, or drop what is left: optimizer.state.pop(old_parameter)."
                )
        for leaf, old, param in moves:
            kept = state.pop(old)
            self._seen.discard(old)
            if old.shape != param.shape:
                say_once(
                    f"{caller}: {leaf!r} was replaced by a parameter of another shape: its state starts "
                    "again."
                )
            elif not state.get(param):
                state[param] = kept
        self._seen |= here

    def _names_of(self, caller: str, index: int, group: Group) -> list[str]:
        """Return the names of a group's parameters. A replacement gets the name of the replaced parameter."""
        params, names = group["params"], group["param_names"]
        for place, param in enumerate(params):
            if param in self._names:
                continue
            if len(names) != len(params):
                raise ValueError(
                    f"{caller}: the parameter {place} of param group {index}, of shape {tuple(param.shape)}, "
                    "has no name, as it was put into the group's list. Use add_param_group. A wrapper that "
                    "puts flat arrays there (DeepSpeed's ZeRO) needs an optimizer without names: pass "
                    "model.parameters() and names=()."
                )
            self._names[param] = names[place]
        return [self._names[param] for param in params]


def _same(params: Sequence[list[Tensor]], others: Sequence[list[Tensor]]) -> bool:
    """Whether groups have the very same parameters."""
    if list(map(len, params)) != list(map(len, others)):
        return False
    return all(all(map(operator.is_, xs, ys)) for xs, ys in zip(params, others, strict=True))


def _leaves_of(groups: Sequence[Group]) -> list[list[str]]:
    names = [name for group in groups for name in group.get("param_names", ())]
    leaves, index, named = iter(leaf_names(names)), 0, []
    for group in groups:
        places = range(index, index + len(group["params"]))
        named.append([next(leaves) if "param_names" in group else str(place) for place in places])
        index = places.stop
    return named


def check_named(caller: str, group: Group) -> None:
    """Raise ValueError for a new group without names if other groups have names."""
    for param in () if "param_names" in group else group.get("params", ()):
        if isinstance(param, Tensor):
            raise ValueError(
                f"{caller}: a parameter of shape {tuple(param.shape)} of a new group has no name, and "
                "those of the other groups have. Pass pairs (name, parameter), or call register_names(model)."
            )


def check_names(caller: str, groups: Iterable[Group]) -> None:
    """Raise ValueError if two parameters have the same name, because they would share random words."""
    names = [name for group in groups for name in group.get("param_names", ())]
    taken: dict[str, str] = {}
    for name, leaf in zip(names, leaf_names(names), strict=True):
        if leaf in taken:
            raise ValueError(
                f"{caller}: the parameters {taken[leaf]!r} and {name!r} have the same name, {leaf!r}, "
                "and names decide the random words. Put a prefix before the names of each model."
            )
        taken[leaf] = name


def count_nameless(chain_seeds: Sequence[LinkSeed]) -> int:
    """Count an optimizer without names. Return the number built before with the same seeds."""
    key = repr(tuple(chain_seeds))
    _NAMELESS[key] += 1
    return _NAMELESS[key] - 1


def nameless_seeds(chain_seeds: Sequence[LinkSeed], before: int) -> list[LinkSeed]:
    """Return the seeds of an optimizer without names, given how many were built before (contract W7).

    Seeds are numbers, None, or tuples of them, as in links.
    """
    return [_nameless_seed(seed, before) for seed in chain_seeds]


def _nameless_seed(seed: LinkSeed, before: int) -> LinkSeed:
    if isinstance(seed, tuple | list):
        return tuple(_nameless_seed(part, before) for part in seed)
    if seed is None or not before:
        return seed
    # Step counts stay below 2^31, so no step has one of these keys.
    key = np.array([seed >> 32]), np.array([seed & 0xFFFFFFFF])
    high, low = fold(
        (key[0].astype(np.uint32), key[1].astype(np.uint32)), np.array([2**32 - before], np.uint32)
    )
    return int(high[0]) << 32 | int(low[0])
