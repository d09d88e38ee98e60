"""LAMB as a whole optimizer, and LAMB16: chains under torch's names and arguments, no arithmetic.

Contract: L3, L4. `docs/lamb16.md` compares `Lamb16` with the published LAMB16.
"""

from collections.abc import Callable, Iterable
from typing import Literal

from torch import Tensor

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.named import LAMB, LAMB16
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_torch.numbers.seeds import Seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.rules.named import optimizer_arguments
from halfstep_torch.storage.state_dtypes import DType, scaled

LAMB16_MU = scaled("float8_e4m3fn", 128)
LAMB16_NU = scaled("ufloat8_e5m3", 128)


class Lamb(Optimizer):
    """LAMB for weights and moments in 16 bits: Adam, with a learning rate for each parameter.

    `chain(scale_by_adam, add_decayed_weights, scale_by_trust_ratio, scale_by_learning_rate,
    round_stochastically)`: all arithmetic in float32; rounds each moment to its dtype, and the weight to its
    own, once per step. A step moves a parameter by about `lr` times its norm, and the norm of the update
    includes the decay. The `mu_rounding="feedback"` of recipes becomes "stochastic" here, because the norm
    would include the fed-back errors.

    Arguments and errors are as in `AdamW`, with `max_norm` and `exact` of `scale_by_trust_ratio`. With
    `max_norm=None`, as in the text of You et al., steps at a constant rate grow with the weights. Under
    "split8", "split16" and "master" the norms are computed from the float32 weights. Compiled steps give the
    bits of plain steps, and keep no update.

    Args:
        bias_correction: present in v1 and the final paper, absent in v3; without decay and `eps` the ratio
            cancels it up to rounding.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> matrices = {"params": [("weight", model.weight)]}
        >>> biases = {"params": [("bias", model.bias)], "min_ratio": 1, "max_ratio": 1}  # no ratio
        >>> optimizer = hs.Lamb([matrices, biases], lr=1e-2, weight_decay=0.01)
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step(zero_grad=True)

    Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes",
        ICLR 2020, algorithm 2; arXiv:1904.00962, v1 and v3 for `bias_correction` (contract L3).
    """

    named = LAMB

    @takes_recipe(LAMB.moments)
    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        mu_dtype: DType = None,
        nu_dtype: DType = None,
        mu_rounding: Rounding = "auto",
        nu_rounding: Rounding = "stochastic",
        recipe: Recipe | None = None,
        param_storage: ParamStorage | None = None,
        bias_correction: bool = True,
        max_norm: float | None = 10.0,
        exact: bool = False,
        seed: Seed = 0,
        compile: bool | Literal["auto"] = "auto",
        names: Iterable | None = None,
        state_device: str | None = None,
    ) -> None:
        arguments = optimizer_arguments(
            type(self), params=params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            maximize=maximize, mu_dtype=mu_dtype, nu_dtype=nu_dtype, mu_rounding=mu_rounding,
            nu_rounding=nu_rounding, recipe=recipe, param_storage=param_storage,
            bias_correction=bias_correction, max_norm=max_norm, exact=exact, seed=seed, compile=compile,
            names=names, state_device=state_device,
        )  # fmt: skip
        super().__init__(**arguments)


class Lamb16(Optimizer):
    """LAMB with 16 bits of state per parameter: LAMB16's goal, in formats that preserve the moments.

    `Lamb` with LAMB16's trust ratio, a power of LAMB's, and 2.02 bytes of state per parameter:

        ratio = clamp((((1e-3 / lr) |p|) / |u|)^trust_power, 0, 2), but 1 where |p| or |u| is 0

    so that a step is proportional to lr^(1 - trust_power). `docs/lamb16.md` has the formats, and why they
    differ from the published code's.

    Arguments and errors are the same as for `Lamb`. The published code has no bias correction. Unless
    `trust_power` is None, the power differs from JAX by ulps even with `exact`.

    Args:
        trust_power: a number in (0, 1), by default as in the published code, or None for LAMB's own ratio. 1
            is not allowed, because the learning rate would cancel and a schedule would do nothing.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(128, 64, dtype=torch.bfloat16)
        >>> optimizer = hs.Lamb16(model.named_parameters(), lr=1e-2)
        >>> model(torch.ones(1, 128, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg_sq_scale"].shape
        torch.Size([64, 1])

    Source: vxst, "LAMB16", 2024, https://github.com/vxst/LAMB16, for the aim and the ratio; LAMB as in `Lamb`
        (contract L4).
    """

    named = LAMB16

    @takes_recipe(LAMB16.moments)
    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        mu_dtype: DType = LAMB16_MU,
        nu_dtype: DType = LAMB16_NU,
        mu_rounding: Rounding = "auto",
        nu_rounding: Rounding = "stochastic",
        recipe: Recipe | None = None,
        param_storage: ParamStorage | None = None,
        bias_correction: bool = True,
        max_norm: float | None = 10.0,
        trust_power: float | None = 0.382,
        exact: bool = False,
        seed: Seed = 0,
        compile: bool | Literal["auto"] = "auto",
        names: Iterable | None = None,
        state_device: str | None = None,
    ) -> None:
        arguments = optimizer_arguments(
            type(self), params=params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            maximize=maximize, mu_dtype=mu_dtype, nu_dtype=nu_dtype, mu_rounding=mu_rounding,
            nu_rounding=nu_rounding, recipe=recipe, param_storage=param_storage,
            bias_correction=bias_correction, max_norm=max_norm, trust_power=trust_power, exact=exact,
            seed=seed, compile=compile, names=names, state_device=state_device,
        )  # fmt: skip
        super().__init__(**arguments)
