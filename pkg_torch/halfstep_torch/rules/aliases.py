"""The usual optimizers: chains under the names and arguments of torch, no arithmetic."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from halfstep_torch.chain import Chain, chain
from halfstep_torch.engine.optimizer import Optimizer
from halfstep_torch.numbers.hyperparameters import pair
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.rules.adam import ScaleByAdam
from halfstep_torch.rules.learning_rate import ScaleByLearningRate
from halfstep_torch.rules.lion import ScaleByLion
from halfstep_torch.rules.trace import Trace
from halfstep_torch.rules.weight_decay import AddDecayedWeights
from halfstep_torch.storage.formats import Format
from halfstep_torch.weights.params import Compensate, RoundStochastically
from halfstep_torch.weights.wide_params import keep_master_params, split_params

DType = str | torch.dtype | Format | None


class Adam(Optimizer):
    """Adam with L2 decay, as `torch.optim.Adam`, for weights and moments in 16 bits.

    `chain(add_decayed_weights, scale_by_adam, scale_by_learning_rate, round_stochastically)`: all arithmetic
    in float32; rounds each moment to its dtype, and the weight to its own, once per step. In float32
    throughout it is `torch.optim.Adam` to within rounding.

    Args:
        params: parameters, pairs (name, parameter), or dicts of groups; float32, bfloat16 or float16.
        lr: learning rate: a number, a float32 tensor of one element, or a function from a parameter's count
            of steps so far to a number.
        betas: decay rates of the two moments.
        eps: added to the square root of the second moment.
        weight_decay: L2 decay, added to the gradient.
        maximize: ascend.
        mu_dtype: how the first moment (`exp_avg`) is stored: "float32", "bfloat16", "float16", a torch dtype,
            a `scaled` or `codebook` format with a sign, or None: bfloat16 for bfloat16 weights, else float32.
        nu_dtype: how the second (`exp_avg_sq`) is stored: any of these, a `scaled` or `codebook` format
            without a sign, or "ufloat8_e6m2".
        mu_rounding: "stochastic", "nearest", "auto" (nearest unless that would freeze the moment) or
            "nearest_unchecked".
        nu_rounding: likewise, for the second moment.
        param_storage: how weights of 16 bits are stored: "stochastic" (rounded so), "nearest", "compensated"
            (`compensate`), "split8" or "split16" (`split_params`), or "master" (`keep_master_params`).
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).
        compile: True, False or "auto"; the bits are the same.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if one is out of range, a dtype holds no moment, or a rounding freezes it.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.Adam(model.named_parameters(), lr=1e-3, nu_dtype="float32")
        >>> optimizer.param_groups[0]["nu_dtype"]
        'float32'

    Source: D. Kingma, J. Ba, "Adam", ICLR 2015. Contract A5, A6.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        mu_dtype: DType = None,
        nu_dtype: DType = None,
        mu_rounding: str = "auto",
        nu_rounding: str = "stochastic",
        param_storage: str = "stochastic",
        seed: Seed = 0,
        compile: bool | str = "auto",
    ) -> None:
        function = type(self).__name__
        seed = as_seed(function, seed)
        b1, b2 = pair(function, "betas", betas)
        adam = ScaleByAdam(
            b1=b1,
            b2=b2,
            eps=eps,
            mu_dtype=mu_dtype,
            nu_dtype=nu_dtype,
            mu_rounding=mu_rounding,
            nu_rounding=nu_rounding,
            seed=seed,
        )
        links = [AddDecayedWeights(weight_decay), adam, ScaleByLearningRate(lr)]
        tx = stored(function, chain(*links), param_storage, seed)
        super().__init__(params, tx, maximize=maximize, compile=compile)


