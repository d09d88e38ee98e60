"""The choices of param groups, and the checks when groups are added and read."""

import inspect

from halfstep.recipes import settings
from halfstep_torch.engine.groups import GroupChoices, Owner, ReadGroup, plain_value, rate_of
from halfstep_torch.engine.loss_scale import scale_of
from halfstep_torch.engine.plan import bind_rules
from halfstep_torch.leaves.checks import check_weight
from halfstep_torch.leaves.found_names import with_names_found
from halfstep_torch.leaves.group_names import (
    Group,
    check_named,
    check_names,
    count_nameless,
    nameless_seeds,
    with_names,
)
from halfstep_torch.leaves.memory import check_memory
from halfstep_torch.links.chain import HEADER
from halfstep_torch.links.dry_run import try_rule
from halfstep_torch.links.group_entries import check_decay, check_entries, check_maximize, check_torch_options
from halfstep_torch.links.link import is_ours
from halfstep_torch.numbers.schedules import Schedule

_CYCLE = ("base_momentum", "max_momentum")
"""Entries that OneCycleLR and CyclicLR write into groups, the bounds of betas[0] or of momentum."""


def choices_of(optimizer: Owner, param_group: Group) -> tuple[Group, GroupChoices]:
    """Return a new group with names and without its recipe, and its choices."""
    caller, schedule, rate, options = optimizer._name, None, None, dict(optimizer._tx.options)
    if isinstance(param_group, dict):
        lr = param_group.get("lr", optimizer._schedule)
        if callable(lr):
            schedule, rate = Schedule(lr), rate_of(caller, lr, 0)
            param_group = {**param_group, "lr": rate}
        if optimizer._given_names is not None and "params" in param_group:
            params = with_names(caller, param_group["params"], optimizer._given_names)
            param_group = {**param_group, "params": params, **({} if params else {"param_names": []})}
        elif optimizer.param_groups and "param_names" in optimizer.param_groups[0]:
            [param_group] = with_names_found(caller, [param_group])
            check_named(caller, param_group)
        if "recipe" in param_group and optimizer.named is not None:
            # The settings of the recipe; entries of the group itself take precedence.
            recipe = param_group["recipe"]
            chosen = {} if recipe is None else settings(caller, recipe, optimizer.named.moments)
            param_group = {**chosen, **{key: x for key, x in param_group.items() if key != "recipe"}}
        options = {name: param_group.get(name, value) for name, value in options.items()}
    return param_group, GroupChoices(optimizer._tx.make(**options), options, schedule, rate)


def settle_new_group(optimizer: Owner) -> None:
    """Complete the last group. Raise an error if its entries do not fit."""
    group, choices = optimizer.param_groups[-1], optimizer._choices[-1]
    choices.first_lr = group.get("lr")
    if "param_names" not in group:  # then its words differ from earlier optimizers with the same seeds
        chain_seeds = [link.seed for link in choices.chain.links]
        if optimizer.nameless_before is None:
            optimizer.nameless_before = count_nameless(chain_seeds)
        choices.chain = choices.chain.with_seeds(nameless_seeds(chain_seeds, optimizer.nameless_before))
    _check_new_group(optimizer)
    group.update({key: plain_value(group[key]) for key in optimizer.defaults})
    group[HEADER] = choices.chain.header()


def read_group(optimizer: Owner, index: int, saved: Group | None = None) -> ReadGroup:
    """Return a group with its current entries, and the dtypes of a saved group if there is one."""
    caller, entries, choices = optimizer._name, optimizer.param_groups[index], optimizer._choices[index]
    choices.check_unchanged(caller, index, entries)
    check_maximize(caller, index, entries["maximize"])
    check_written(optimizer, index)
    if saved is not None:
        entries = {**entries, **{key: value for key, value in saved.items() if key.endswith("_dtype")}}
    capturable = bool(entries.get("capturable"))
    return ReadGroup(caller, index, entries, choices, scale_of(optimizer), optimizer._rates, capturable)


