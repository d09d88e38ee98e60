"""Clipping by the norm of all gradients: as a link of a chain, and in place. Contract: N3."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.rules import clip as shared
from halfstep_torch.distributed.norms import clip, clip_factors, norms_of_shards
from halfstep_torch.distributed.shards import local_part, sharding
from halfstep_torch.gradients.after_backward import refuse_freed
from halfstep_torch.links.link import Link, link_of
from halfstep_torch.numbers import hyperparameters


class ClipByGlobalNorm(shared.ClipByGlobalNorm, Link):
    """Clip by the norm of the gradients of all parameters of an optimizer."""

    measures = True

    def measure(self, h: Values, norms: Callable[[bool], Tensor]) -> Mapping[str, Tensor]:
        """Return the factors of all gradients."""
        factor, scale = clip_factors(norms(self.exact), h.max_norm)
        return {"factor": factor, "scale": scale}

    def update(self, g, p, n, m, op):
        """Return the clipped update."""
        return op.scaled(g, n.factor, n.scale)


clip_by_global_norm = link_of(ClipByGlobalNorm)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; return the norm they had.

        g <- nearest((max_norm / norm) g)   where norm > max_norm

    As `clip_by_global_norm`, but what is scaled is then rounded to the dtype of the gradients. Gradients
    whose norm is not above `max_norm` are left alone, to the bit. In place of
    `torch.nn.utils.clip_grad_norm_`, which works in the dtype of the gradients.

    Args:
        parameters: one, or many; those without a gradient are passed over.
        max_norm: the largest norm that is left as it is.
        norm_type: 2.0, the Euclidean norm, and no other.
        error_if_nonfinite: raise where the norm is NaN or infinite. Otherwise NaN makes every gradient NaN,
            and an infinite gradient makes the others zero; finite gradients are clipped whatever their norm.
        foreach: of torch; changes nothing here.
        exact: as in `clip_by_global_norm`.

    Returns:
        The norm before, a float32 0-d tensor.

    Raises:
        TypeError: if `max_norm` is no number. Also if a gradient is sparse, of a dtype that float32 does not
            hold, or a DTensor with another placement than its weight.
        ValueError: if `max_norm` is negative, or `norm_type` is not 2.
        RuntimeError: if the norm is not finite and `error_if_nonfinite` is set, or `release_gradients` frees
            the gradients.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        >>> p.grad = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
        >>> clip_grad_norm_([p], max_norm=1.0).item(), p.grad.tolist()
        (5.0, [0.6015625, 0.80078125])

    Source: as `clip_by_global_norm`; arguments as in torch.
    """
    caller = "clip_grad_norm_"
    if isinstance(norm_type, bool) or norm_type != 2:
        raise ValueError(
            f"{caller}: norm_type={norm_type!r} is not supported. Use norm_type=2.0, or "
            "torch.nn.utils.clip_grad_norm_."
        )
    bound = hyperparameters.bound(caller, "max_norm", max_norm)
    if isinstance(parameters, torch.nn.Module):
        raise TypeError("clip_grad_norm_: the parameters are a module. Pass model.parameters().")
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    refuse_freed(caller, listed)
    owners = [p for p in listed if p.grad is not None]
    grads = [local_part(_checked(caller, p)) for p in owners]
    norms = norms_of_shards(grads, owners, exact=exact)
    norm = norms[0]
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"{caller}: the norm of the gradients is {norm.item()}. "
            "Skip the step, or pass error_if_nonfinite=False."
        )
    for grad, clipped in zip(grads, clip(grads, norms, bound), strict=True):
        grad.copy_(clipped)
    return norm


def _checked(caller: str, param: Tensor) -> Tensor:
    """Return a gradient that can be clipped."""
    grad = param.grad
    assert grad is not None
    if sharding(grad) != sharding(param):
        raise TypeError(
            f"{caller}: a gradient is placed as {sharding(grad)}, its weight as {sharding(param)}. "
            "Redistribute it to the placements of its weight, or clip by clip_by_global_norm in the chain."
        )
    if grad.layout != torch.strided or grad.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        kind = "sparse" if grad.layout != torch.strided else str(grad.dtype).removeprefix("torch.")
        raise TypeError(
            f"{caller}: a gradient is {kind}; gradients are dense float32, bfloat16 or float16. Cast it."
        )
    return grad
