"""Gradient release: parameters are stepped during backward, and each gradient is freed at once."""

import contextlib
import functools
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from halfstep_torch.distributed.norms import clip, norms_of_shards
from halfstep_torch.distributed.shards import is_sharded
from halfstep_torch.gradients.after_backward import refuse_scaler, watch_clipping
from halfstep_torch.gradients.hooks import claim, owner_of, release
from halfstep_torch.leaves.checks import check_grad
from halfstep_torch.numbers.hyperparameters import bound
from halfstep_torch.optimizer import Optimizer, check_optimizer
from halfstep_torch.say_once import say_once
from halfstep_torch.sharded.slots import exchanges

_FUNCTION, _SUMS = "release_gradients", "accumulate_gradients"


def release_gradients(optimizer: Optimizer, max_norm: float | None = None) -> "GradientRelease":
    """Step every parameter as soon as backward has its gradient, and free the gradient.

    Memory then never holds all gradients together, which saves up to 2 bytes per parameter of a bfloat16
    model. The bits are the same as in a step after backward. Schedulers work as before.

    Every backward is a step. A training loop keeps `optimizer.step()` after it, which finds no gradient and
    separates one backward from the next. A second backward before it raises an error, because each
    micro-batch would be a step, and so would parts of a backward with reentrant checkpoints. Run all
    micro-batches except the last in `handle.accumulate()`. Their gradients are accumulated, and the last
    backward frees them one by one. If `accumulate_gradients` is called before, small gradients are not lost.
    Methods that need all gradients before a step cannot be used, such as clipping by the norm of all
    gradients, `GradScaler`, and averages over processes. Keep the optimizer or the handle alive. Without
    both, backward steps nothing and logs it. Parameters are stepped one by one, which costs about a
    millisecond each on the host. After an error in the middle of backward, earlier parameters have been
    stepped.

    Args:
        optimizer: an optimizer of this package with the parameters.
        max_norm: the maximum norm of each gradient, clipped by its own norm instead of the norm of all, or
            None.

    Returns:
        A handle. `remove()` removes the hooks, and `optimizer.step()` then steps again.

    Raises:
        TypeError: if `optimizer` is not an `Optimizer`, or `max_norm` is not a number.
        ValueError: if a link of the chain needs all gradients, a parameter has a gradient or already has
            these hooks, or `max_norm` is negative.
        RuntimeError: if several processes train together, unless `fully_shard` has all parameters and no
            border of a shard cuts a block (FSDP2 calls hooks after it has reduced a gradient). From backward,
            if a parameter was already stepped since the last `optimizer.step()`, which is then not changed.
            From `clip_grad_norm_` of this package and of torch. From the first backward, before any weight
            changes, if a `GradScaler` has scaled a loss, and from `optimizer.step()`, if a scaler calls it.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.AdamW(model.named_parameters())
        >>> handle = hs.release_gradients(optimizer)
        >>> model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        >>> int(optimizer.state[model.weight]["step"]), model.weight.grad
        (1, None)
        >>> optimizer.step()  # that backward has ended
        >>> handle.remove()

    Source: K. Lv et al., "Full parameter fine-tuning for large language models with limited resources",
        arXiv:2306.09782, section 3.1 (fused backward). Hooks as in torch's tutorial on the optimizer
        step in backward.
    """
    checked = _checked(optimizer)
    limit = None if max_norm is None else bound(_FUNCTION, "max_norm", max_norm)
    if limit is not None and any(is_sharded(param) for _, param, _ in checked.plans()):
        raise ValueError(
            f"{_FUNCTION}: max_norm={max_norm} with shards: their norms need words of other processes, which "
            "may be at another parameter in backward. Step after backward, or leave max_norm out."
        )
    return GradientRelease(checked, limit)


