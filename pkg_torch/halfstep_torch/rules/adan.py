"""The Adan update rule, and `Adan` as an optimizer. Contract: A11."""

from collections.abc import Callable, Iterable
from typing import Literal

from torch import Tensor

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.adan import ScaleByAdan
from halfstep.rules.named import ADAN
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_torch.links.link import link_of
from halfstep_torch.numbers.seeds import Seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.rules.named import optimizer_arguments
from halfstep_torch.storage.state_dtypes import DType

scale_by_adan = link_of(ScaleByAdan)


class Adan(Optimizer):
    """Adan with decoupled decay: Adam that looks ahead by the difference between gradients.

    `chain(scale_by_adan, add_decayed_weights, scale_by_learning_rate, round_stochastically)`: all arithmetic
    is float32. A step rounds three averages and the last gradient to their dtypes, and the weight to its own,
    once each. The decay is as in the authors' code with `no_prox=True`.

    `betas` are `b1`, `b2` and `b3` of `scale_by_adan`, which also has the formats and roundings. The other
    arguments and the errors are as in `AdamW`.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.Adan(model.named_parameters(), lr=1e-3, weight_decay=0.02)
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step(zero_grad=True)

    Source: X. Xie et al., "Adan", arXiv:2208.06677, algorithm 1. Contract A6, A11.
    """

    named = ADAN

    @takes_recipe(ADAN.moments)
    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        mu_dtype: DType = None,
        diff_dtype: DType = None,
        nu_dtype: DType = None,
        grad_dtype: DType = None,
        mu_rounding: Rounding = "auto",
        nu_rounding: Rounding = "stochastic",
        recipe: Recipe | None = None,
        param_storage: ParamStorage | None = None,
        seed: Seed = 0,
        compile: bool | Literal["auto"] = "auto",
        names: Iterable | None = None,
        state_device: str | None = None,
        capturable: bool = False,
    ) -> None:
        arguments = optimizer_arguments(
            type(self), params=params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            maximize=maximize, mu_dtype=mu_dtype, diff_dtype=diff_dtype, nu_dtype=nu_dtype,
            grad_dtype=grad_dtype, mu_rounding=mu_rounding, nu_rounding=nu_rounding, recipe=recipe,
            param_storage=param_storage, seed=seed, compile=compile, names=names, state_device=state_device,
            capturable=capturable,
        )  # fmt: skip
        super().__init__(**arguments)
