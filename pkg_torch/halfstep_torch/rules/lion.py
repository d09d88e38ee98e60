"""The Lion update rule, and `Lion` as an optimizer. Contract: A9."""

from collections.abc import Callable, Iterable
from typing import Literal

from torch import Tensor

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.lion import ScaleByLion
from halfstep.rules.named import LION
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_torch.links.link import link_of
from halfstep_torch.numbers.seeds import Seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.rules.named import optimizer_arguments
from halfstep_torch.storage.state_dtypes import DType

scale_by_lion = link_of(ScaleByLion)


class Lion(Optimizer):
    """Lion with decoupled decay, with weights of 16 bits and an average of 16, 8 or 4.

    `chain(scale_by_lion, add_decayed_weights, scale_by_learning_rate, round_stochastically)`: all arithmetic
    in float32; rounds the average to its dtype, and the weight to its own, once per step. Arguments and
    errors are as in `AdamW`, but `betas`, `mu_dtype` and `mu_rounding` as in `scale_by_lion`.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.Lion(model.named_parameters(), lr=1e-4, mu_dtype="bfloat16")
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step(zero_grad=True)

    Source: X. Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
    Contract A6, A9.
    """

    named = LION

    @takes_recipe(LION.moments)
    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        mu_dtype: DType = None,
        mu_rounding: Rounding = "auto",
        recipe: Recipe | None = None,
        param_storage: ParamStorage | None = None,
        cautious: bool = False,
        seed: Seed = 0,
        compile: bool | Literal["auto"] = "auto",
        names: Iterable | None = None,
        state_device: str | None = None,
        capturable: bool = False,
    ) -> None:
        arguments = optimizer_arguments(
            type(self), params=params, lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize,
            mu_dtype=mu_dtype, mu_rounding=mu_rounding, recipe=recipe, param_storage=param_storage,
            cautious=cautious, seed=seed, compile=compile, names=names, state_device=state_device,
            capturable=capturable,
        )  # fmt: skip
        super().__init__(**arguments)
