"""Names for parameters that were passed without: from a registered model, or the module that owns them.

Contract: W7.
"""

import gc
import itertools
import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from halfstep_torch.leaves.names import WRAPPERS, leaf_name
from halfstep_torch.say_once import say_once

_LOG = logging.getLogger("halfstep_torch")


class _Place(NamedTuple):
    """The place of a parameter, with its name, its owning module and the key there.

    It has no weak reference to the parameter, because `Module.to` swaps tensors of FSDP2 and then fails.
    """

    name: str
    owner: weakref.ref[torch.nn.Module]
    key: str

    def is_of(self, param: Tensor) -> bool:
        owner = self.owner()
        return owner is not None and vars(owner)["_parameters"].get(self.key) is param


class _Table(NamedTuple):
    """The names of one model, with its class and the place of each parameter by id."""

    kind: type[torch.nn.Module]
    places: dict[int, _Place]


_Owned = list[list[tuple[_Table, str]]]
"""Tables that contain each parameter, with its name there."""

_REGISTERED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Prefix of each model passed to `register_names`."""

_TABLES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Names of each registered model, as last read."""

_FOUND: list[_Table] = []
"""Names of all outermost modules, from the last search."""


def register_names(model: torch.nn.Module, prefix: str = "") -> None:
    """Register a model so that optimizers find the names of its parameters.

    Trainers often build an optimizer as `cls(model.parameters(), lr=...)`. After this call random words still
    follow the names, as in JAX, and `Muon` can separate matrices from embeddings. Names passed to the
    optimizer take precedence. The model may be wrapped or sharded before or after. The names come from the
    model inside DDP, `torch.compile`, FSDP and PEFT. The model is not kept alive.

    Without this call an optimizer searches for the outermost module that owns the parameters. If an inner
    module contains all of them under shorter names, a warning names it. No names are found if several modules
    own the parameters under different names, or if names of two models clash. The log then gives the reason.
    The search collects garbage and visits every object of the process, in 0.4 s for two million. One search
    finds the names of all living models.

    Args:
        model: the model.
        prefix: a prefix for each name, joined by a dot as in `Module.named_parameters`, if names of two
            models in one optimizer clash.

    Raises:
        TypeError: if `model` is not a module, or `prefix` not a text.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8))
        >>> hs.register_names(model)
        >>> hs.AdamW(model.parameters()).param_groups[0]["param_names"]
        ['0.weight', '0.bias', '1.weight', '1.bias']

    Source: ours. Contract W7.
    """
    if not isinstance(model, torch.nn.Module) or not isinstance(prefix, str):
        wrong = prefix if isinstance(model, torch.nn.Module) else model
        raise TypeError(
            f"register_names: {wrong!r} is no {'text' if wrong is prefix else 'module'}. Pass "
            'register_names(model), or register_names(model, prefix="actor").'
        )
    _REGISTERED[model] = prefix
    _TABLES.clear()


def with_names_found(caller: str, params: Any) -> Any:  # as torch takes them, of any kind
    """Return an optimizer's parameters or groups as pairs with names, if they have no names yet.

    They are returned unchanged if they have names or none are found. An iterator is returned as a list.

    Raises:
        ValueError: if models are registered, and a parameter is in none of them, or has two names.
    """
    if isinstance(params, (Tensor, Mapping, str, bytes, set)) or not isinstance(params, Iterable):
        return params  # torch raises for these
    listed = list(params)
    in_groups = bool(listed) and isinstance(listed[0], dict)
    groups = [dict(group) if isinstance(group, dict) else {} for group in listed] if in_groups else []
    groups = groups or [{"params": listed}]
    for group in groups:
        given = group.get("params")
        if isinstance(given, Tensor):
            group["params"] = [given]
        elif isinstance(given, Iterable) and not isinstance(given, set):
            group["params"] = list(given)
    bare = [x for group in groups for x in group.get("params") or ()]
    named = any("param_names" in group for group in groups) or not all(isinstance(x, Tensor) for x in bare)
    if not named and (names := names_of(caller, bare)) is not None:
        in_order = iter(names)
        for group in groups:
            group["params"] = [(next(in_order), param) for param in group["params"]]
        named = True
    for group in groups:
        if named and isinstance(group.get("params"), list) and not group["params"]:
            group["param_names"] = []  # otherwise torch treats the group as one without names
    return groups if in_groups else groups[0]["params"]


def names_of(caller: str, params: list[Tensor]) -> list[str] | None:
    """Return the name found for each parameter without one, or None.

    Raises:
        ValueError: as `with_names_found`.
    """
    if not params:
        return None
    if _REGISTERED and (names := _registered(caller, params)) is not None:
        return names
    return _of_owners(caller, params)


def _registered(caller: str, params: list[Tensor]) -> list[str] | None:
    """Return the names of parameters in a registered model, or None if no model has all of them."""
    found = _look_up(_TABLES.values(), params)
    if not all(found):  # the model may have other parameters by now
        _TABLES.update({model: _table(model, prefix) for model, prefix in list(_REGISTERED.items())})
        found = _look_up(_TABLES.values(), params)
    for param, owned in zip(params, found, strict=True):
        for _, name in owned[1:]:
            if leaf_name(name) != leaf_name(owned[0][1]):
                raise ValueError(
                    f"{caller}: a parameter of shape {tuple(param.shape)} is {owned[0][1]!r} in one model of "
                    f"register_names and {name!r} in another. Register the one that is trained, or pass "
                    "names=list(model.named_parameters())."
                )
        if not owned and any(found):
            known = next(owned[0][1] for owned in found if owned)
            raise ValueError(
                f"{caller}: a parameter of shape {tuple(param.shape)} is in no model of register_names, and "
                f"{known!r} is. Register its model too. For a tensor without a model pass pairs, as in "
                '[*model.named_parameters(), ("log_alpha", log_alpha)].'
            )
    return [owned[0][1] for owned in found] if any(found) else None


