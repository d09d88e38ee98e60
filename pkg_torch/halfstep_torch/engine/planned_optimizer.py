"""The parameters of an optimizer with a plan for each: param groups, names, chains; not how a step is run."""

import collections
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from halfstep.recipes import settings
from halfstep.rule import Rule
from halfstep.rules.named import Named
from halfstep_torch.chain import Chain, ChainByOptions, chain
from halfstep_torch.dry_run import try_rule
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.groups import GroupChoices, ReadGroup, plain_value, rate_of
from halfstep_torch.engine.loss_scale import scale_of
from halfstep_torch.engine.plan import Plan, bind_rules
from halfstep_torch.leaves import check_memory, check_params, check_weight
from halfstep_torch.link import Link, is_ours
from halfstep_torch.names import with_names_found
from halfstep_torch.optimizer_state.byte_form import as_bytes, from_bytes
from halfstep_torch.optimizer_state.form import HEADER
from halfstep_torch.optimizer_state.group_entries import (
    NamedMembers,
    check_decay,
    check_entries,
    check_maximize,
    check_named,
    check_names,
    check_torch_options,
    count_nameless,
    nameless_seeds,
    parameter_names,
    with_names,
)
from halfstep_torch.optimizer_state.state_dict import make_header

_CYCLE = ("base_momentum", "max_momentum")
"""What OneCycleLR and CyclicLR write into groups: the ends between which they take betas[0] or momentum."""


def _arguments(kind: type) -> dict[str, inspect.Parameter]:
    """Return the arguments of a class of optimizers, and those of its bases, up to one of this package.

    A subclass may hand them on by `**options`, or set them itself.
    """
    arguments: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" in vars(base):
            arguments = {**inspect.signature(base.__init__).parameters, **arguments}
            if is_ours(base):
                break
    return arguments


