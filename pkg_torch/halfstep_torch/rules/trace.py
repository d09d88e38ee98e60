"""Momentum, and `SGD` as an optimizer. Contract: A10."""

from collections.abc import Callable, Iterable
from typing import Literal

from torch import Tensor

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules import named as table
from halfstep.rules.trace import Trace
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_torch.links.link import link_of
from halfstep_torch.numbers.seeds import Seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.rules.named import optimizer_arguments
from halfstep_torch.storage.state_dtypes import DType

trace = link_of(Trace)


class SGD(Optimizer):
    """Gradient descent with L2 decay and momentum, as `torch.optim.SGD`, with weights of 16 bits.

    `chain(add_decayed_weights, trace, scale_by_learning_rate, round_stochastically)`: all arithmetic in
    float32; rounds the momentum to its dtype, and the weight to its own, once per step. In float32 throughout
    it is `torch.optim.SGD` without dampening to within rounding.

    The other arguments and errors are as in `trace` and `AdamW`. `nesterov` without a momentum raises
    ValueError. With a momentum, `param_storage` may be "feedback", which adds the rounding errors of weights
    to the sum (contract A23).

    Args:
        momentum: the decay of `trace`; 0 keeps no sum.
        dampening: must be 0.
        weight_decay: L2 decay, added to the gradient.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step(zero_grad=True)

    Source: I. Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
    2013, in torch's form. Contract A6, A10.
    """

    # Momentum is in the chain even if it is 0: a group may have one of its own.
    named = table.SGD

    @takes_recipe(table.SGD.moments)
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
        rounding: Rounding = "auto",
        recipe: Recipe | None = None,
        param_storage: ParamStorage | Literal["feedback"] | None = None,
        seed: Seed = 0,
        compile: bool | Literal["auto"] = "auto",
        names: Iterable | None = None,
        state_device: str | None = None,
        capturable: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if nesterov and not momentum:
            caller = type(self).__name__
            raise ValueError(f"{caller}: nesterov=True with momentum={momentum}. Use a momentum such as 0.9.")
        arguments = optimizer_arguments(
            type(self), params=params, lr=lr, momentum=momentum, dampening=dampening,
            weight_decay=weight_decay, nesterov=nesterov, maximize=maximize,
            accumulator_dtype=accumulator_dtype, rounding=rounding, recipe=recipe,
            param_storage=param_storage, seed=seed, compile=compile, names=names, state_device=state_device,
            capturable=capturable, foreach=foreach, differentiable=differentiable, fused=fused,
        )  # fmt: skip
        super().__init__(**arguments)
