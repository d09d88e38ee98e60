"""Momentum, and `SGD` as an optimizer. Contract: A10."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

import halfstep.rules.trace as shared
from halfstep.recipes import takes_recipe
from halfstep.rule import option
from halfstep_torch.chain import Chain, ChainByOptions, chain
from halfstep_torch.link import Link, ParamInfo, link_of
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.optimizer_state.group_entries import check_torch_options
from halfstep_torch.rules.learning_rate import ScaleByLearningRate
from halfstep_torch.rules.weight_decay import AddDecayedWeights
from halfstep_torch.storage.state_dtypes import DType
from halfstep_torch.weights.weight_storage import with_param_storage


class Trace(shared.Trace, Link):
    """The rule of `trace` in a param group, which may have no momentum: `without_zero`, a 0 keeps no sum."""

    without_zero: bool = option(False)

    def acts(self, h: Any, info: ParamInfo) -> bool:
        """Whether there is a sum to keep."""
        return not (self.without_zero and h.decay == 0)


trace = takes_recipe(link_of(shared.Trace))


class SGD(Optimizer):
    """Gradient descent with L2 decay and momentum, as `torch.optim.SGD`, with weights of 16 bits.

    `chain(add_decayed_weights, trace, scale_by_learning_rate, round_stochastically)`: all arithmetic in
    float32; rounds the momentum to its dtype, and the weight to its own, once per step. In float32 throughout
    it is `torch.optim.SGD` without dampening to within rounding.

    `momentum` is the decay of `trace`, and 0 keeps no sum; `nesterov`, `accumulator_dtype` and `rounding` are
    as there. `dampening` is 0. `weight_decay` is L2 decay, added to the gradient. The other arguments, and
    the errors, are those of `AdamW`; `nesterov` without a momentum is a ValueError.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step(zero_grad=True)

    Source: I. Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
    2013, in torch's form. Contract A6, A10.
    """

    @takes_recipe
    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        accumulator_dtype: DType = None,
        rounding: str = "auto",
        recipe: str | None = None,
        param_storage: str = "stochastic",
        seed: Seed = 0,
        compile: bool | str = "auto",
        names: Iterable | None = None,
        state_device: str | None = None,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        caller = type(self).__name__
        seed = as_seed(caller, seed)
        check_torch_options(caller, locals())
        # In the chain even if momentum is 0: a group may have a momentum of its own.
        trace = Trace(decay=momentum, accumulator_dtype=accumulator_dtype, seed=seed, without_zero=True)
        make = functools.partial(_sgd_chain, caller, trace, weight_decay, lr)
        options = {"nesterov": nesterov, "rounding": rounding, "param_storage": param_storage}
        if nesterov and not momentum:
            raise ValueError(f"{caller}: nesterov=True with momentum={momentum}. Use a momentum such as 0.9.")
        tx = ChainByOptions(make, options)
        super().__init__(
            params, tx, maximize=maximize, compile=compile, names=names, state_device=state_device
        )


def _sgd_chain(
    caller: str,
    trace: Trace,
    weight_decay: float,
    lr: Any,
    *,
    nesterov: bool,
    rounding: str,
    param_storage: str,
) -> Chain:
    if not isinstance(nesterov, bool):
        raise TypeError(f"{caller}: nesterov={nesterov!r} is not a bool. Use True or False.")
    trace = dataclasses.replace(trace, nesterov=nesterov, rounding=rounding)
    tx = chain(AddDecayedWeights(weight_decay), trace, ScaleByLearningRate(lr))
    return with_param_storage(caller, tx, param_storage, trace.seed)