class PlannedOptimizer(torch.optim.Optimizer):
    """What `Optimizer` knows of its parameters before it steps them.

    `decoupled_decay` tells how weight decay is done; None where a group of torch does not say that. `named`
    is what a named optimizer is made of.
    """

    named: ClassVar[Named | None] = None
    decoupled_decay: ClassVar[bool | None] = None
    nameless_before: int | None = None
    """How many optimizers without names were built before of its seeds; None where parameters have names."""

    def __init__(
        self,
        params: Iterable,
        tx: Chain | Rule | ChainByOptions | None = None,
        *,
        maximize: bool = False,
        compile: bool | Literal["auto"] = "auto",
        names: Iterable | None = None,
        state_device: str | torch.device | None = None,
        **others: Any,
    ) -> None:
        if tx is None or others:
            problem = f"{next(iter(others))} is no argument" if others else "tx is missing"
            raise TypeError(
                f"{self._name}: {problem}: a chain decides what a step does, and its numbers. Pass "
                "chain(scale_by_adam(), scale_by_learning_rate(1e-3), round_stochastically()), or use AdamW."
            )
        self._tx = tx if isinstance(tx, ChainByOptions) else ChainByOptions(functools.partial(chain, tx), {})
        self._compile = CompileChoice(self._name, compile)
        check_params(self._name, params)
        self._given_names = parameter_names(self._name, names) or None
        params = with_names_found(self._name, params) if names is None else params
        self._choices: list[GroupChoices] = []
        self._compared = False
        if state_device is not None and str(state_device) != "cpu":
            raise ValueError(
                f"{self._name}: state_device={state_device!r} is no place for state. "
                'Use "cpu", or None for the device of each weight.'
            )
        self._state_on_host = state_device is not None
        entries = {**self._tx.others, **self._tx.make(**self._tx.options).entries}
        entries |= {**self._tx.options, "maximize": maximize}
        self._schedule = entries["lr"] if callable(entries.get("lr")) else None
        if self._schedule is not None:
            entries["lr"] = rate_of(self._name, self._schedule, 0)
        super().__init__(params, {key: plain_value(value) for key, value in entries.items()})
        self._check_choices()

    @functools.cached_property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _chain(self) -> Chain:
        """The chain of the first group."""
        return self._choices[0].chain

    def __getstate__(self) -> dict[str, Any]:
        fields = {
            name: getattr(self, name)
            for name in (
                "_tx",
                "_compile",
                "_schedule",
                "_choices",
                "_state_on_host",
                "_half_loaded",
                "nameless_before",
            )
        }
        pickled = super().__getstate__()
        # torch writes 8-bit floats into a pickle, and cannot read them: they go as bytes, with their dtypes.
        dtypes = {
            param: {key: x.dtype for key, x in entry.items() if isinstance(x, Tensor)}
            for param, entry in self.state.items()
        }
        states = {param: as_bytes(entry) for param, entry in self.state.items()}
        fields |= {"state": collections.defaultdict(dict, states), "_state_dtypes": dtypes}
        return {**pickled, **fields, "_given_names": None, "_compared": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        dtypes = state.pop("_state_dtypes", {})
        super().__setstate__(state)
        for param, of_arrays in dtypes.items():
            self.state[param] = from_bytes(self.state[param], of_arrays)
        self.defaults.pop("differentiable", None)  # torch's own optimizers have it; no group of ours does

    def __repr__(self) -> str:
        """As torch's, but for names and what is for state dicts."""
        lines = [f"{self._name} ("]
        for i, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {i}")
            lines += [f"    {key}: {group[key]}" for key in sorted(self.defaults)]
        return "\n".join([*lines, ")"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with its own values of the entries if it has any.

        `param_group` has `params`, and any of the entries: numbers of the links, `mu_dtype` and the like and,
        of the named classes, `param_storage`, roundings and `recipe`. Where `lr` is a function of the step,
        the group shows the number of the last one. Nothing is added if a value is of a wrong type
        (TypeError), out of range, or nothing reads it (ValueError).
        """
        schedule, rate, options = None, None, dict(self._tx.options)
        if isinstance(param_group, dict):
            lr = param_group.get("lr", self._schedule)
            if callable(lr):
                schedule, rate = lr, rate_of(self._name, lr, 0)
                param_group = {**param_group, "lr": rate}
            if self._given_names is not None and "params" in param_group:
                params = with_names(self._name, param_group["params"], self._given_names)
                param_group = {**param_group, "params": params}
            elif self.param_groups and "param_names" in self.param_groups[0]:
                [param_group] = with_names_found(self._name, [param_group])
                check_named(self._name, param_group)
            param_group = self._without_recipe(param_group)
            options = {name: param_group.get(name, value) for name, value in options.items()}
        choices = GroupChoices(self._tx.make(**options), options, schedule, rate)
        super().add_param_group(param_group)
        choices.first_lr = self.param_groups[-1].get("lr")
        if "param_names" not in self.param_groups[-1]:
            choices.chain = self._with_words_of_its_own(choices.chain)
        self._choices.append(choices)
        try:
            self._check_new_group(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            self._choices.pop()
            raise

    def _with_words_of_its_own(self, chain: Chain) -> Chain:
        """Return the chain of a group without names with other words than optimizers of its seeds have."""
        chain_seeds = [link.seed for link in chain.links]
        if self.nameless_before is None:
            self.nameless_before = count_nameless(chain_seeds)
        return chain.with_seeds(nameless_seeds(chain_seeds, self.nameless_before))

    def _without_recipe(self, param_group: dict[str, Any]) -> dict[str, Any]:
        """Return a group with the entries for which its recipe stands; those that it has itself win."""
        if "recipe" not in param_group or self.named is None:
            return param_group
        rest = {key: value for key, value in param_group.items() if key != "recipe"}
        recipe = param_group["recipe"]
        return rest if recipe is None else {**settings(self._name, recipe, self.named.moments), **rest}

    def _check_new_group(self, group: dict[str, Any]) -> None:
        last = len(self.param_groups) - 1
        for i, name, param in self._named():
            if i == last:
                check_weight(self._name, name, param)
                self._compile.check(self._name, param.device)
        if len(set(group["params"])) < len(group["params"]):
            raise ValueError(f"{self._name}: a parameter appears twice in param group {last}. Pass it once.")
        check_memory(self._name, ((name, param) for _, name, param in self._named()))
        self._check_entries(last)
        check_decay(self._name, last, group, self.decoupled_decay)
        check_names(self._name, self.param_groups)
        read = self._group(last)
        for info in {read.info(name, param) for i, name, param in self._named() if i == last}:
            bind_rules(read.links, self._name, read.values, info)
            for link, h in zip(read.links, read.values, strict=True):
                if not is_ours(type(link.rule)):
                    try_rule(self._name, link, h, info)
        group.update({key: plain_value(group[key]) for key in self.defaults})
        group[HEADER] = make_header(self._choices[last].chain)

    def _follows(self, group: Mapping[str, Any]) -> bool:
        """Whether a group has the entries for which its recipe stands, as ZeRO writes it there once more."""
        recipe = group["recipe"]
        if recipe is None or self.named is None:
            return recipe is None
        chosen = settings(self._name, recipe, self.named.moments)
        return all(group.get(key) == plain_value(x) for key, x in chosen.items())

    def _check_entries(self, index: int) -> None:
        """Refuse entries of a group that nothing would follow, those too that were written in mid-run."""
        group, choices = self.param_groups[index], self._choices[index]
        entries = (frozenset(group), *(group.get(key) for key in _CYCLE))
        if choices.checked != entries:
            arguments = _arguments(type(self))
            followed = {key: x for key, x in group.items() if key != "recipe" or not self._follows(group)}
            check_entries(self._name, followed, set(self.defaults), set(arguments))
            self._check_cycle(index)
            choices.checked = entries
        else:
            check_torch_options(self._name, {key: x for key, x in group.items() if key not in self.defaults})

    def _check_cycle(self, index: int) -> None:
        """Refuse a scheduler that will take the momentum of a group where its moments cannot follow."""
        group, choices = self.param_groups[index], self._choices[index]
        for end in _CYCLE:
            momentum = group.get(end)
            if not isinstance(momentum, float) or not {"betas", "momentum"} & set(self.defaults):
                continue
            entries = {**group, "momentum": momentum}
            if "betas" in self.defaults:
                entries = {**group, "betas": (momentum, *tuple(group["betas"])[1:])}
            read = ReadGroup(self._name, index, entries, choices)
            leaves = self._members.leaves(self._name, self.param_groups)[index]
            named = zip(leaves, group["params"], strict=True)
            try:
                for info in {read.info(name, param) for name, param in named}:
                    bind_rules(read.links, self._name, read.values, info)
            except ValueError as error:
                raise ValueError(
                    f"{error} A scheduler of param group {index} has {end}={momentum}, which the run would "
                    "reach later. Pass it cycle_momentum=False, or another base_momentum."
                ) from error

    def _check_choices(self) -> None:
        """Raise ValueError if a link was to choose among the parameters, and chooses nothing."""
        named = list(self._named())
        for j, link in enumerate(self._chain.links):
            if link.reads_names:
                groups = [self._group(i) for i in range(len(self.param_groups))]
                chosen = [
                    groups[i].info(name, param)
                    for i, name, param in named
                    if groups[i].applies_to(name, param)[j]
                ]
                link.check_choice(self._name, groups[0].values[j], chosen)

    def _group(self, index: int, saved: Mapping[str, Any] | None = None) -> ReadGroup:
        """Return a group as it stands, with the dtypes of a saved group if there is one."""
        entries, choices = self.param_groups[index], self._choices[index]
        choices.check_unchanged(self._name, index, entries)
        check_maximize(self._name, index, entries["maximize"])
        self._check_entries(index)
        if saved is not None:
            dtypes = {key: value for key, value in saved.items() if key.endswith("_dtype")}
            entries = {**entries, **dtypes}
        return ReadGroup(self._name, index, entries, choices, scale_of(self))

    def _named(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (group index, leaf name, parameter) of all parameters (contract W7)."""
        if len(self.param_groups) != len(self._choices):
            raise ValueError(
                f"{self._name}: {len(self._choices)} param groups were added, and there are "
                f"{len(self.param_groups)}. Use add_param_group; empty a group's params to drop it."
            )
        leaves = self._members.leaves(self._name, self.param_groups)
        for i, (group, names) in enumerate(zip(self.param_groups, leaves, strict=True)):
            for name, param in zip(names, group["params"], strict=True):
                yield i, name, param

    @functools.cached_property
    def _members(self) -> NamedMembers:
        return NamedMembers()

    def plans(self) -> Iterator[tuple[str, Tensor, Plan]]:
        """Yield (leaf name, parameter, plan of its step) of all parameters, as their groups stand."""
        group_of = functools.cache(self._group)
        for i, name, param in self._named():
            yield name, param, group_of(i).plan(name, param)

    def bound_links(self) -> list[list[tuple[Link, Any]]]:
        """Return of every param group the links of its chain, each with the values that it reads there."""
        groups = [self._group(i) for i in range(len(self.param_groups))]
        return [list(zip(group.links, group.values, strict=True)) for group in groups]
