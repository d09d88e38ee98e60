"""A model in 16 bits, with a separate choice for norms and embeddings."""

from typing import NoReturn

import torch
from torch import Tensor

from halfstep.arrays import Array
from halfstep.cast import checked_choices, kind_of
from halfstep_torch.leaves.group_names import Group


def cast_model(
    model: torch.nn.Module, *, norms: str = "split16", embeddings: str = "bfloat16"
) -> list[Group]:
    """Cast the float32 parameters of a model to bfloat16, in place, and return param groups with their names.

    Weights are rounded once, to nearest. Norms and embeddings are found by their classes, such as
    `LayerNorm`, `LlamaRMSNorm` or `Embedding`. "float32" does not cast them, and hooks convert their inputs
    to float32 and their outputs to bfloat16. "split16" casts them for the model, and the optimizer keeps 16
    extra bits of its updates. Buffers are not cast.

    Args:
        model: the model to cast.
        norms: "split16", "float32" or "bfloat16" for norms.
        embeddings: the same choice for embeddings.

    Returns:
        Param groups for any optimizer of this package. Groups for "split16" have that `param_storage`.

    Raises:
        ValueError: if a choice is none of the three, or a parameter that is to stay in float32 is shared with
            a module of another kind.

    Example:
        >>> import halfstep_torch as hs
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        >>> groups = cast_model(model)
        >>> [([name for name, _ in group["params"]], group.get("param_storage")) for group in groups]
        [(['0.weight', '0.bias'], None), (['1.weight', '1.bias'], 'split16')]
        >>> optimizer = hs.AdamW(groups, lr=1e-3)

    Source: ours.
    """
    choices = checked_choices("cast_model", norms=norms, embeddings=embeddings)
    labels: dict[Tensor, str] = {}
    for name, module in model.named_modules():
        label = choices.get(kind_of([type(module).__name__]), "bfloat16")
        own = list(module.parameters(recurse=False))
        for p in own:
            if {label, labels.setdefault(p, label)} > {"float32"}:
                raise ValueError(
                    f"cast_model: a parameter of {name!r} stays in float32, and is shared with a module that "
                    'is cast. Use "split16" for it.'
                )
        if label == "float32" and any(p.dtype == torch.float32 for p in own):
            module.register_forward_pre_hook(_to_float32)
            module.register_forward_hook(_to_bfloat16)
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, p in model.named_parameters():
        if labels[p] != "float32" and p.dtype == torch.float32:
            p.data = p.data.to(torch.bfloat16)
        groups.setdefault(labels[p], []).append((name, p))
    kept = {"split16": {"param_storage": "split16"}}
    return _Groups({"params": named, **kept.get(label, {})} for label, named in groups.items())


class _Groups(list[Group]):
    """Param groups that a user may confuse with the model."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"cast_model returned param groups, which have no attribute {name!r}. It casts the model in "
            "place: write groups = cast_model(model), and go on with model."
        )


def _to_float32(_: torch.nn.Module, args: tuple) -> tuple:
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)


def _to_bfloat16(_: torch.nn.Module, __: object, output: Array) -> Array:
    return output.to(torch.bfloat16) if isinstance(output, Tensor) else output
