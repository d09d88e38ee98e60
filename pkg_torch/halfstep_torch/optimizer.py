"""A chain of transforms as a `torch.optim.Optimizer`."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.chain import Chain, Link, chain
from halfstep_torch.compiling import run_leaf
from halfstep_torch.params import PARAM_DTYPES
from halfstep_torch.random_words import leaf_id, leaf_name
from halfstep_torch.rounding import dtype_name
from halfstep_torch.step import Plan, make_plan, plan_keys


@dataclasses.dataclass
class _Leaf:
    """A parameter that has a gradient, on its way through one step."""

    param: Tensor
    grad: Tensor
    name: str
    group: int
    plan: Plan
    step: int = 0


class Optimizer(torch.optim.Optimizer):
    """A `torch.optim` optimizer that applies a chain of transforms."""

    def __init__(
        self,
        params: Iterable,
        tx: Chain | Link,
        *,
        maximize: bool = False,
        compile: bool | str = "auto",
    ) -> None:
        self._chain = chain(tx)
        self._seeds = [link.seed for link in self._chain.links]
        self._compile = compile
        defaults = {**self._chain.entries, "maximize": maximize}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with its own values of the chain's entries if it has any."""
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, index: int) -> None:
        group = self.param_groups[index]
        for link in self._chain.links:
            link.check(type(self).__name__, group, group["params"])
        for param in group["params"]:
            if param.dtype not in PARAM_DTYPES:
                raise TypeError(
                    f"{type(self).__name__}: a parameter is {dtype_name(param.dtype)}; "
                    "weights are float32, bfloat16 or float16. Cast the model."
                )

    def step(self, closure: Callable[[], Any] | None = None, *, zero_grad: bool = False) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._apply(self._leaves())
        if zero_grad:
            self.zero_grad()
        return loss

    def _leaves(self) -> list[_Leaf]:
        leaves, index = [], 0
        for i, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for j, param in enumerate(group["params"]):
                name = leaf_name(names[j]) if names else str(index)
                index += 1
                if param.grad is not None:
                    plan = make_plan(self._chain, self._seeds, group, name, param)
                    leaves.append(_Leaf(param, param.grad, name, i, plan))
        return leaves

    def _apply(self, leaves: Sequence[_Leaf]) -> None:
        for leaf in leaves:
            state = self.state[leaf.param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.int64)
                state.update({k: f.zeros_like(leaf.param) for k, f in leaf.plan.formats.items()})
            leaf.step = int(state["step"]) + 1
        for leaf in leaves:
            group, state = self.param_groups[leaf.group], self.state[leaf.param]
            links = [self._chain.links[i] for i in leaf.plan.links]
            numbers = [link.numbers(group, leaf.step) for link in links]
            keys = plan_keys(leaf.plan, self._seeds, [leaf.step], [leaf_id(leaf.name)])[0]
            codes = {key: state[key] for key in leaf.plan.formats}
            run_leaf(leaf.plan, leaf.param, leaf.grad, codes, numbers, keys)
            state["step"] += 1