def _check_new_group(optimizer: Owner) -> None:
    """Raise an error if the entries of the last group do not fit."""
    caller, last = optimizer._name, len(optimizer.param_groups) - 1
    group, named = optimizer.param_groups[last], list(optimizer._named())
    # A frozen parameter may have any dtype. It is checked when it first has a gradient.
    named = [(i, name, param) for i, name, param in named if param.requires_grad or param.grad is not None]
    of_group = [(name, param) for i, name, param in named if i == last]
    for name, param in of_group:
        check_weight(caller, name, param)
        optimizer._compile.check(caller, param.device)
    if len(set(group["params"])) < len(group["params"]):
        raise ValueError(f"{caller}: a parameter appears twice in param group {last}. Pass it once.")
    check_memory(caller, ((name, param) for _, name, param in named))
    check_written(optimizer, last)
    check_decay(caller, last, group, optimizer.decoupled_decay)
    check_names(caller, optimizer.param_groups)
    read = optimizer._group(last)
    for info in {read.info(name, param) for name, param in of_group}:
        bind_rules(read.links, caller, read.values, info)
        for link, h in zip(read.links, read.values, strict=True):
            if not is_ours(type(link.rule)):
                try_rule(caller, link, h, info)


def check_written(optimizer: Owner, index: int) -> None:
    """Raise for entries of a group that have no effect, also for entries written during the run."""
    caller, own = optimizer._name, set(optimizer.defaults)
    group, choices = optimizer.param_groups[index], optimizer._choices[index]
    entries = (frozenset(group), *(group.get(key) for key in _CYCLE))
    if choices.checked == entries:
        check_torch_options(caller, {key: x for key, x in group.items() if key not in own})
        return
    followed = {key: x for key, x in group.items() if key != "recipe" or not _follows(optimizer, group)}
    check_entries(caller, followed, own, set(_arguments(type(optimizer))))
    _check_cycle(optimizer, index)
    choices.checked = entries


def _follows(optimizer: Owner, group: Group) -> bool:
    """Whether a group's recipe agrees with its entries, as after ZeRO wrote the recipe there again."""
    recipe = group["recipe"]
    if recipe is None or optimizer.named is None:
        return recipe is None
    chosen = settings(optimizer._name, recipe, optimizer.named.moments)
    return all(group.get(key) == plain_value(x) for key, x in chosen.items())


def _check_cycle(optimizer: Owner, index: int) -> None:
    """Raise ValueError if a scheduler will change a momentum that the group's moments cannot follow."""
    caller, group = optimizer._name, optimizer.param_groups[index]
    for end in _CYCLE:
        momentum = group.get(end)
        if not isinstance(momentum, float) or not {"betas", "momentum"} & set(optimizer.defaults):
            continue
        entries = {**group, "momentum": momentum}
        if "betas" in optimizer.defaults:
            entries = {**group, "betas": (momentum, *tuple(group["betas"])[1:])}
        read = ReadGroup(caller, index, entries, optimizer._choices[index])
        of_group = ((name, param) for i, name, param in optimizer._named() if i == index)
        try:
            for info in {read.info(name, param) for name, param in of_group}:
                bind_rules(read.links, caller, read.values, info)
        except ValueError as error:
            raise ValueError(
                f"{error} A scheduler of param group {index} has {end}={momentum}, which the run would "
                "reach later. Pass it cycle_momentum=False, or another base_momentum."
            ) from error


def check_choices(optimizer: Owner) -> None:
    """Raise ValueError if a link selects parameters and finds none."""
    for j, link in enumerate(optimizer._choices[0].chain.links):
        if link.reads_names:
            groups = [optimizer._group(i) for i in range(len(optimizer.param_groups))]
            chosen = [
                groups[i].info(name, param)
                for i, name, param in optimizer._named()
                if groups[i].touches(name, param)[j]
            ]
            link.check_choice(optimizer._name, groups[0].values[j], chosen)


def _arguments(kind: type) -> dict[str, inspect.Parameter]:
    """Return the arguments of a class of optimizers and of its bases, up to a class of this package.

    A subclass may pass them on by `**options`, or set them itself.
    """
    arguments: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" in vars(base):
            arguments = {**inspect.signature(base.__init__).parameters, **arguments}
            if is_ours(base):
                break
    return arguments
