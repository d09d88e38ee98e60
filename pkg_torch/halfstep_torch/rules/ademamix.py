"""The AdEMAMix update rule, and `AdEMAMix` as an optimizer. Contract: A15."""

from collections.abc import Callable, Iterable
from typing import Literal

from torch import Tensor

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.ademamix import ScaleByAdemamix
from halfstep.rules.named import ADEMAMIX
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_torch.links.link import link_of
from halfstep_torch.numbers.seeds import Seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.rules.named import optimizer_arguments
from halfstep_torch.storage.state_dtypes import DType

scale_by_ademamix = link_of(ScaleByAdemamix)


class AdEMAMix(Optimizer):
    """AdEMAMix with decoupled decay: Adam with a second, much slower average of gradients.

    `chain(scale_by_ademamix, add_decayed_weights, scale_by_learning_rate, round_stochastically)`: all
    arithmetic in float32; rounds three averages to their dtypes, and the weight to its own, once per step.

    `betas` are `b1`, `b2` and `b3` of `scale_by_ademamix`, which also has `alpha`, the formats and roundings.
    The paper warms up `alpha`, which can be written into the param groups. The other arguments and the errors
    are as in `AdamW`.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.AdEMAMix(model.named_parameters(), lr=1e-3, weight_decay=0.1)
        >>> for step in range(2):
        ...     optimizer.param_groups[0]["alpha"] = 5.0 * min(1, (step + 1) / 1000)
        ...     model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        ...     optimizer.step(zero_grad=True)

    Source: M. Pagliardini, P. Ablin, D. Grangier, "The AdEMAMix optimizer: better, faster, older",
    arXiv:2409.03137, algorithm 1. Contract A6, A15.
    """

    named = ADEMAMIX

    @takes_recipe(ADEMAMIX.moments)
    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        mu_dtype: DType = None,
        slow_dtype: DType = None,
        nu_dtype: DType = None,
        mu_rounding: Rounding = "auto",
        slow_rounding: Rounding = "auto",
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
            type(self), params=params, lr=lr, betas=betas, alpha=alpha, eps=eps, weight_decay=weight_decay,
            maximize=maximize, mu_dtype=mu_dtype, slow_dtype=slow_dtype, nu_dtype=nu_dtype,
            mu_rounding=mu_rounding, slow_rounding=slow_rounding, nu_rounding=nu_rounding, recipe=recipe,
            param_storage=param_storage, seed=seed, compile=compile, names=names, state_device=state_device,
            capturable=capturable,
        )  # fmt: skip
        super().__init__(**arguments)