class GradientRelease:
    """The handle returned by `release_gradients`."""

    def __init__(self, optimizer: Optimizer, max_norm: float | None):
        self._accumulates = False
        self._began = False
        self._steps = [_StepAlone(optimizer, entry, max_norm) for entry in optimizer._named()]
        # A sum is complete before its step, because hooks run in the order of registration.
        self._sums = [step.param for step in self._steps if owner_of(step.param) == _SUMS]
        claim(_FUNCTION, ((step.name, step.param) for step in self._steps), over=_SUMS)
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(_refuse_scaler),
            optimizer.register_step_post_hook(self._end_backward),
        ]
        for step in self._steps:
            if step.param.requires_grad:
                hook = functools.partial(_step, weakref.ref(self), weakref.ref(step))
                self._handles.append(step.param.register_post_accumulate_grad_hook(hook))
        watch_clipping()
        # The optimizer keeps the handle, because a reference from the hooks would keep it alive for ever.
        optimizer.release = self

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate in the backward passes of this block, without a step and without freed gradients."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def _end_backward(self, *_: object) -> None:
        for step in self._steps:
            step.done = False

    def remove(self) -> None:
        """Remove the hooks. Gradients are then kept until `zero_grad`, and `optimizer.step()` steps."""
        for handle in self._handles:
            handle.remove()
        release(step.param for step in self._steps)
        release(self._sums, _SUMS)
        self._handles.clear()
        self._sums.clear()
        self._steps.clear()


class _StepAlone:
    """The step of one parameter, by its optimizer."""

    def __init__(self, optimizer: Optimizer, entry: tuple[int, str, Tensor], max_norm: float | None):
        self._optimizer, self._max_norm = optimizer, max_norm
        self.done = False  # since the last `optimizer.step()`
        _, self.name, self.param = entry

    @torch.no_grad()
    def __call__(self) -> None:
        if self.done:
            self.param.grad = None
            raise RuntimeError(
                f"{_FUNCTION}: {self.name!r} was stepped, and backward has another gradient of it. Each "
                "backward is a step: call optimizer.step() after each. "
                "Micro-batches but the last go under handle.accumulate()."
            )
        if self._max_norm is not None:
            _clip(self.name, self.param, self._max_norm)
        self._optimizer.step_parameter(self.param)
        self.done = True
        self.param.grad = None


def _step(release: weakref.ref, reference: weakref.ref, param: Tensor) -> None:
    """Step a parameter unless more micro-batches follow. Log once if its optimizer was freed."""
    handle, step = release(), reference()
    if step is None:
        say_once(
            f"{_FUNCTION}: nothing holds its optimizer any more, and backward steps nothing. Keep the "
            "optimizer or the handle; to train on without it, call handle.remove() before both are dropped."
        )
        return
    if handle is not None and handle._accumulates:
        return
    if handle is not None and not handle._began:
        try:
            refuse_scaler()
        except RuntimeError:
            param.grad = None
            raise
        handle._began = True
    step()


def _clip(name: str, param: Tensor, max_norm: float | Tensor) -> None:
    """Clip the gradient of one parameter by its own norm (contract N3)."""
    check_grad(_FUNCTION, name, param)
    grad = param.grad
    assert grad is not None
    norms = norms_of_shards([grad], [param])
    grad.copy_(next(clip([grad], norms, max_norm)))


def _checked(optimizer: Optimizer) -> Optimizer:
    optimizer = check_optimizer(_FUNCTION, optimizer)
    optimizer.check_single_steps(
        _FUNCTION, "but gradient release frees them one by one", "step after backward"
    )
    for name, param, _ in optimizer.plans():
        if param.grad is not None:
            raise ValueError(
                f"{_FUNCTION}: the parameter {name!r} has a gradient, to which the next one would be added. "
                "Call optimizer.step(zero_grad=True) or optimizer.zero_grad() first."
            )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        for name, param, plan in optimizer.plans():
            if not is_sharded(param):
                raise RuntimeError(
                    f"{_FUNCTION}: {distributed.get_world_size()} processes train together, and average "
                    f"{name!r}'s gradient only after backward. Step after that, or use fully_shard."
                )
            if exchanges(plan, param):
                raise RuntimeError(
                    f"{_FUNCTION}: the step of {name!r} needs words of other processes, which may be at "
                    "another parameter in backward: a border of its shards cuts a block, or a rule sees all "
                    "of it. Shard its first axis, use a format without scales, or step after backward."
                )
    return optimizer


def _refuse_scaler(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        raise RuntimeError(
            f"{_FUNCTION}: a GradScaler steps this optimizer, whose gradients were used scaled as they were "
            "during backward. Train without a scaler (bfloat16 needs none), or step after backward."
        )
