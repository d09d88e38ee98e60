"""Trial steps on copies of an optimizer, which itself does not change.

They work with any optimizer, because its own `step` runs on copies of parameters, gradients and state.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.distributed.shards import local_part
from halfstep_torch.engine.signals import unwrapped
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.storage.stored_moment import State, StoredMoment
from halfstep_torch.weights.weight_rule import NearestWeights, WeightRule

NARROW = (torch.bfloat16, torch.float16)
# Substrings of the state keys under which optimizers keep rounding errors of weights.
_KEPT_BESIDE = ("comp", "kahan", "shift", "master", "extra_bits", "remainder")
# Attributes for the last step, and attributes added by other libraries.
_NOT_COPIED = (
    "_launches",
    "_replayed",
    "_counts",
    "_by_param",
    "_agreement",
    "_home",
    "_members",
    "_lock",
    "release",
    "step",
    "grad_scale",
    "found_inf",
)

Change = Callable[[Tensor], Tensor]


def any_optimizer(caller: str, optimizer: Any) -> torch.optim.Optimizer:  # or a wrapper
    """Return the optimizer of any library inside a wrapper. Raise TypeError for other objects."""
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{caller}: optimizer is {type(optimizer).__name__}. Pass a torch.optim.Optimizer.")
    return optimizer


def copy_of(
    optimizer: torch.optim.Optimizer,
    params: list[Tensor],
    weight: Change,
    grad: Change,
    state: Callable[[Tensor, str, Tensor], Tensor] | None,
) -> tuple[torch.optim.Optimizer, dict[Tensor, torch.nn.Parameter]]:
    """Return a copy of an optimizer on copies of its parameters, and the copies by parameter.

    `weight`, `grad` and `state` are functions that copy them. Without `state`, the copies have no state.
    """
    copies = {p: torch.nn.Parameter(weight(p.detach()).clone()) for p in params}
    groups = []
    for group in optimizer.param_groups:
        places = [i for i, p in enumerate(group["params"]) if p in copies]
        entries = {**group, "params": [copies[group["params"][i]] for i in places]}
        if isinstance(entries.get("lr"), Tensor):
            entries["lr"] = entries["lr"].clone()
        if "param_names" in group:
            entries["param_names"] = [group["param_names"][i] for i in places]
        if state is not None and isinstance(optimizer, Optimizer):
            _name_dtypes(entries, [optimizer.state.get(group["params"][i], {}) for i in places])
        groups.append(entries)
    states: defaultdict[Tensor, State] = defaultdict(dict)
    for p, trial_param in copies.items():
        trial_param.grad = grad(p.grad.detach()).clone() if p.grad is not None else None
        if state is not None and p in optimizer.state:
            states[trial_param] = {
                key: state(p, key, x).clone() if isinstance(x, Tensor) else x
                for key, x in optimizer.state[p].items()
                if trial_param.dtype == p.dtype or not _is_beside(key)
            }
    return _like(optimizer, groups, states), copies


def _like(
    optimizer: torch.optim.Optimizer, groups: list[Group], states: defaultdict[Tensor, State]
) -> torch.optim.Optimizer:
    """Return an optimizer like another, with other parameters and state, and without hooks."""
    defaults = dict(optimizer.defaults)
    trial: Any = copy.copy(optimizer)  # which may be ours
    for name in optimizer.defaults.keys() - defaults.keys():
        del optimizer.defaults[name]  # torch writes into the copied dict
    # A copy has only the pickled attributes, and torch's optimizers do not pickle a subclass's own.
    for name, x in vars(optimizer).items():
        if name not in _NOT_COPIED and "_hooks" not in name:
            setattr(trial, name, x)
    trial.defaults, trial.param_groups, trial.state = defaults, groups, states
    trial._compared = ""  # other processes do not compare a trial with theirs
    return trial


def _name_dtypes(group: Group, states: list[State]) -> None:
    """Set the dtypes of moments that follow the weights, because the copies have another dtype."""
    keys = {"mu_dtype": "exp_avg", "nu_dtype": "exp_avg_sq", "accumulator_dtype": "momentum_buffer"}
    for entry, key in keys.items():
        dtypes = [state[key].dtype for state in states if key in state]
        if entry in group and group[entry] is None and dtypes:
            group[entry] = dtype_name(dtypes[0])


def take_step(trial: torch.optim.Optimizer) -> None:
    """Step a copy."""
    # The step of the class, because a scheduler patches the step of the object.
    type(trial).step(trial)


def weights_after(
    optimizer: torch.optim.Optimizer, params: list[Tensor], *, wide: bool, decay: bool = False
) -> dict[Tensor, Tensor]:
    """Return the weights after a step of copies, in float32 if `wide`.

    With `decay` it is a first step with zero gradients.
    """
    ours = isinstance(optimizer, Optimizer)

    def weight(x: Tensor) -> Tensor:
        return x.to(torch.float32) if wide else x

    def state(p: Tensor, key: str, x: Tensor) -> Tensor:
        return x.to(torch.float32) if wide and not ours and x.is_floating_point() else x

    def no_grad(g: Tensor) -> Tensor:
        return torch.zeros_like(weight(g))

    changes = (weight, no_grad, None) if decay else (weight, weight, state)
    trial, copies = copy_of(optimizer, params, *changes)
    take_step(trial)
    return {p: copy.detach() for p, copy in copies.items()}


def second_moments(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[Tensor, StoredMoment, StoredMoment, dict[str, Tensor]]]:
    """Yield (parameter, second moment, first moment, local state) for each of our second moments."""
    for _, param, plan in optimizer.plans() if isinstance(optimizer, Optimizer) else ():
        state = {key: local_part(x) for key, x in optimizer.state.get(param, {}).items()}
        yield from ((param, second, first, state) for second, first in plan.second_moments if state)


def rounded_to_nearest(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[Tensor]:
    """Return the parameters known to be rounded to nearest, without kept rounding errors."""
    if isinstance(optimizer, Optimizer):
        rules = _weight_rules(optimizer)
        return [p for p in params if isinstance(rules[p], NearestWeights)]
    if not getattr(optimizer, "rounds_to_nearest", True):  # of `round_weights`
        return []
    return [p for p in params if not any(_is_beside(key) for key in optimizer.state.get(p, {}))]


def compensated(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[Tensor]:
    """Return our parameters with a Kahan compensation."""
    if not isinstance(optimizer, Optimizer):
        return []
    rules = _weight_rules(optimizer)
    return [p for p in params if rules[p].name == "compensate"]


def _weight_rules(optimizer: Optimizer) -> dict[Tensor, WeightRule]:
    return {param: plan.weights.rule for _, param, plan in optimizer.plans()}


def is_moment(p: Tensor, key: str, x: object) -> bool:
    """Whether a state entry is an array of the weights' shape and not a part of the weights."""
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape == p.shape and not _is_beside(key)


def _is_beside(key: str) -> bool:
    return any(part in key for part in _KEPT_BESIDE)
