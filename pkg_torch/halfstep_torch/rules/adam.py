"""The Adam update rule, and `Adam` and `AdamW` as optimizers. Contract: section A."""

from collections.abc import Callable, Iterable
from typing import Literal

from torch import Tensor

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.adam import ScaleByAdam
from halfstep.rules.named import ADAM, ADAMW
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_torch.links.link import link_of
from halfstep_torch.numbers.seeds import Seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.rules.named import optimizer_arguments
from halfstep_torch.storage.state_dtypes import DType

scale_by_adam = link_of(ScaleByAdam)


class Adam(Optimizer):
    """Adam with L2 decay, as `torch.optim.Adam`, with weights of 16 bits and moments of 16, 8 or 4.

    `chain(add_decayed_weights, scale_by_adam, scale_by_learning_rate, round_stochastically)`: all arithmetic
    in float32; rounds each moment to its dtype, and the weight to its own, once per step. In float32
    throughout it is `torch.optim.Adam` to within rounding.

    Arguments and errors are as in `AdamW`, except:

    Args:
        weight_decay: L2 decay, added to the gradient.
        decoupled_weight_decay: must be False. Use `AdamW` for decoupled decay.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.Adam(model.named_parameters(), lr=1e-3, nu_dtype="float32")
        >>> optimizer.param_groups[0]["nu_dtype"]
        'float32'

    Source: D. Kingma, J. Ba, "Adam", ICLR 2015. Contract A5, A6.
    """

    named, decoupled_decay = ADAM, False

    @takes_recipe(ADAM.moments)
    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        mu_dtype: DType = None,
        nu_dtype: DType = None,
        mu_rounding: Rounding = "auto",
        nu_rounding: Rounding = "stochastic",
        recipe: Recipe | None = None,
        param_storage: ParamStorage | Literal["feedback"] | None = None,
        seed: Seed = 0,
        compile: bool | Literal["auto"] = "auto",
        names: Iterable | None = None,
        state_device: str | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        if decoupled_weight_decay:
            caller = type(self).__name__
            raise ValueError(f"{caller}: decoupled_weight_decay=True is not supported. Use AdamW.")
        arguments = optimizer_arguments(
            type(self), params=params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            amsgrad=amsgrad, maximize=maximize, mu_dtype=mu_dtype, nu_dtype=nu_dtype, mu_rounding=mu_rounding,
            nu_rounding=nu_rounding, recipe=recipe, param_storage=param_storage, seed=seed, compile=compile,
            names=names, state_device=state_device, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused, decoupled_weight_decay=decoupled_weight_decay,
        )  # fmt: skip
        super().__init__(**arguments)


class AdamW(Optimizer):
    """Adam with decoupled decay, as `torch.optim.AdamW`, with weights of 16 bits and moments of 16, 8 or 4.

    `chain(scale_by_adam, add_decayed_weights, scale_by_learning_rate, round_stochastically)`: all arithmetic
    in float32; rounds each moment to its dtype, and the weight to its own, once per step. In float32
    throughout it is `torch.optim.AdamW` to within rounding.

    Args:
        params: parameters, pairs (name, parameter), or dicts of groups; float32, bfloat16 or float16.
        lr: learning rate: a number, a tensor of one element (float32 or float64), or a function from a
            parameter's count of steps so far to a number.
        betas: decay rates of the two moments.
        eps: added to the square root of the second moment.
        weight_decay: decoupled decay, scaled by the learning rate.
        amsgrad: must be False (kept for the order of torch's arguments).
        maximize: maximize the objective instead of minimizing it.
        mu_dtype: format of the first moment (`exp_avg`): "float32", "bfloat16", "float16", a torch dtype, or
            a signed format (`scaled`, `relative`, `codebook`). None: bfloat16 for bfloat16 weights, else
            float32.
        nu_dtype: format of the second moment (`exp_avg_sq`): as `mu_dtype`, or an unsigned format such as
            "ufloat16_e7m9".
        mu_rounding: "auto" (nearest if that is accurate, else stochastic), "stochastic", "feedback",
            "nearest" or "nearest_unchecked".
        nu_rounding: "stochastic", "auto", "nearest" or "nearest_unchecked". Nearest freezes a bfloat16 second
            moment above a decay rate of 0.996.
        recipe: the name of one of `recipes`. It sets `mu_dtype`, `nu_dtype` and `param_storage`, unless these
            are passed.
        param_storage: storage of 16-bit weights: "stochastic" (stochastic rounding), "nearest", "compensated"
            (`compensate`), "split8" or "split16" (`split_params`), or "master" (`keep_master_params`). None:
            the recipe's, else "stochastic".
            "feedback" rounds stochastically too and adds the rounding error to the first moment, from which
            later steps apply it, with the memory of "stochastic" (contract A21, P9). An experiment of `AdamW`
            alone is "int8": the state keeps float32 weights in 8 bits, which `stored_params` reads, and
            rounding errors go into the first moment (contract A20, P8).
        cautious: decay a weight only if the decay does not oppose its update, as in `add_decayed_weights`.
        seed: seed of the random words, an integer in [0, 2^64) or two uint32 words (high, low).
        compile: True, False or "auto", as in `Optimizer`.
        names: as in `Optimizer`.
        state_device: None, or "cpu" for state on the host, as in `Optimizer`.
        foreach: ignored. All parameters are always updated together.
        capturable: whether a CUDA graph may capture a step, as in `Optimizer`.
        differentiable: must be False.
        fused: ignored, as `foreach`.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if an argument is out of range, or a format or rounding cannot hold the moment.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.AdamW(model.named_parameters(), lr=1e-3, weight_decay=0.1, seed=0)
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step(zero_grad=True)

    Source: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", ICLR 2019. Contract A5, A6.
    """

    named, decoupled_decay = ADAMW, True

    @takes_recipe(ADAMW.moments)
    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        mu_dtype: DType = None,
        nu_dtype: DType = None,
        mu_rounding: Rounding = "auto",
        nu_rounding: Rounding = "stochastic",
        recipe: Recipe | None = None,
        param_storage: ParamStorage | Literal["feedback", "int8"] | None = None,
        cautious: bool = False,
        seed: Seed = 0,
        compile: bool | Literal["auto"] = "auto",
        names: Iterable | None = None,
        state_device: str | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        arguments = optimizer_arguments(
            type(self), params=params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            amsgrad=amsgrad, maximize=maximize, mu_dtype=mu_dtype, nu_dtype=nu_dtype, mu_rounding=mu_rounding,
            nu_rounding=nu_rounding, recipe=recipe, param_storage=param_storage, cautious=cautious, seed=seed,
            compile=compile, names=names, state_device=state_device, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused,
        )  # fmt: skip
        super().__init__(**arguments)
