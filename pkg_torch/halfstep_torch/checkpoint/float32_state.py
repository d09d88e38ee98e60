"""The optimizer's state in float32 and in torch.optim's form, to move a run in and out.

Our own state dict resumes bit for bit, and only if formats agree (`state_dict.py`). These functions write the
form of torch's own optimizers, and read it into any format.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from halfstep_torch.checkpoint.other_libraries import in_torch_form
from halfstep_torch.distributed.collectives import gather_whole
from halfstep_torch.distributed.placement import placed_copy
from halfstep_torch.distributed.shards import is_sharded
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.signals import SignalsWait, between_steps
from halfstep_torch.engine.step_numbers import stream_keys
from halfstep_torch.leaves.checks import LAST_STEP, check_has_numbers
from halfstep_torch.leaves.group_names import Group, StateDict
from halfstep_torch.leaves.names import leaf_names
from halfstep_torch.links.bound_rule import BoundRule, StepMoment
from halfstep_torch.links.group_entries import check_decay
from halfstep_torch.numbers.random_words import as_int32
from halfstep_torch.optimizer import Optimizer, check_optimizer
from halfstep_torch.optimizer_state.form import (
    SavedState,
    check_form,
    check_group_counts,
    check_parameter_counts,
    saved_step,
)
from halfstep_torch.optimizer_state.others_state import others_of
from halfstep_torch.optimizer_state.state_dict import replace_groups
from halfstep_torch.sharded.how_stepped import state_placements
from halfstep_torch.sharded.slots import new_state

# The entries of a param group in torch's form, without formats of state.
_NUMBERS = ("lr", "betas", "eps", "weight_decay", "maximize", "momentum", "dampening")


@between_steps
@torch.no_grad()
def float32_state_dict(optimizer: Optimizer) -> StateDict:
    """Return the state in float32, as torch's own optimizers write it.

    `torch.optim.AdamW(...).load_state_dict` loads the state of an `AdamW`, and `Adam` and `SGD` likewise.
    `float32_params` returns the weights. Moments are decoded without rounding. Moments of a DTensor are
    DTensors with its placement, so all processes call this together, and gather the state of one parameter
    after another.

    Args:
        optimizer: an optimizer of this package.

    Returns:
        A state dict. Each parameter has `step` (except for SGD) and float32 copies of its moments. Each group
        has its numbers. If the learning rate is a function, the group has the rate of the last step.

    Raises:
        TypeError: if it is not an `Optimizer`.
        ValueError: if an `eps_root` is not 0, because torch has no such argument.
        RuntimeError: if the last load failed while it copied.

    Example:
        >>> import halfstep_torch as hs
        >>> model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.AdamW(model.named_parameters())
        >>> model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> theirs = torch.optim.AdamW(torch.nn.Linear(2, 1).parameters())
        >>> theirs.load_state_dict(hs.float32_state_dict(optimizer))

    Source: ours.
    """
    optimizer = check_optimizer("float32_state_dict", optimizer)
    optimizer.check_loaded()
    groups, state, index = [], {}, 0
    states = decoded_states(optimizer, set(optimizer.state))
    for i, group in enumerate(optimizer.param_groups):
        ids = list(range(index, index + len(group["params"])))
        index += len(ids)
        groups.append({**_numbers_of(optimizer, i), "params": ids})
        if "param_names" in group:
            groups[-1]["param_names"] = list(group["param_names"])
        for place, param in zip(ids, group["params"], strict=True):
            if param in states:
                state[place] = states[param]
    return {"state": state, "param_groups": groups}


def decoded_states(optimizer: Optimizer, params: Collection[Tensor]) -> dict[Tensor, dict[str, Tensor]]:
    """Return the states of parameters in torch's form."""
    return {
        param: _decoded(name, param, plan, optimizer.state[param])
        for name, param, plan in optimizer.plans()
        if param in params and "step" in optimizer.state[param]
    }


