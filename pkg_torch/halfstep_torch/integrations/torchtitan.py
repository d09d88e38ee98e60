"""Optimizers of this package in torchtitan's configs. Importing this imports torchtitan."""

import dataclasses
from collections.abc import Callable

import torch
from torchtitan.components.optimizer import OptimizersContainer  # pyright: ignore[reportMissingImports]

import halfstep_torch


class HalfstepOptimizers(OptimizersContainer):
    """torchtitan's container, which accepts optimizers of `halfstep_torch` as `optimizer_name`.

    A config is built by `HalfstepOptimizers.Config(param_groups=[ParamGroupConfig(...)])`. Arguments for all
    groups together, such as `seed`, belong in `optimizer_factory_kwargs_by_name`.

    Source: ours.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As torchtitan's."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        ours = getattr(halfstep_torch, name, None)
        if isinstance(ours, type) and issubclass(ours, halfstep_torch.Optimizer):
            return ours
        return OptimizersContainer._resolve_optimizer_factory(name)
