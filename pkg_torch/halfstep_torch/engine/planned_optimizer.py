"""The parameters of an optimizer with a plan for each: param groups, names, chains; not how a step is run."""

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.rule import Rule
from halfstep_torch.chain import Chain, ChainByOptions, chain
from halfstep_torch.engine.compiler import Compile
from halfstep_torch.engine.groups import (
    HEADER,
    GroupChoices,
    check_decay,
    check_entries,
    check_names,
    parameter_names,
    plain_value,
    rate_of,
    with_names,
)
from halfstep_torch.engine.leaves import check_memory, check_weight, leaf_name
from halfstep_torch.engine.loss_scale import UNSCALE, scale_of
from halfstep_torch.engine.plan import Plan, bind_rules, make_plan
from halfstep_torch.engine.state_dict import make_header
from halfstep_torch.link import Link, ParamInfo
from halfstep_torch.rule_check import try_rule


class PlannedOptimizer(torch.optim.Optimizer):
    """What `Optimizer` knows of its parameters before it steps them.

    Attributes:
        decoupled_decay: whether weight decay is; None where a group of torch does not say that.
    """

    decoupled_decay: ClassVar[bool | None] = None

    def __init__(
        self,
        params: Iterable,
        tx: Chain | Rule | ChainByOptions,
        *,
        maximize: bool = False,
        compile: bool | str = "auto",
        names: Iterable | None = None,
    ) -> None:
        self._tx = tx if isinstance(tx, ChainByOptions) else ChainByOptions(functools.partial(chain, tx), {})
        self._compile = Compile(self._name, compile)
        self._given_names = parameter_names(self._name, names)
        self._choices: list[GroupChoices] = []
        self._compared = False
        self._applies: dict[tuple[int, str], tuple[bool, ...]] = {}
        entries = {**self._tx.make(**self._tx.options).entries, **self._tx.options, "maximize": maximize}
        self._schedule = entries["lr"] if callable(entries.get("lr")) else None
        if self._schedule is not None:
            entries["lr"] = rate_of(self._name, self._schedule, 0)
        super().__init__(params, {key: plain_value(value) for key, value in entries.items()})
        self._check_choices()

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _chain(self) -> Chain:
        """The chain of the first group."""
        return self._choices[0].chain

    def __getstate__(self) -> dict[str, Any]:
        own = ("_tx", "_compile", "_schedule", "_choices", "_applies")
        state = {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}
        return {**state, "_given_names": None, "_compared": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
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

        Args:
            param_group: `params`, and any of the entries: numbers of the links, `mu_dtype` and the like and,
                of the named classes, `param_storage` and roundings. Where `lr` is a function of the step,
                the group shows the number of the last one.

        Raises:
            TypeError: if a parameter or a value is of a wrong type; nothing is added.
            ValueError: if a value is out of range, or an entry one that nothing reads; nothing is added.
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
            options = {name: param_group.get(name, value) for name, value in options.items()}
        choices = GroupChoices(self._tx.make(**options), options, schedule, rate)
        super().add_param_group(param_group)
        self._choices.append(choices)
        try:
            self._check_new_group(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            self._choices.pop()
            raise

    def _check_new_group(self, group: dict[str, Any]) -> None:
        last = len(self.param_groups) - 1
        for i, name, param in self._named():
            if i == last:
                check_weight(self._name, name, param)
                self._compile.check(self._name, param.device)
        if len(set(group["params"])) < len(group["params"]):
            raise ValueError(f"{self._name}: a parameter appears twice in param group {last}. Pass it once.")
        check_memory(self._name, ((name, param) for _, name, param in self._named()))
        arguments = set(inspect.signature(type(self)).parameters)
        check_entries(self._name, group, set(self.defaults), arguments)
        check_decay(self._name, last, group, self.decoupled_decay)
        check_names(self._name, self.param_groups)
        values, links = self._read(last), self._choices[last].chain.links
        for info in {self._info(i, name, param) for i, name, param in self._named() if i == last}:
            bind_rules(links, self._name, values, info)
            for link, h in zip(links, values, strict=True):
                if type(link.rule).__module__.split(".")[0] not in ("halfstep", "halfstep_torch"):
                    try_rule(self._name, link, h, info)
        group.update({key: plain_value(group[key]) for key in self.defaults})
        group[HEADER] = make_header(self._choices[last].chain)

    def _check_choices(self) -> None:
        """Raise ValueError if a link was to choose among the parameters, and chooses nothing."""
        named = list(self._named())
        for j, link in enumerate(self._chain.links):
            if link.reads_names:
                values = self._read(0)[j]
                applied = [(i, name, p) for i, name, p in named if self._applies_to(i, name, p)[j]]
                link.check_choice(self._name, values, [self._info(*one) for one in applied])

    def _info(self, group: int, name: str, param: Tensor) -> ParamInfo:
        """Return what decides how a parameter is stepped."""
        named = any(link.reads_names for link in self._choices[group].chain.links)
        return ParamInfo(param.dtype, param.shape, name if named else "")

    def _read(self, index: int, saved: Mapping[str, Any] | None = None) -> list[Any]:
        """Return of each link the checked values of a group's entries; of dtypes, those of a saved group."""
        group, choices = self.param_groups[index], self._choices[index]
        choices.check_unchanged(self._name, index, group)
        if saved is not None:
            group = {**group, **{key: value for key, value in saved.items() if key.endswith("_dtype")}}
        if choices.schedule is not None:
            group = {**group, "lr": choices.rate(self._name, index, group)}
        group = {**group, "grad_scale": scale_of(self)}
        return [link.read(self._name, group) for link in self._links(index)]

    def _links(self, index: int) -> tuple[Link, ...]:
        """Return the links by which a group is stepped: those of its chain, behind one that unscales."""
        links = self._choices[index].chain.links
        return links if scale_of(self) is None else (UNSCALE, *links)

    def _named(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (group index, leaf name, parameter) of all parameters (contract W7)."""
        index = 0
        for i, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for j, param in enumerate(group["params"]):
                yield i, leaf_name(names[j]) if names else str(index), param
                index += 1

    def plans(self) -> Iterator[tuple[str, Tensor, Plan]]:
        """Yield (leaf name, parameter, plan of its step) of all parameters, as their groups stand."""
        values: dict[int, list[Any]] = {}
        for i, name, param in self._named():
            if i not in values:
                values[i] = self._read(i)
            info = self._info(i, name, param)
            yield name, param, self._plan(i, info, self._applies_to(i, name, param), values[i])

    def links(self) -> list[list[tuple[Link, Any]]]:
        """Return of every param group the links of its chain, each with the values that it reads there."""
        chains = enumerate(choices.chain for choices in self._choices)
        return [list(zip(chain.links, self._read(i), strict=True)) for i, chain in chains]

    def _plan(self, group: int, info: ParamInfo, applies: tuple[bool, ...], values: list[Any]) -> Plan:
        links, maximize = self._links(group), bool(self.param_groups[group]["maximize"])
        rules = bind_rules(links, self._name, values, info)
        rules = [rule if applied else None for rule, applied in zip(rules, applies, strict=True)]
        seeds, wrapped = [link.seed for link in links], links[-1].wrapped_links if links else 0
        return make_plan(rules, seeds, info.dtype, maximize, wrapped)

    def _applies_to(self, group: int, name: str, param: Tensor) -> tuple[bool, ...]:
        if (group, name) not in self._applies:
            links = self._choices[group].chain.links
            self._applies[group, name] = tuple(link.applies_to(name, param) for link in links)
        applies = self._applies[group, name]
        return (True,) * (len(self._links(group)) - len(applies)) + applies

    def _of_group(self, index: int, values: list[Any]) -> tuple:
        """Return what the plans of a group's parameters depend on, besides the parameters."""
        links = self._links(index)
        read = tuple(link.read_by_bind(h) for link, h in zip(links, values, strict=True))
        return index, bool(self.param_groups[index]["maximize"]), tuple(link.seed for link in links), read
