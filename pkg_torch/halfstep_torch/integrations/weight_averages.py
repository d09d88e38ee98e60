"""An average of the weights over steps, in their own dtype, that does not stall. Contract: G3."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halfstep.random_words import role_of
from halfstep_torch.distributed.shards import local_part, window_of
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.in_place import round_in_place, rounding, words_of
from halfstep_torch.leaves.checks import LAST_STEP
from halfstep_torch.leaves.names import leaf_names
from halfstep_torch.numbers.hyperparameters import decay_rate
from halfstep_torch.numbers.moments import DecayRate, ema
from halfstep_torch.numbers.seeds import Seed, as_seed

_FUNCTION, _ROLE = "ema_params", role_of("ema")
_CHOICE = CompileChoice(_FUNCTION, "auto")


def ema_params(
    model: torch.nn.Module, decay: float, seed: Seed = 0
) -> Callable[[Sequence, Sequence, Tensor | int], None]:
    """Average weights over steps, for `swa_utils`: average <- stochastic((decay average) + ((1 - decay) p)).

    The average has the dtype of the weights and is rounded once per call. float32 is exact. With
    `torch.optim.swa_utils.get_ema_multi_avg_fn` a bfloat16 average freezes while it is nearer to the weight
    than 2^-9 of itself, over 1 - decay. For DTensors every process averages its shard, with the bits of one
    process.

    Args:
        model: the trained model, for the names of its parameters.
        decay: a number in [0, 1), such as 0.999 for about a thousand steps.
        seed: seed of the random words, as in `round_stochastically`.

    Returns:
        A function for the argument `multi_avg_fn` of `torch.optim.swa_utils.AveragedModel`, which keeps the
        count. The averaged model must be on the device of the model.

    Raises:
        TypeError: if an argument has a wrong type. From the function, if an averaged floating tensor has
            another dtype than float32, bfloat16 or float16.
        ValueError: if a number is out of range. From the function, if the averaged arrays do not belong to
            the model.

    Example:
        >>> import halfstep_torch as hs
        >>> from torch.optim.swa_utils import AveragedModel
        >>> model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        >>> averaged = AveragedModel(model, multi_avg_fn=hs.ema_params(model, 0.999))
        >>> averaged.update_parameters(model)
        >>> averaged.module.weight.dtype
        torch.bfloat16

    Source: B. Polyak and A. Juditsky, 1992 (contract G3).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{_FUNCTION}: model is {type(model).__name__}. Pass the module that is trained.")
    rate, seed = DecayRate.of(decay_rate(_FUNCTION, "decay", decay)), as_seed(_FUNCTION, seed)
    return functools.partial(_average, model, rate, seed)


@torch.no_grad()
def _average(
    model: torch.nn.Module,
    rate: DecayRate,
    seed: int,
    averages: Sequence[Tensor],
    params: Sequence[Tensor],
    num_averaged: Tensor | int,
) -> None:
    names, step = _names(model), min(int(num_averaged), LAST_STEP)
    rounded = []
    for average, p in zip(averages, params, strict=True):
        if p.is_floating_point() and p.numel():
            _check(names, p)
            rounded.append((average, p))
        else:
            average.copy_(p)
    leaves = [names[_place(p)] for _, p in rounded]
    keys = words_of(seed, [step] * len(leaves), leaves, _ROLE)
    for i, (average, p) in enumerate(rounded):
        here, stage = local_part(average), rounding(ema, _ROLE, average.dtype)
        of_leaf = keys[:, i, None]
        round_in_place(_FUNCTION, _CHOICE, stage, here, local_part(p), of_leaf, (rate,), window_of(p))


def _names(model: torch.nn.Module) -> dict[tuple, str]:
    """Return leaf names by data address, because `swa_utils` passes tensors without names."""
    named = [*model.named_buffers(), *model.named_parameters()]
    leaves = leaf_names([name for name, _ in named])
    return {_place(p): leaf for leaf, (_, p) in zip(leaves, named, strict=True)}


def _place(p: Tensor) -> tuple:
    return local_part(p).data_ptr(), p.shape, p.stride(), p.dtype


def _check(names: dict[tuple, str], p: Tensor) -> None:
    if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{_FUNCTION}: a weight is {p.dtype}; averages are of float32, bfloat16 or float16.")
    if _place(p) not in names:
        raise ValueError(
            f"{_FUNCTION}: a weight of shape {tuple(p.shape)} on {p.device} is not one of the model's. "
            "Pass the model that is averaged, and keep the average on its device."
        )
