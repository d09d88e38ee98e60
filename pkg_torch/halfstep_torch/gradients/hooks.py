"""The parameters with hooks of this package. A parameter may have only one kind."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from halfstep_torch.leaves.found_names import with_names_found
from halfstep_torch.leaves.group_names import given_names
from halfstep_torch.leaves.names import leaf_names
from halfstep_torch.optimizer import Optimizer

_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def owner_of(param: Tensor) -> str:
    """Return the name of the function that put hooks on a parameter, or ""."""
    return _OWNERS.get(param) or ""


def claim(caller: str, named: Iterable[tuple[str, Tensor]], over: str = "") -> None:
    """Record the hooks of `caller` on parameters. Raise if one has hooks of others than `over`."""
    listed = list(named)
    for name, param in listed:
        if (other := owner_of(param)) and other != over:
            raise ValueError(
                f"{caller}: the parameter {name!r} has the hooks of {other} already. "
                f"Call remove() of what {other} returned first."
            )
    for _, param in listed:
        _OWNERS[param] = caller


def release(params: Iterable[Tensor], caller: str = "") -> None:
    """Record that the hooks of parameters are removed, or that only another caller's remain."""
    for param in params:
        _OWNERS.pop(param, None)
        if caller:
            _OWNERS[param] = caller


def named_leaves(caller: str, given: Any) -> Iterator[tuple[str, Tensor]]:  # parameters in any form of torch
    """Yield (leaf name, parameter) of a module, an optimizer, or (named) parameters (contract W7)."""
    if isinstance(given, torch.nn.Module):
        given = given.named_parameters()
    if isinstance(given, Optimizer):
        for name, param, _ in given.plans():
            yield name, param
        return
    if isinstance(given, torch.optim.Optimizer):
        params = [param for group in given.param_groups for param in group["params"]]
        names = enumerate(given_names(given.param_groups))
        given = zip((str(i) if name is None else name for i, name in names), params, strict=True)
    given = with_names_found(caller, given)
    pairs = [entry if isinstance(entry, tuple) else (str(i), entry) for i, entry in enumerate(given)]
    for leaf, (_, param) in zip(leaf_names([name for name, _ in pairs]), pairs, strict=True):
        if not isinstance(param, Tensor):
            raise TypeError(
                f"{caller}: {type(param).__name__} is no parameter. "
                "Pass a module, an optimizer, or model.named_parameters()."
            )
        yield leaf, param
