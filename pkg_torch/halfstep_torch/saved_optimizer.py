"""Optimizers whose state is a state dict and comes from one: torch's form, with what it belongs to."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.engine.groups import plain_value
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.planned_optimizer import PlannedOptimizer
from halfstep_torch.optimizer_state.byte_form import as_bytes, from_bytes
from halfstep_torch.optimizer_state.form import HEADER
from halfstep_torch.optimizer_state.state_dict import (
    check_counts,
    check_saved_state,
    load_group,
    load_states,
    make_header,
    read_groups,
    replace_groups,
)
from halfstep_torch.say_once import say_once
from halfstep_torch.sharded.slots import at_home, state_placements
from halfstep_torch.streamed_state import is_streamed


class SavedOptimizer(PlannedOptimizer):
    """What `Optimizer` knows of state dicts, and of the learning rates that its groups show."""

    _half_loaded = False
    """Whether groups and state are of two runs: `load_state_dict` began to change them and did not end."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, each group with an entry that says what it belongs to.

        That entry, `halfstep`, holds the spec version, the links of the chain, and their seeds. It also holds
        the leaf names of the parameters, and the distinct counts of their steps. All of it loads with
        `torch.load(weights_only=True)`. State arrays are not copied. Arrays of a dtype that checkpointers
        cannot gather (int16, 8-bit floats) are shown as their bytes, uint8.

        Raises:
            RuntimeError: if the last `load_state_dict` failed while it copied.
        """
        self.check_loaded()
        headers = self._headers()
        state_dict = super().state_dict()
        state_dict["state"] = {key: as_bytes(entry) for key, entry in state_dict["state"].items()}
        for group, header in zip(state_dict["param_groups"], headers, strict=True):
            group.update({key: plain_value(value) for key, value in group.items()}, **{HEADER: header})
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore from a state dict, bit for bit.

        Numbers of the param groups and the seeds are taken from the state dict; state arrays are copied.
        Parameters are matched by name within their group or, where either side has no names, by their place.
        Random words then follow the names of this optimizer. State of a parameter that is a DTensor becomes
        DTensors, from arrays that are sharded in any way, or whole in every process.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            TypeError: if it is not a state dict.
            ValueError: if it is of another chain, spec version, names, shapes or formats, or an array has no
                memory here ("meta") or is sparse. Nothing is changed.

        Old arrays go before new ones are made, so that both never stand in memory at once. Where copying
        fails after the checks (no memory left, an interrupt), part of the state is gone: `step` and
        `state_dict` then raise RuntimeError until a state dict is loaded whole.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        for hook in self._hooks("_optimizer_load_state_dict_pre_hooks"):
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        saved_groups, ids, seeds = read_groups(state_dict, self._headers())
        check_counts(state_dict, ids)
        states: dict[Tensor, tuple[dict[str, tuple | None], Mapping[str, Any]]] = {}
        steps: list[tuple[int, int]] = []
        plans: dict[Tensor, Plan] = {}
        group_of = functools.cache(self._group)
        for i, name, param in self._named():
            saved = state_dict["state"].get(ids[i][name])
            if saved:
                plan = plans[param] = group_of(i).plan(name, param)
                saved = from_bytes(saved, {key: spec.dtype for key, spec in plan.arrays.items()})
                saved_arrays = self._group(i, saved_groups[i]).plan(name, param).arrays
                check_saved_state(name, param, plan.arrays, saved_arrays, saved)
                placements = state_placements(plan, param)
                states[param] = {key: placements.get(key) for key in plan.arrays}, saved
                steps.append((i, max(int(saved["step"]), 1)))
        show_rates = self._shown_rates(steps)
        groups = [
            load_group(group, saved, choices.options, choices.schedule is not None)
            for group, saved, choices in zip(self.param_groups, saved_groups, self._choices, strict=True)
        ]
        was_half, self._half_loaded = self._half_loaded, True
        try:
            replace_groups(self.param_groups, groups, self._read_all_groups)
        except BaseException:  # the groups are as they were
            self._half_loaded = was_half
            raise
        for choices, chain_seeds, group in zip(self._choices, seeds, self.param_groups, strict=True):
            choices.chain = choices.chain.with_seeds(chain_seeds)
            group[HEADER] = make_header(choices.chain)
        for show_rate in show_rates:
            show_rate()
        self._launches.clear()
        self.__dict__.pop("_alone", None)
        load_states(self.state, states, lambda param, state: self.at_home(param, plans[param], state))
        self._half_loaded = False
        for hook in self._hooks("_optimizer_load_state_dict_post_hooks"):
            hook(self)

    def check_loaded(self) -> None:
        """Raise RuntimeError if the last `load_state_dict` failed while it copied."""
        if self._half_loaded:
            raise RuntimeError(
                f"{self._name}: the last load_state_dict failed while it copied, so groups and state are of "
                "two runs. Free memory and load the state dict again, or build a new optimizer."
            )

    def _read_all_groups(self) -> None:
        """Check the values of all groups."""
        for i in range(len(self.param_groups)):
            _ = self._group(i).values

    def _hooks(self, name: str) -> list[Callable[..., Any]]:
        """Return hooks that torch keeps under a name."""
        if not hasattr(self, name):
            say_once(f"{self._name}: torch keeps no {name} any more: hooks of load_state_dict do not run.")
        return list(getattr(self, name, {}).values())

    def _headers(self) -> list[dict[str, Any]]:
        names: list[list[str]] = [[] for _ in self.param_groups]
        counts: list[set[int]] = [set() for _ in self.param_groups]
        for i, name, param in self._named():
            names[i].append(name)
            if state := self.state.get(param):
                counts[i].add(int(state["step"]))
        rows = zip((choices.chain for choices in self._choices), names, counts, strict=True)
        return [make_header(chain, leaves, sorted(of_group)) for chain, leaves, of_group in rows]

    def at_home(self, param: Tensor, plan: Plan, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter with its arrays where this optimizer keeps them."""
        if not (self._state_on_host and is_streamed(plan, param)):
            return state
        host = torch.device("cpu")
        return {key: x if key == "step" else at_home(x, host, param.device) for key, x in state.items()}

    def _shown_rates(self, steps: Iterable[tuple[int, int]]) -> list[Callable[[], None]]:
        """Return what shows the learning rates of a step in the groups whose lr is a function of it."""
        oldest: dict[int, int] = {}
        for i, step in steps:
            oldest[i] = max(oldest.get(i, 0), step)
        return [self._choices[i].show(self._name, i, self.param_groups[i], oldest[i]) for i in oldest]

    @functools.cached_property
    def _launches(self) -> dict[Any, Any]:
        """The last step of all parameters, by None, and of each that is stepped alone."""
        return {}
