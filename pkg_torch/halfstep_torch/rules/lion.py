"""The Lion update rule, and `Lion` as an optimizer. Contract: A9."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from halfstep.hyperparameters import several
from halfstep.recipes import takes_recipe
from halfstep.rules.lion import ScaleByLion
from halfstep_torch.chain import Chain, ChainByOptions, chain
from halfstep_torch.link import link_of
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.rules.learning_rate import ScaleByLearningRate
from halfstep_torch.rules.weight_decay import AddDecayedWeights
from halfstep_torch.storage.state_dtypes import DType
from halfstep_torch.weights.weight_storage import with_param_storage

scale_by_lion = takes_recipe(link_of(ScaleByLion))


class Lion(Optimizer):
    """Lion with decoupled decay, with weights of 16 bits and an average of 16, 8 or 4.

    `chain(scale_by_lion, add_decayed_weights, scale_by_learning_rate, round_stochastically)`: all arithmetic
    in float32; rounds the average to its dtype, and the weight to its own, once per step. Arguments and
    errors are those of `AdamW`; `betas`, `mu_dtype` and `mu_rounding` are as in `scale_by_lion`.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.Lion(model.named_parameters(), lr=1e-4, mu_dtype="bfloat16")
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step(zero_grad=True)

    Source: X. Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
    Contract A6, A9.
    """

    @takes_recipe
    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        mu_dtype: DType = None,
        mu_rounding: str = "auto",
        recipe: str | None = None,
        param_storage: str = "stochastic",
        seed: Seed = 0,
        compile: bool | str = "auto",
        names: Iterable | None = None,
        state_device: str | None = None,
    ) -> None:
        caller = type(self).__name__
        seed = as_seed(caller, seed)
        b1, b2 = several(caller, "betas", betas, 2)
        lion = ScaleByLion(b1=b1, b2=b2, mu_dtype=mu_dtype, seed=seed)
        make = functools.partial(_lion_chain, caller, lion, weight_decay, lr)
        tx = ChainByOptions(make, {"mu_rounding": mu_rounding, "param_storage": param_storage})
        super().__init__(
            params, tx, maximize=maximize, compile=compile, names=names, state_device=state_device
        )


def _lion_chain(
    caller: str, lion: ScaleByLion, weight_decay: float, lr: Any, *, mu_rounding: str, param_storage: str
) -> Chain:
    lion = dataclasses.replace(lion, mu_rounding=mu_rounding)
    tx = chain(lion, AddDecayedWeights(weight_decay), ScaleByLearningRate(lr))
    return with_param_storage(caller, tx, param_storage, lion.seed)
