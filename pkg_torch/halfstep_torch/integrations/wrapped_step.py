"""The step of an optimizer wrapped by `round_weights`, called only by its wrapper, without global hooks."""

import inspect
import weakref

import torch

# Wrapped optimizers, while their wrappers step them.
_stepping: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def step_below_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Step without torch's global optimizer hooks, which run at the wrapper.

    The optimizer's own hooks run. torch wraps `step` of a class once, and marks the wrapper as "hooked".
    """
    _stepping.add(optimizer)
    try:
        if "step" in vars(optimizer):  # patched by another library
            optimizer.step()
            return
        for hook in list(getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()):
            hook(optimizer, (optimizer,), {})
        inspect.unwrap(type(optimizer).step, stop=lambda step: not hasattr(step, "hooked"))(optimizer)
        for hook in list(getattr(optimizer, "_optimizer_step_post_hooks", {}).values()):
            hook(optimizer, (optimizer,), {})
    finally:
        _stepping.discard(optimizer)


def refuse_own_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise RuntimeError, as a hook, if a wrapped optimizer is stepped by itself."""
    if optimizer not in _stepping:
        raise RuntimeError(
            "round_weights: the optimizer that was passed has no weights any more, and its step would change "
            "none. Step what was returned: optimizer = round_weights(optimizer)."
        )
