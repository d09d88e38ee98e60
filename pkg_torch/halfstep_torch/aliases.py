"""The usual optimizers: chains under torch's names, no arithmetic."""

from collections.abc import Iterable, Sequence
from typing import Any

from halfstep_torch.adam import ScaleByAdam
from halfstep_torch.chain import Chain, chain
from halfstep_torch.learning_rate import ScaleByLearningRate
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.params import RoundStochastically
from halfstep_torch.random_words import check_seed
from halfstep_torch.weight_decay import AddDecayedWeights

_STORAGES = ("stochastic", "nearest")


class Adam(Optimizer):
    """Adam with L2 decay."""

    _decay_first = True

    def __init__(
        self,
        params: Iterable,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        mu_dtype: Any = None,
        nu_dtype: Any = None,
        mu_rounding: str = "auto",
        nu_rounding: str = "stochastic",
        param_storage: str = "stochastic",
        seed: int | Sequence[int] = 0,
        compile: bool | str = "auto",
    ) -> None:
        function = type(self).__name__
        if param_storage not in _STORAGES:
            raise ValueError(
                f"{function}: param_storage={param_storage!r} is not a way to store weights. "
                'Use "stochastic" or "nearest".'
            )
        seed = check_seed(function, seed)
        adam = ScaleByAdam(*betas, eps, 0.0, mu_dtype, nu_dtype, mu_rounding, nu_rounding, False, seed)
        decay = AddDecayedWeights(weight_decay)
        links = [decay, adam] if self._decay_first else [adam, decay]
        links.append(ScaleByLearningRate(lr))
        if param_storage == "stochastic":
            links.append(RoundStochastically(seed))
        super().__init__(params, chain(*links), maximize=maximize, compile=compile)


class AdamW(Adam):
    """Adam with decoupled decay."""

    _decay_first = False

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, **kwargs):
        super().__init__(params, lr, betas, eps, weight_decay, **kwargs)