class AdamW(Optimizer):
    """Adam with decoupled decay, as `torch.optim.AdamW`, for weights and moments in 16 bits.

    `chain(scale_by_adam, add_decayed_weights, scale_by_learning_rate, round_stochastically)`: all arithmetic
    in float32; rounds each moment to its dtype, and the weight to its own, once per step. In float32
    throughout it is `torch.optim.AdamW` to within rounding.

    Args:
        params: parameters, pairs (name, parameter), or dicts of groups; float32, bfloat16 or float16.
        lr: learning rate: a number, a float32 tensor of one element, or a function from a parameter's count
            of steps so far to a number.
        betas: decay rates of the two moments.
        eps: added to the square root of the second moment.
        weight_decay: decoupled decay; it is scaled by the learning rate.
        maximize: ascend.
        mu_dtype: how the first moment (`exp_avg`) is stored: "float32", "bfloat16", "float16", a torch dtype,
            a `scaled` or `codebook` format with a sign, or None: bfloat16 for bfloat16 weights, else float32.
        nu_dtype: how the second (`exp_avg_sq`) is stored: any of these, a `scaled` or `codebook` format
            without a sign, or "ufloat8_e6m2".
        mu_rounding: "stochastic", "nearest", "auto" (nearest unless that would freeze the moment) or
            "nearest_unchecked".
        nu_rounding: likewise, for the second moment.
        param_storage: how weights of 16 bits are stored: "stochastic" (rounded so), "nearest", "compensated"
            (`compensate`), "split8" or "split16" (`split_params`), or "master" (`keep_master_params`).
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).
        compile: True, False or "auto"; the bits are the same.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if one is out of range, a dtype holds no moment, or a rounding freezes it.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.AdamW(model.named_parameters(), lr=1e-3, weight_decay=0.1, seed=0)
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step(zero_grad=True)

    Source: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", ICLR 2019. Contract A5, A6.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        mu_dtype: DType = None,
        nu_dtype: DType = None,
        mu_rounding: str = "auto",
        nu_rounding: str = "stochastic",
        param_storage: str = "stochastic",
        seed: Seed = 0,
        compile: bool | str = "auto",
    ) -> None:
        function = type(self).__name__
        seed = as_seed(function, seed)
        b1, b2 = pair(function, "betas", betas)
        adam = ScaleByAdam(
            b1=b1,
            b2=b2,
            eps=eps,
            mu_dtype=mu_dtype,
            nu_dtype=nu_dtype,
            mu_rounding=mu_rounding,
            nu_rounding=nu_rounding,
            seed=seed,
        )
        links = [adam, AddDecayedWeights(weight_decay), ScaleByLearningRate(lr)]
        tx = stored(function, chain(*links), param_storage, seed)
        super().__init__(params, tx, maximize=maximize, compile=compile)


class Lion(Optimizer):
    """Lion with decoupled decay, for weights and its average in 16 bits or fewer.

    `chain(scale_by_lion, add_decayed_weights, scale_by_learning_rate, round_stochastically)`: all arithmetic
    in float32; rounds the average to its dtype, and the weight to its own, once per step.

    Args:
        params: as `AdamW` takes them.
        lr: as `AdamW` takes it.
        betas: rate of the average whose sign is taken, and decay rate of the average that is kept.
        weight_decay: decoupled decay; it is scaled by the learning rate.
        maximize: ascend.
        mu_dtype: how the average (`exp_avg`) is stored, as in `scale_by_lion`.
        mu_rounding: as in `scale_by_lion`.
        param_storage: how weights of 16 bits are stored, as in `AdamW`.
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).
        compile: True, False or "auto"; the bits are the same.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if one is out of range, a dtype holds no moment, or a rounding freezes it.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.Lion(model.named_parameters(), lr=1e-4, mu_dtype="bfloat16")
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step(zero_grad=True)

    Source: X. Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
    Contract A6, A9.
    """

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
        param_storage: str = "stochastic",
        seed: Seed = 0,
        compile: bool | str = "auto",
    ) -> None:
        function = type(self).__name__
        seed = as_seed(function, seed)
        b1, b2 = pair(function, "betas", betas)
        lion = ScaleByLion(b1=b1, b2=b2, mu_dtype=mu_dtype, mu_rounding=mu_rounding, seed=seed)
        links = [lion, AddDecayedWeights(weight_decay), ScaleByLearningRate(lr)]
        tx = stored(function, chain(*links), param_storage, seed)
        super().__init__(params, tx, maximize=maximize, compile=compile)


class SGD(Optimizer):
    """Gradient descent with L2 decay and momentum, as `torch.optim.SGD`, for weights and momentum in 16 bits.

    `chain(add_decayed_weights, trace, scale_by_learning_rate, round_stochastically)`: all arithmetic in
    float32; rounds the momentum to its dtype, and the weight to its own, once per step. In float32 throughout
    it is `torch.optim.SGD` without dampening to within rounding.

    Args:
        params: as `AdamW` takes them.
        lr: as `AdamW` takes it.
        momentum: decay of the sum of gradients; 0 keeps none.
        weight_decay: L2 decay, added to the gradient.
        nesterov: look one step ahead.
        maximize: ascend.
        accumulator_dtype: how the sum (`momentum_buffer`) is stored, as in `trace`.
        rounding: of the sum, as in `trace`.
        param_storage: how weights of 16 bits are stored, as in `AdamW`.
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).
        compile: True, False or "auto"; the bits are the same.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if one is out of range, `nesterov` has no momentum, a dtype holds no sum, or a rounding
            freezes it.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step(zero_grad=True)

    Source: I. Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
    2013, in torch's form. Contract A6, A10.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        accumulator_dtype: DType = None,
        rounding: str = "auto",
        param_storage: str = "stochastic",
        seed: Seed = 0,
        compile: bool | str = "auto",
    ) -> None:
        function = type(self).__name__
        seed = as_seed(function, seed)
        if nesterov and not momentum:
            raise ValueError(
                f"{function}: nesterov=True with momentum={momentum}. Use a momentum such as 0.9."
            )
        # In the chain even if momentum is 0: a group may have a momentum of its own.
        trace = Trace(
            decay=momentum,
            nesterov=nesterov,
            accumulator_dtype=accumulator_dtype,
            rounding=rounding,
            seed=seed,
            without_zero=True,
        )
        links = [AddDecayedWeights(weight_decay), trace, ScaleByLearningRate(lr)]
        tx = stored(function, chain(*links), param_storage, seed)
        super().__init__(params, tx, maximize=maximize, compile=compile)


def stored(function: str, tx: Chain, param_storage: str, seed: int) -> Chain:
    """Return a chain that ends with a way of storing weights.

    Args:
        function: the alias, for the message.
        tx: the links before.
        param_storage: its argument.
        seed: of the random words.

    Raises:
        ValueError: if `param_storage` is no way to store weights.
    """
    ways: dict[str, Callable[[], Chain]] = {
        "stochastic": lambda: chain(tx, RoundStochastically(seed=seed)),
        "nearest": lambda: tx,
        "compensated": lambda: chain(tx, Compensate()),
        "split8": lambda: split_params(tx, 8, seed=seed),
        "split16": lambda: split_params(tx, 16, seed=seed),
        "master": lambda: keep_master_params(tx),
    }
    if param_storage not in ways:
        names = [f'"{name}"' for name in ways]
        raise ValueError(
            f"{function}: param_storage={param_storage!r} is not a way to store weights. "
            f"Use {', '.join(names[:-1])} or {names[-1]}."
        )
    return ways[param_storage]()
