"""Names for parameters that were passed without: from a registered model, or the module that owns them.

Contract: W7.
"""

import gc
import itertools
import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from halfstep_torch.leaves.names import WRAPPERS, leaf_name
from halfstep_torch.say_once import say_once

_LOG = logging.getLogger("halfstep_torch")

_Table = dict[int, tuple[str, weakref.ref]]
"""Of one model: by the id of a parameter its name, and the parameter itself."""

_Owned = list[list[tuple[torch.nn.Module, str]]]
"""Of each parameter the models that own it, and its name there."""

_REGISTERED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of each model that `register_names` was given the prefix."""

_TABLES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of such a model the names, as they were last read."""

_FOUND: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of the models that the last search found, the names."""


def register_names(model: torch.nn.Module, prefix: str = "") -> None:
    """Register a model, so that optimizers find the names of its parameters.

    Trainers often build an optimizer themselves, as `cls(model.parameters(), lr=...)`. Random words then
    follow the names all the same, `Muon` can tell matrices from embeddings, and the words are those of a run
    in JAX. Names that the optimizer is given win. The model may be wrapped or sharded before or after: names
    are those of the model inside DDP, `torch.compile`, FSDP and PEFT. Nothing keeps the model alive.

    Without this call an optimizer looks for the outermost module that owns the parameters. That finds none
    where several own them, under other names, or where names of two models clash: the log says so.

    Args:
        model: the parameters of which may come without names.
        prefix: before each name, with a dot, as in `Module.named_parameters`: where names of two models of
            one optimizer clash.

    Raises:
        TypeError: if `model` is no module, or `prefix` no text.

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
    """Return parameters, pairs or groups of an optimizer as pairs with names, if they have none yet.

    As they are where they have, or no names are found. What can be read only once comes back as a list.

    Raises:
        ValueError: if models are registered, and a parameter is in none of them, or in two under other names.
    """
    if isinstance(params, (Tensor, Mapping, str, bytes, set)) or not isinstance(params, Iterable):
        return params  # which torch refuses
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
            group["param_names"] = []  # else torch takes the group for one without names
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
    """Return the names of parameters in a registered model; None if no model has all of them."""
    found = _look_up(_TABLES, params)
    if not all(found):  # the model may have other parameters by now
        _TABLES.update({model: _table(model, prefix) for model, prefix in list(_REGISTERED.items())})
        found = _look_up(_TABLES, params)
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
                f"{known!r} is. Register its model too, or pass pairs (name, parameter)."
            )
    return [owned[0][1] for owned in found] if any(found) else None


def _of_owners(caller: str, params: list[Tensor]) -> list[str] | None:
    """Return the names of parameters in the outermost modules that own them, if all are owned."""
    found = _look_up(_FOUND, params)
    if not all(found):
        _FOUND.clear()
        _FOUND.update({root: _table(root, "") for root in _roots(params)})
        found = _look_up(_FOUND, params)
    if (problem := _problem(params, found)) is not None:
        if any(found):
            say_once(
                f"{caller}: {problem}, so the parameters have no names. Pass model.named_parameters(), or "
                "call halfstep_torch.register_names(model, prefix=...) before."
            )
        return None
    owners = sorted({type(owner).__name__ for owner in {owner for owned in found for owner, _ in owned}})
    _LOG.info("%s: the parameters have the names of %s, which owns them.", caller, " and ".join(owners))
    return [owned[0][1] for owned in found]


def _look_up(tables: Mapping[torch.nn.Module, _Table], params: list[Tensor]) -> _Owned:
    """Return for each parameter the models that own it, by their tables, and its name there."""
    found: _Owned = [[] for _ in params]
    for model, table in tables.items():
        for owned, param in zip(found, params, strict=True):
            entry = table.get(id(param))
            if entry is not None and entry[1]() is param:
                owned.append((model, entry[0]))
    return found


def _problem(params: list[Tensor], found: _Owned) -> str | None:
    """Return why owners do not give the parameters names, or None."""
    taken: dict[str, Tensor] = {}
    for param, owned in zip(params, found, strict=True):
        if not owned:
            return f"a parameter of shape {tuple(param.shape)} is in no module"
        (owner, name), *others = owned
        for other, its_name in others:
            if leaf_name(name) != leaf_name(its_name):
                return f"{name!r} of {type(owner).__name__} is {its_name!r} of {type(other).__name__}"
        if taken.setdefault(leaf_name(name), param) is not param:
            return f"two models have a parameter {name!r}"
    return None


def _table(model: torch.nn.Module, prefix: str) -> _Table:
    named = _unwrapped(model).named_parameters(prefix)
    return {id(param): (name, weakref.ref(param)) for name, param in named}


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside wrappers: those whose names W7 drops, and PEFT's."""
    while True:
        children = model._modules
        if any(kind.__name__ == "PeftModel" for kind in type(model).__mro__):
            inner = model.get_base_model()  # pyright: ignore[reportCallIssue]
        elif len(children) == 1 and not model._parameters and {*children} <= {"module", *WRAPPERS}:
            inner = next(iter(children.values()))
        else:
            return model
        if not isinstance(inner, torch.nn.Module) or inner is model:
            return model
        model = inner


def _roots(params: list[Tensor]) -> list[torch.nn.Module]:
    """Return the outermost modules that own some of the parameters.

    A parameter knows no module, so all objects are searched. Compiled graphs, which are modules too, count
    only where nothing else does.
    """
    modules, inner, wanted = _modules(), set[int](), set(map(id, params))
    for module in modules:
        if children := vars(module).get("_modules"):
            inner.update(map(id, children.values()))
    outermost = [module for module in modules if id(module) not in inner]
    roots = [module for module in outermost if _owns(module, wanted)]
    return [root for root in roots if not isinstance(root, torch.fx.GraphModule)] or roots


def _owns(root: torch.nn.Module, wanted: set[int]) -> bool:
    """Return whether a module or a submodule has a parameter with an id."""
    own = (vars(module).get("_parameters") for module in root.modules())
    return any(not wanted.isdisjoint(map(id, params.values())) for params in own if params)


def _modules() -> list[torch.nn.Module]:
    """Return all modules of the process, in about 0.1 µs for each of its objects."""
    kinds, new = {torch.nn.Module}, [torch.nn.Module]
    while new:
        new = [kind for kind in new.pop().__subclasses__() if kind not in kinds] + new
        kinds.update(new)
    objects = gc.get_objects()
    return list(itertools.compress(objects, map(kinds.__contains__, map(type, objects))))