@between_steps
@torch.no_grad()
def load_float32_state_dict(optimizer: Optimizer, state_dict: SavedState) -> None:
    """Load a state in torch's form, from `torch.optim.AdamW` or a float32 run of halfstep.

    Each moment is rounded once to its format in this optimizer, stochastically if steps round it so, with the
    random words of the saved step. Numbers of the groups (`lr`, `betas`, `eps`, `weight_decay`, ...) come
    from the state dict, as in torch. Seeds, formats, and arrays beside the weights do not change. Weights are
    not included, so load the model or call `set_float32_params`. If there is an error, nothing is changed.

    Args:
        optimizer: the optimizer to load into.
        state_dict: a state dict of `torch.optim.AdamW`, `Adam` or `SGD` in any floating dtype, or the result
            of `float32_state_dict`. State dicts from torchao (`AdamW8bit`, `AdamW4bit`, `AdamWFp8`),
            bitsandbytes (8-bit optimizers), torchastic and adamw_bf16 can be loaded too. For adamw_bf16 also
            pass the float32 weights, `p.float() + shift`, to `set_float32_params`. Parameters are matched by
            name within their group or, if either side has no names, by position.

    Raises:
        TypeError: if `optimizer` is not an `Optimizer`, or `state_dict` not a state dict.
        ValueError: if groups, parameters, shapes or the names of moments differ, or it has `amsgrad`,
            `dampening` or another kind of weight decay. Nothing is changed.

    Example:
        >>> import halfstep_torch as hs
        >>> wide = torch.nn.Linear(2, 1)
        >>> theirs = torch.optim.AdamW(wide.parameters())
        >>> wide(torch.ones(1, 2)).sum().backward()
        >>> theirs.step()
        >>> model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
        >>> _ = model.load_state_dict(wide.state_dict())
        >>> optimizer = hs.AdamW(model.named_parameters())
        >>> hs.load_float32_state_dict(optimizer, theirs.state_dict())
        >>> optimizer.state[model.weight]["exp_avg"].dtype
        torch.bfloat16

    Source: ours.
    """
    caller = "load_float32_state_dict"
    optimizer = check_optimizer(caller, optimizer)
    way_out = "Pass what state_dict() of torch.optim.AdamW, or float32_state_dict, returned."
    check_form(caller, state_dict, way_out)
    saved_groups = list(state_dict["param_groups"])
    _check_groups(caller, optimizer.param_groups, saved_groups)
    for i, group in enumerate(saved_groups):
        check_decay(caller, i, group, optimizer.decoupled_decay)
    groups, states = [], {}
    plans = iter(optimizer.plans())
    for i, (group, saved_group) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        taken = {key: saved_group[key] for key in _taken(optimizer, i, saved_group)}
        plain = {k: x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for k, x in taken.items()}
        groups.append({**group, **plain})
        for saved_id in _ids(caller, i, group, saved_group):
            name, param, plan = next(plans)
            saved = in_torch_form(state_dict["state"].get(saved_id) or {}, list(_moment_keys(plan)))
            _check_saved(caller, name, param, plan, saved)
            state = _encoded(optimizer, name, param, plan, saved) if saved else {}
            others = others_of(optimizer.state.get(param, {}), optimizer._choices[i].chain)
            states[param] = {**optimizer._home.placed(param, plan, state), **others}
    with SignalsWait():
        replace_groups(optimizer.param_groups, groups, lambda: list(optimizer.plans()))
        optimizer.state.update(states)
        optimizer.drop_launches("a float32 state dict was loaded")


def _words(name: str, param: Tensor, plan: Plan, step: int) -> list[list]:
    """Return the random words of every rule of a plan at a step, by source."""
    keys = as_int32(stream_keys(plan.streams, [step], [name])[0]).tolist()
    words_of = plan.stages[0].array_words(keys, param.device)
    return [[words_of(*source) for source in sources] for sources in plan.sources]


def _step_moments(rule: BoundRule, state: Mapping[str, Tensor], words: list) -> dict[str, StepMoment]:
    """Return the moments of one rule by key. A moment in units of another comes after it."""
    flat = {key: state[key].reshape(-1) for key in rule.arrays}
    keys = {stored.name: stored.key for stored in rule.moments}
    return {keys[name]: moment for name, moment in rule.step_moments(flat, words, None).items()}


