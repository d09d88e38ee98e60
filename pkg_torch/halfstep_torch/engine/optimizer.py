"""A chain of transforms as a `torch.optim.Optimizer`."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.chain import Chain, ChainByOptions, chain
from halfstep_torch.engine.advice import advise
from halfstep_torch.engine.batches import Batch, attach_keys, attach_layouts, attach_state
from halfstep_torch.engine.compiler import Compile
from halfstep_torch.engine.groups import (
    HEADER,
    GroupChoices,
    check_entries,
    check_names,
    parameter_names,
    plain_value,
    rate_of,
    with_names,
)
from halfstep_torch.engine.kernel import compile_batch, run_batch
from halfstep_torch.engine.layout import Layout
from halfstep_torch.engine.leaves import check_grad, check_memory, check_weight, leaf_name
from halfstep_torch.engine.loss_scale import UNSCALE, Unscaled, is_skipped, scale_of
from halfstep_torch.engine.plan import Plan, bind_rules, make_plan
from halfstep_torch.engine.replicas import check_replicas
from halfstep_torch.engine.rows import Slot
from halfstep_torch.engine.state_dict import (
    LAST_STEP,
    check_saved_state,
    load_group,
    load_states,
    make_header,
    read_groups,
    replace_groups,
)
from halfstep_torch.rule import ParamInfo, Rule
from halfstep_torch.rule_check import check_rule
from halfstep_torch.storage.state_array import StateArray


class Optimizer(torch.optim.Optimizer):
    """A `torch.optim` optimizer that applies a chain of transforms.

    At each step the gradient of every parameter that has one goes through the links of the chain, in float32,
    and the weight becomes nearest(p + u) in its own dtype. Each link documents where it rounds. Weights and
    state are changed in place. Gradients, state and numbers of all parameters are checked, and kernels
    compiled, before any weight changes; what fails after that (no memory left, an interrupt, a user's own
    rule) leaves some parameters stepped and others not.

    The links' numbers are entries of the param groups (`lr`, `betas`, `eps`, `weight_decay`, `mu_dtype`,
    ...): a group's own value wins, and lr schedulers may write them. So do `param_storage` and the roundings
    of the named classes: exact weights for norms and embeddings are a group with `param_storage="split16"`.
    State per parameter is a flat dict: `step`, an int64 0-d tensor, and what the links keep (`exp_avg`,
    `exp_avg_sq`), row-major, in its own dtypes, which `load_state_dict` keeps to the bit.

    Random words depend on (seed, step, name, element) alone: pass named parameters
    (`model.named_parameters()`); reordering, freezing or resuming then changes no bit.
    Without names, a parameter's index over all groups stands for its name. torch's own generators are not
    used.

    Args:
        params: parameters, pairs (name, parameter), or dicts of groups with their own values of the entries.
            float32, bfloat16 or float16.
        tx: a transform, or a `chain` of them.
        maximize: ascend.
        compile: whether steps run as torch.compile'd kernels. True; False; or "auto": on accelerators, and on
            CPU from a million parameters up where a C++ compiler is found. The bits are the same.
        names: pairs (name, parameter) of the whole model, for wrappers that hand over parameters without
            names, or a share of them.

    Raises:
        TypeError: if an argument, a parameter or a group's value is of a wrong type.
        ValueError: if a value is out of range.
        RuntimeError: if `compile` is True, a parameter is on the CPU, and there is no C++ compiler.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> tx = hs.chain(
        ...     hs.scale_by_adam(b2=0.99),
        ...     hs.add_decayed_weights(0.1),
        ...     hs.scale_by_learning_rate(1e-3),
        ...     hs.round_stochastically(seed=0),
        ... )
        >>> optimizer = hs.Optimizer(model.named_parameters(), tx)
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].dtype
        torch.bfloat16

    Source: contract A6, P1.
    """

    # A GradScaler then calls `step` with the gradients as they are, and says by what they are scaled.
    _step_supports_amp_scaling = True

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
        check_names(self._name, self.param_groups)
        values, links = self._read(last), self._choices[last].chain.links
        for info in {self._info(i, name, param) for i, name, param in self._named() if i == last}:
            bind_rules(links, self._name, values, info)
            for link, h in zip(links, values, strict=True):
                if not type(link).__module__.startswith("halfstep_torch."):
                    check_rule(self._name, link, h, info)
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

    def _links(self, index: int) -> tuple[Rule, ...]:
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

    def links(self) -> list[list[tuple[Rule, Any]]]:
        """Return of every param group the links of its chain, each with the values that it reads there."""
        chains = enumerate(choices.chain for choices in self._choices)
        return [list(zip(chain.links, self._read(i), strict=True)) for i, chain in chains]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, each group with an entry that says what it belongs to.

        That entry, `halfstep`, holds the spec version, the links of the chain, their seeds and the
        parameters' leaf names. All of it loads with `torch.load(weights_only=True)`. State arrays are not
        copied.
        """
        state_dict = super().state_dict()
        for group, header in zip(state_dict["param_groups"], self._headers(), strict=True):
            group.update({key: plain_value(value) for key, value in group.items()}, **{HEADER: header})
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore from a state dict, bit for bit.

        Numbers of the param groups and the seeds are taken from the state dict; state arrays are copied.
        Parameters are matched by name within their group or, where either side has no names, by their place;
        random words then follow the names of this optimizer.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            TypeError: if it is not a state dict.
            ValueError: if it is of another chain, spec version, names, shapes or formats. Nothing is changed.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        saved_groups, ids, seeds = read_groups(state_dict, self._headers())
        states: dict[Tensor, tuple[dict[str, StateArray], Mapping[str, Any]]] = {}
        steps: list[tuple[int, int]] = []
        for i, name, param in self._named():
            saved = state_dict["state"].get(ids[i][name])
            if saved:
                of_plan = i, self._info(i, name, param), self._applies_to(i, name, param)
                arrays = self._plan(*of_plan, self._read(i)).arrays
                saved_arrays = self._plan(*of_plan, self._read(i, saved_groups[i])).arrays
                check_saved_state(name, param, arrays, saved_arrays, saved)
                states[param] = arrays, saved
                steps.append((i, max(int(saved["step"]), 1)))
        show = self._shown_rates(steps)
        groups = [
            load_group(group, saved, choices)
            for group, saved, choices in zip(self.param_groups, saved_groups, self._choices, strict=True)
        ]
        replace_groups(self.param_groups, groups, lambda: [self._read(i) for i in range(len(groups))])
        for choices, own, group in zip(self._choices, seeds, self.param_groups, strict=True):
            choices.chain = choices.chain.with_seeds(own)
            group[HEADER] = make_header(choices.chain)
        for of_group in show:
            of_group()
        self._forget_rows()
        load_states(self.state, states)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _headers(self) -> list[dict[str, Any]]:
        names: list[list[str]] = [[] for _ in self.param_groups]
        for i, name, _ in self._named():
            names[i].append(name)
        chains = [choices.chain for choices in self._choices]
        return [make_header(chain, of_group) for chain, of_group in zip(chains, names, strict=True)]

    def _forget_rows(self) -> None:
        """Let go of the state arrays of the last step."""
        self._slots.clear()
        self._layouts.clear()

    def step(self, closure: Callable[[], Any] | None = None, *, zero_grad: bool = False) -> Any:
        """Update every parameter that has a gradient.

        `torch.amp.GradScaler` may call it: gradients of a scaled loss are unscaled in float32, float16 ones
        too, and a step in which it found an infinity or a NaN changes nothing.

        Args:
            closure: re-evaluates the model and returns the loss.
            zero_grad: drop the gradients afterwards, as `zero_grad()` does.

        Returns:
            What `closure` returned, or None.

        Raises:
            TypeError: if a gradient is sparse or of a wrong dtype, or a group's value of a wrong type.
            ValueError: if a gradient or state array does not fit its parameter, or a group's value is out of
                range. Weights and state are then unchanged.
            RuntimeError: at the first step, if another process steps a replica of the model with another
                seed, or at another step. Nothing is changed here.
        """
        loss = None
        if closure is not None:
            if not callable(closure):
                raise TypeError(
                    f"{self._name}: closure={closure!r} is not a function. "
                    "Use step(), or step(zero_grad=True)."
                )
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            # Inside a compiled training step this is a graph break: Dynamo must not trace NumPy on the host.
            # A decorator would do, and import Dynamo together with this package.
            torch.compiler.disable(self._step)()  # pyright: ignore[reportCallIssue]
        if zero_grad:
            self.zero_grad()
        return loss

    def _step(self) -> None:
        if is_skipped(self):
            return
        batches = self._batches()
        attach_state(self._name, list(batches.values()), self.state)
        attach_keys(list(batches.values()))
        compiled = self._prepare(batches.values())
        attach_layouts(batches, compiled, self._layouts)
        show = self._shown_rates((i, step) for (i, *_, step) in batches)
        self._look_around(batches)
        # Everything that can fail has been tried: from here on, weights change.
        for batch in batches.values():
            run_batch(batch, compiled[batch.device])
        steps = [self.state[slot.param]["step"] for batch in batches.values() for slot in batch.slots]
        if steps:
            torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_clamp_max_(steps, LAST_STEP)  # pyright: ignore[reportPrivateImportUsage]
        for of_group in show:
            of_group()

    def _look_around(self, batches: Mapping[tuple, Batch]) -> None:
        """At the first step, say what the user should know, and compare replicas in other processes."""
        nameless = sum(len(group["params"]) for group in self.param_groups if "param_names" not in group)
        first = [batch for (*_, step), batch in batches.items() if step == 1]
        advise(self._name, first, nameless, scale_of(self))
        if not self._compared:
            slots = [slot for batch in batches.values() for slot in batch.slots]
            seeds = [[link.seed for link in choices.chain.links] for choices in self._choices]
            check_replicas(self._name, slots, seeds)
            self._compared = True

    def _shown_rates(self, steps: Iterable[tuple[int, int]]) -> list[Callable[[], None]]:
        """Return what shows the learning rates of a step in the groups whose lr is a function of it."""
        oldest: dict[int, int] = {}
        for i, step in steps:
            oldest[i] = max(oldest.get(i, 0), step)
        return [
            self._choices[i].show(self._name, i, self.param_groups[i], step) for i, step in oldest.items()
        ]

    def _prepare(self, batches: Iterable[Batch]) -> dict[torch.device, bool]:
        """Compile what is to be compiled; return on which devices steps run compiled."""
        elements: dict[torch.device, int] = {}
        for param in (param for group in self.param_groups for param in group["params"]):
            elements[param.device] = elements.get(param.device, 0) + param.numel()
        compiled = {}
        for batch in batches:
            make = functools.partial(compile_batch, batch)
            compiled[batch.device] = self._compile.prepare(
                self._name, batch.device, elements[batch.device], make
            )
        return compiled

    def _batches(self) -> dict[tuple, Batch]:
        """Check all gradients and numbers, and sort the parameters that have a gradient."""
        values: dict[int, list[Any]] = {}
        of_groups: dict[int, tuple] = {}
        slots: dict[Tensor, tuple[tuple, Slot]] = {}
        batches: dict[tuple, Batch] = {}
        for i, name, param in self._named():
            grad = param.grad
            if grad is None:
                continue
            check_grad(self._name, name, param)
            if i not in values:
                values[i] = self._read(i)
                of_groups[i] = self._of_group(i, values[i])
            key = (of_groups[i], param.dtype, param.shape, param.device, name)
            known, slot = self._slots.get(param, ((), None))
            if slot is None or known != key:
                info = self._info(i, name, param)
                slot = Slot(param, name, self._plan(i, info, self._applies_to(i, name, param), values[i]))
            slots[param] = key, slot
            plan, state = slot.plan, self.state.get(param)
            slot.step = min(int(state["step"]) + 1, LAST_STEP) if state else 1
            of_batch = (i, plan.links, plan.kinds, id(plan.whole), param.device, grad.dtype, slot.step)
            if of_batch not in batches:
                batches[of_batch] = Batch(plan, self._links(i))
            batches[of_batch].slots.append(slot)
        for (i, *_, step), batch in batches.items():
            batch.numbers = self._numbers(values[i], batch, step, batches.values())
        self._slots = slots
        return batches

    def _numbers(self, values: list[Any], batch: Batch, step: int, batches: Iterable[Batch]) -> list[Any]:
        """Return the numbers of each rule of a batch."""
        numbers = []
        for j in batch.plan.links:
            link, gs = batch.links[j], []
            if link.measures:
                sharing = [one for one in batches if any(one.links[k] is link for k in one.plan.links)]
                gs = [slot.grad for one in sharing for slot in one.slots]
                gs = gs if (scale := scale_of(self)) is None else Unscaled(gs, scale)
            numbers.append(link.step_numbers(values[j], step, gs))
        return numbers

    def _of_group(self, index: int, values: list[Any]) -> tuple:
        """Return what the plans of a group's parameters depend on, besides the parameters."""
        links = self._links(index)
        read = tuple(link.read_by_bind(h) for link, h in zip(links, values, strict=True))
        return index, bool(self.param_groups[index]["maximize"]), tuple(link.seed for link in links), read

    @functools.cached_property
    def _slots(self) -> dict[Tensor, tuple[tuple, Slot]]:  # pyright: ignore[reportRedeclaration]
        """Of each parameter that the last step stepped what its plan was made from, and its slot."""
        return {}

    @functools.cached_property
    def _layouts(self) -> dict[tuple, Layout]:
        """The rows of the last step."""
        return {}

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
