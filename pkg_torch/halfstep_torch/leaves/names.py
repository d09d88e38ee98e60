"""Leaf names, the contract's form of torch parameter names. Contract: W7."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@functools.lru_cache(maxsize=1 << 16)
def leaf_name(name: str) -> str:
    """Return the leaf name of a torch parameter, with "/" for "." and without wrappers (contract W7).

    Prefixes of torch.compile, checkpointing and FSDP are removed anywhere. "module", which may be a module's
    own name, is removed only in front.

    Example:
        >>> leaf_name("module._orig_mod.encoder.0._checkpoint_wrapped_module.weight")
        'encoder/0/weight'
    """
    parts, modules = _parts(name)
    return "/".join(parts[modules:])


def leaf_names(names: Sequence[str]) -> list[str]:
    """Return the leaf names of the parameters of one model (contract W7).

    If two names differ only in the number of leading "module" parts, each keeps its extra ones.

    Example:
        >>> leaf_names(["module.weight", "module.module.weight", "module.bias"])
        ['weight', 'module/weight', 'bias']
    """
    leaves = [leaf_name(name) for name in names]
    if len(set(leaves)) == len(leaves):
        return leaves
    modules = [_parts(name)[1] for name in names]
    fewest = dict(sorted(zip(leaves, modules, strict=True), reverse=True))
    pairs = zip(leaves, modules, strict=True)
    return [f"{'module/' * (count - fewest[leaf])}{leaf}" for leaf, count in pairs]


def parameters_by_leaf(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model by their leaf names."""
    named = dict(model.named_parameters())
    return dict(zip(leaf_names(list(named)), named.values(), strict=True))


def _parts(name: str) -> tuple[list[str], int]:
    """Return the parts of a name without wrappers, and the number of leading "module" parts."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return parts, next((i for i, part in enumerate(parts[:-1]) if part != "module"), len(parts) - 1)