def _decoded(name: str, param: Tensor, plan: Plan, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a parameter in torch's form."""
    step = int(kept["step"])
    state: dict[str, Tensor] = {}
    # The words of the next step, which reads the state.
    words = _words(name, param, plan, min(step + 1, LAST_STEP))
    kept = _whole({key: kept[key] for rule in plan.rules for key in rule.arrays})
    kept = {key: x.to(param.device) for key, x in kept.items()}
    for rule, of_rule in zip(plan.rules, words, strict=True):
        for key, moment in _step_moments(rule, kept, of_rule).items():
            value = moment.value.clone().view(_shape(rule, key, param))
            state[key] = placed_copy(value, param, param.placements) if is_sharded(param) else value
    if set(state) == {"momentum_buffer"}:
        return state
    return {"step": torch.tensor(float(step), device="cpu"), **state}


def _encoded(
    optimizer: Optimizer, name: str, param: Tensor, plan: Plan, saved: SavedState
) -> dict[str, Tensor]:
    """Return the state of a parameter in the formats of its plan."""
    step = int(saved.get("step", 0))
    beside = {
        key: array for key, array in optimizer.state.get(param, {}).items() if key in plan.weights.arrays
    }
    count = {"step": torch.tensor(step, dtype=torch.int64, device="cpu")}
    state, placements = {**new_state(param, plan), **beside, **count}, state_placements(plan, param)
    words = _words(name, param, plan, max(step, 1))
    for rule, of_rule in zip(plan.rules, words, strict=True):
        fresh = {
            key: spec.new(torch.empty(param.shape, device=param.device)) for key, spec in rule.arrays.items()
        }
        for key, moment in _step_moments(rule, fresh, of_rule).items():
            x = _whole({key: saved[key].detach()})[key].to(param.device, torch.float32)
            moment.round(x.contiguous().view(-1))
            for array_key, array in moment.arrays.items():
                whole = array.view(state[array_key].shape)
                state[array_key] = placed_copy(whole, param, placements[array_key]) if placements else whole
    return state


def _whole(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole arrays, with DTensors gathered from all processes."""
    sharded = {key: array for key, array in arrays.items() if is_sharded(array)}
    gathered = gather_whole(list(sharded.values())) if sharded else []
    return {**arrays, **dict(zip(sharded, gathered, strict=True))}


def _shape(rule: BoundRule, key: str, param: Tensor) -> tuple[int, ...]:
    return rule.arrays[key].values_shape(tuple(param.shape))


def _moment_keys(plan: Plan) -> dict[str, BoundRule]:
    return {moment.key: rule for rule in plan.rules for moment in rule.moments}


def _numbers_of(optimizer: Optimizer, index: int) -> Group:
    """Return the entries of a group that torch has too, as plain numbers."""
    group = optimizer.param_groups[index]
    if group.get("eps_root"):
        raise ValueError(
            f"float32_state_dict: eps_root={group['eps_root']} in param group {index}, which torch has not. "
            "Set it to 0."
        )
    numbers = {key: group[key] for key in _NUMBERS if key in group}
    return {**numbers, **({"lr": float(numbers["lr"])} if "lr" in numbers else {})}


def _taken(optimizer: Optimizer, index: int, saved: SavedState) -> list[str]:
    """Return the keys of a saved group to load, the entries that are numbers in this group."""
    group = optimizer.param_groups[index]
    return [
        key for key in _NUMBERS if key in saved and type(group.get(key)) in (int, float, bool, tuple, list)
    ]


def _check_groups(caller: str, groups: Sequence[Mapping], saved: Sequence[Mapping]) -> None:
    check_group_counts(caller, len(saved), len(groups))
    for i, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
        for name in ("amsgrad", "dampening"):
            if saved_group.get(name) and not (group.get(name)):
                raise ValueError(
                    f"{caller}: {name}={saved_group[name]} in param group {i} of the state dict; it is not "
                    "here. Start from a fresh state."
                )
        check_parameter_counts(caller, i, len(saved_group["params"]), len(group["params"]))


def _ids(caller: str, index: int, group: Mapping, saved: Mapping) -> list[int | str]:
    """Return the saved ids of a group's parameters, in this optimizer's order."""
    names, saved_names = (leaf_names(entries.get("param_names", ())) for entries in (group, saved))
    if not names or len(saved_names) != len(saved["params"]):
        return list(saved["params"])
    ids = dict(zip(saved_names, saved["params"], strict=True))
    if missing := [name for name in names if name not in ids]:
        raise ValueError(
            f"{caller}: parameter {missing[0]!r} is not in group {index} of the state dict. "
            "Pass the parameters with the names of the run that was saved."
        )
    return [ids[name] for name in names]


def _check_saved(caller: str, name: str, param: Tensor, plan: Plan, saved: SavedState | None) -> None:
    keys = _moment_keys(plan)
    if not saved:
        return
    if set(saved) - {"step"} != set(keys):
        raise ValueError(
            f"{caller}: the state of {name!r} holds {', '.join(sorted(saved))}; this optimizer reads "
            f"{', '.join(['step', *sorted(keys)])}. Pass the state of the same kind of optimizer, in float32."
        )
    saved_step(caller, name, saved.get("step", 0))
    for key, rule in keys.items():
        array, shape = saved[key], _shape(rule, key, param)
        if not isinstance(array, Tensor) or not array.is_floating_point() or tuple(array.shape) != shape:
            found = f"{array.dtype}{list(array.shape)}" if isinstance(array, Tensor) else type(array).__name__
            raise ValueError(
                f"{caller}: {key} of {name!r} is {found}, expected floats of shape {list(shape)}. "
                "Build the model of the run that was saved."
            )
        check_has_numbers(caller, f"{key} of {name!r}", array, param)