def _of_owners(caller: str, params: list[Tensor]) -> list[str] | None:
    """Return the names of parameters in the outermost modules that own them, if all are owned."""
    found = _look_up(_FOUND, params)
    if not all(found):
        _search()
        found = _look_up(_FOUND, params)
    if (problem := _problem(params, found)) is not None:
        if any(found):
            say_once(f"{caller}: {problem}")
        return None
    kinds = " and ".join(sorted({table.kind.__name__ for owned in found for table, _ in owned}))
    if _outer(found):
        say_once(
            f"{caller}: the parameters have the names of {kinds}, the outermost module that owns them, such "
            f"as {found[0][0][1]!r}. If they must not depend on it, pass model.named_parameters(), or call "
            "halfstep_torch.register_names(model) before."
        )
    else:
        _LOG.info("%s: the parameters have the names of %s, which owns them.", caller, kinds)
    return [owned[0][1] for owned in found]


def _look_up(tables: Iterable[_Table], params: list[Tensor]) -> _Owned:
    """Return the tables that contain each parameter, with its name there.

    Compiled graphs are modules too, and are used only if no other module has a parameter.
    """
    found: _Owned = [[] for _ in params]
    for table in tables:
        for owned, param in zip(found, params, strict=True):
            place = table.places.get(id(param))
            if place is not None and place.is_of(param):
                owned.append((table, place.name))
    for owned in found:
        models = [entry for entry in owned if not issubclass(entry[0].kind, torch.fx.GraphModule)]
        owned[:] = models or owned
    return found


def _outer(found: _Owned) -> bool:
    """Return whether one inner module contains all these parameters of a module."""
    names: dict[int, list[str]] = {}
    for table, name in (entry for owned in found for entry in owned):
        names.setdefault(id(table), []).append(name)
    return any(
        all("." in name for name in of_table) and len({name.split(".")[0] for name in of_table}) == 1
        for of_table in names.values()
    )


def _problem(params: list[Tensor], found: _Owned) -> str | None:
    """Return why owners give the parameters no names, with the remedy, or None."""
    so, way_out = "so the parameters have no names.", "Pass model.named_parameters(), or call"
    way_out = f"{so} {way_out} halfstep_torch.register_names(model, prefix=...) before."
    taken: dict[str, Tensor] = {}
    for param, owned in zip(params, found, strict=True):
        if not owned:
            return (
                f"a parameter of shape {tuple(param.shape)} is in no module, {so} Pass pairs, as in "
                '[*model.named_parameters(), ("log_alpha", log_alpha)].'
            )
        (table, name), *others = owned
        for other, its_name in others:
            if leaf_name(name) != leaf_name(its_name):
                return (
                    f"{name!r} of {table.kind.__name__} is {its_name!r} of {other.kind.__name__}, {way_out}"
                )
        if taken.setdefault(leaf_name(name), param) is not param:
            return f"two models have a parameter {name!r}, {way_out}"
    return None


def _table(model: torch.nn.Module, prefix: str) -> _Table:
    inner = _unwrapped(model)
    table, seen, left = _Table(type(inner), {}), set[int](), [(prefix, inner)]
    while left:  # as `named_parameters` goes, also through modules that are not built to the end
        path, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for key, param in (vars(module).get("_parameters") or {}).items():
            if param is not None and id(param) not in table.places:
                table.places[id(param)] = _Place(_joined(path, key), weakref.ref(module), key)
        children = vars(module).get("_modules") or {}
        left += [
            (_joined(path, key), child) for key, child in reversed(children.items()) if child is not None
        ]
    return table


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside PEFT's wrappers and wrappers with names that W7 drops."""
    while True:
        children = vars(model).get("_modules") or {}
        if any(kind.__name__ == "PeftModel" for kind in type(model).__mro__) and "base_model" in children:
            inner = model.get_base_model()  # pyright: ignore[reportCallIssue]
        elif len(children) == 1 and not model._parameters and {*children} <= {"module", *WRAPPERS}:
            inner = next(iter(children.values()))
        else:
            return model
        if not isinstance(inner, torch.nn.Module) or inner is model:
            return model
        model = inner


def _search() -> None:
    """Read the names of all outermost modules, among all objects because parameters have no link to them."""
    gc.collect()  # a dropped module may still contain others, and would give them its prefix
    modules, inner = _modules(), set[int]()
    for module in modules:
        inner.update(map(id, (vars(module).get("_modules") or {}).values()))
    _FOUND[:] = [table for x in modules if id(x) not in inner and (table := _table(x, "")).places]


def _modules() -> list[torch.nn.Module]:
    """Return all modules of the process, in about 0.1 µs for each of its objects."""
    kinds, new = {torch.nn.Module}, [torch.nn.Module]
    while new:
        new = [kind for kind in new.pop().__subclasses__() if kind not in kinds] + new
        kinds.update(new)
    objects = gc.get_objects()
    return list(itertools.compress(objects, map(kinds.__contains__, map(type, objects))))
