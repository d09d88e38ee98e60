"""Clipping by the norm of all gradients: as a link of a chain, and in place. Contract: N3."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.rules import clip as shared
from halfstep_torch.distributed.norms import clip_factors, norms_of_shards
from halfstep_torch.distributed.shards import local_part, sharding
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.gradient_norms import GradientNorms
from halfstep_torch.engine.in_place import scale_in_place
from halfstep_torch.engine.signals import call_untraced
from halfstep_torch.gradients.after_backward import refuse_freed
from halfstep_torch.links.link import Link, link_of
from halfstep_torch.numbers import hyperparameters


class ClipByGlobalNorm(shared.ClipByGlobalNorm, Link):
    """Clip by the norm of the gradients of all parameters of an optimizer."""

    measures = True
    late = ("factor", "scale")

    def measure(self, h: Values, norms: Callable[[bool], Tensor]) -> Mapping[str, Tensor]:
        """Return the factors of all gradients."""
        factor, scale = clip_factors(norms(self.exact), h.max_norm)
        return {"factor": factor, "scale": scale}

    def update(self, g, p, n, m, op):
        """Return the clipped update."""
        return op.scaled(g, n.factor, n.scale)


clip_by_global_norm = link_of(ClipByGlobalNorm)
_CALLER = "clip_grad_norm_"


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    exact: bool = False,
    compile: bool | Literal["auto"] = "auto",
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`, and return the norm before.

        g <- nearest((max_norm / norm) g)   where norm > max_norm

    As `clip_by_global_norm`, but the scaled gradients are rounded to their dtype. If the norm is not above
    `max_norm`, no gradient changes. It replaces `torch.nn.utils.clip_grad_norm_`, which computes in the dtype
    of the gradients.

    Args:
        parameters: a parameter, or an iterable of parameters. Parameters without a gradient are skipped.
        max_norm: the maximum norm.
        norm_type: must be 2.0, the Euclidean norm.
        error_if_nonfinite: raise RuntimeError if the norm is NaN or infinite. Otherwise NaN makes every
            gradient NaN, and an infinite gradient makes the others zero. Finite gradients are clipped even if
            their norm overflows.
        foreach: ignored.
        exact: as in `clip_by_global_norm`.
        compile: True, False or "auto", as in `Optimizer`: whether generated kernels add up the squares and
            scale the gradients. The bits are the same.

    Returns:
        The norm before, a float32 0-d tensor.

    Raises:
        TypeError: if `max_norm` is not a number. Also if a gradient is sparse, has a dtype wider than
            float32, or is a DTensor with another placement than its weight.
        ValueError: if `max_norm` is negative, or `norm_type` is not 2.
        RuntimeError: if the norm is not finite and `error_if_nonfinite` is set, if `release_gradients` frees
            the gradients, or if `compile` is True and there is no compiler.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        >>> p.grad = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
        >>> clip_grad_norm_([p], max_norm=1.0).item(), p.grad.tolist()
        (5.0, [0.6015625, 0.80078125])

    Source: as `clip_by_global_norm`; arguments as in torch.
    """
    if isinstance(norm_type, bool) or norm_type != 2:
        raise ValueError(
            f"{_CALLER}: norm_type={norm_type!r} is not supported. Use norm_type=2.0, or "
            "torch.nn.utils.clip_grad_norm_."
        )
    bound = hyperparameters.bound(_CALLER, "max_norm", max_norm)
    if isinstance(parameters, torch.nn.Module):
        raise TypeError("clip_grad_norm_: the parameters are a module. Pass model.parameters().")
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    refuse_freed(_CALLER, listed)
    choice = CompileChoice(_CALLER, compile)
    return call_untraced(functools.partial(_clip, listed, bound, choice, error_if_nonfinite, exact))


def _clip(
    params: Sequence[Tensor], max_norm: float, choice: CompileChoice, error_if_nonfinite: bool, exact: bool
) -> Tensor:
    owners = [p for p in params if p.grad is not None]
    grads = [local_part(_checked(p)).detach() for p in owners]
    for device in {grad.device for grad in grads}:
        choice.check(_CALLER, device)
    norms = norms_of_shards(grads, owners, exact=exact, sums=GradientNorms(choice).sums)
    norm = norms[0]
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"{_CALLER}: the norm of the gradients is {norm.item()}. "
            "Skip the step, or pass error_if_nonfinite=False."
        )
    scale_in_place(_CALLER, choice, grads, torch.stack(clip_factors(norms, max_norm)))
    return norm


def _checked(param: Tensor) -> Tensor:
    """Return a gradient that can be clipped."""
    grad = param.grad
    assert grad is not None
    if sharding(grad) != sharding(param):
        raise TypeError(
            f"{_CALLER}: a gradient is placed as {sharding(grad)}, its weight as {sharding(param)}. "
            "Redistribute it to the placements of its weight, or clip by clip_by_global_norm in the chain."
        )
    if grad.layout != torch.strided or grad.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        kind = "sparse" if grad.layout != torch.strided else str(grad.dtype).removeprefix("torch.")
        raise TypeError(
            f"{_CALLER}: a gradient is {kind}; gradients are dense float32, bfloat16 or float16. Cast it."
        )
    return grad
