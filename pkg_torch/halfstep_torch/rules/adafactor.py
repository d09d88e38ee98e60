"""Adafactor's links, and `Adafactor` as an optimizer. Contract: A18, A19."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Literal

from torch import Tensor

from halfstep.hyperparameters import Scalar, several
from halfstep.rule import number
from halfstep.rules import adafactor as shared
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_torch.links.chain import Chain, ChainByOptions, chain
from halfstep_torch.links.group_entries import check_torch_options
from halfstep_torch.links.link import link_of
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.rules.learning_rate import LEARNING_RATE, ScaleByLearningRate
from halfstep_torch.rules.weight_decay import AddDecayedWeights
from halfstep_torch.storage.state_dtypes import DType
from halfstep_torch.weights.weight_storage import with_param_storage

scale_by_factored_rms = link_of(shared.ScaleByFactoredRms)
clip_by_block_rms = link_of(shared.ClipByBlockRms)
scale_by_param_block_rms = link_of(shared.ScaleByParamBlockRms)

_EPS1 = 2.0**-23


def _check_decay(caller: str, name: str, value: Scalar, decay: float) -> None:
    """Raise ValueError for a power of the count outside [-1, 0]."""
    if not -1 <= decay <= 0:
        raise ValueError(
            f"{caller}: {name}={value} is outside [-1, 0], so that 1 - t^{name} is no rate of an average. "
            "Use a power such as -0.8."
        )


class ScaleByFactoredRms(shared.ScaleByFactoredRms):
    """The rule with torch's entries: a negative decay and a pair of epsilons."""

    name = "scale_by_factored_rms"

    decay_rate: Scalar = number(-0.8, torch="beta2_decay", check=_check_decay)
    epsilon: Scalar = number(0.0, torch=None)
    floor: Scalar = number(None, none=_EPS1, torch="eps[0]")
    min_scale: Scalar = number(1e-3, torch="eps[1]")

    def numbers(self, h, t, op):
        """Return the rule's numbers, for its positive power."""
        return super().numbers(h._replace(decay_rate=-h.decay_rate), t, op)


class ClipByBlockRms(shared.ClipByBlockRms):
    """The rule with torch's entry."""

    name = "clip_by_block_rms"

    threshold: Scalar = number(torch="d", check=shared.check_threshold)


class ScaleByParamBlockRms(shared.ScaleByParamBlockRms):
    """The rule with torch's entry, which the link of the second moment owns."""

    name = "scale_by_param_block_rms"

    floor: Scalar = number(None, none=_EPS1, torch="eps[0]", owned=False)
    min_scale: Scalar = number(1e-3, torch="eps[1]", owned=False)


class ScaleByRelativeStep(ScaleByLearningRate):
    """Multiply the update by minus the relative step: the smaller of the learning rate and 1/sqrt(t)."""

    def numbers(self, h, t, op):
        """Return the step with its sign."""
        return {"learning_rate": -op.minimum(h.learning_rate, 1.0 / op.sqrt(op.float32(t)))}


class AddAbsoluteDecay(AddDecayedWeights):
    """Subtract lr weight_decay p, independent of the relative step."""

    name = "add_decayed_weights"

    learning_rate: Scalar = LEARNING_RATE(default=None, owned=False)
    absolute: bool = True

    def numbers(self, h, t, op):
        """Return the share."""
        return {"weight_decay": h.weight_decay * h.learning_rate}


class Adafactor(Optimizer):
    """Adafactor with 16-bit weights and a factored second moment, a row and a column for each matrix.

    `chain(scale_by_factored_rms, clip_by_block_rms, the relative step, scale_by_param_block_rms,
    add_decayed_weights, round_stochastically)`: all arithmetic in float32. With t the count of steps and u
    the update of the first two links:

        p <- round(p - (min(lr, 1/sqrt(t)) u max(rms(p), eps[1])) - lr weight_decay p)

    In float32 it is `torch.optim.Adafactor` to within rounding, except for arrays of three axes and more. As
    in Optax, the two longest axes are factored, and torch factors the last two. `eps[0]=None` is 2^-23 for
    weights of any dtype. In torch it is 0.0078 for bfloat16 weights.

    Args:
        params: as in `AdamW`.
        lr: the largest relative step, and the rate of decay.
        beta2_decay: minus `decay_rate` of `scale_by_factored_rms`: -1 to 0.
        eps: `floor` of `scale_by_factored_rms`, and `min_scale` of `scale_by_param_block_rms`.
        d: `threshold` of `clip_by_block_rms`.
        weight_decay: as in `AdamW`.
        maximize: maximize the objective instead of minimizing it.
        min_dim_size_to_factor: arrays with a shorter second axis are not factored; torch has no bound.
        nu_dtype: format of second moments that are not factored, as in `AdamW`.
        nu_rounding: rounding of these second moments, as in `AdamW`.
        param_storage: with the other arguments, as in `AdamW`.
        scale_parameter: True. This and the next two are arguments of `Adafactor` in transformers.
        relative_step: True.
        warmup_init: False.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if one is out of range.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
        >>> optimizer = hs.Adafactor(model.named_parameters())
        >>> model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["row_var"].shape
        torch.Size([32, 1])

    Source: as `scale_by_factored_rms`, with the arguments of `torch.optim.Adafactor`.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        min_dim_size_to_factor: int = 0,
        nu_dtype: DType = None,
        nu_rounding: Rounding = "stochastic",
        param_storage: ParamStorage = "stochastic",
        seed: Seed = 0,
        compile: bool | Literal["auto"] = "auto",
        names: Iterable | None = None,
        state_device: str | None = None,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        caller = type(self).__name__
        check_torch_options(caller, locals())
        floor, min_scale = several(caller, "eps", eps, 2)
        rule = ScaleByFactoredRms(
            decay_rate=beta2_decay, min_dim_size_to_factor=min_dim_size_to_factor, floor=floor,
            nu_dtype=nu_dtype, seed=as_seed(caller, seed), min_scale=min_scale,
        )  # fmt: skip
        make = functools.partial(_adafactor_chain, caller, rule, d, lr, weight_decay)
        tx = ChainByOptions(make, {"nu_rounding": nu_rounding, "param_storage": param_storage})
        super().__init__(
            params, tx, maximize=maximize, compile=compile, names=names, state_device=state_device
        )


def _adafactor_chain(
    caller: str,
    rule: ScaleByFactoredRms,
    d: Scalar,
    lr: Scalar,
    weight_decay: Scalar,
    *,
    param_storage: str,
    **kept: str,
) -> Chain:
    """Return the links in Optax's order."""
    links = [dataclasses.replace(rule, **kept), ClipByBlockRms(d), ScaleByRelativeStep(lr)]
    links += [ScaleByParamBlockRms(), AddAbsoluteDecay(weight_decay, learning_rate=lr)]
    return with_param_storage(caller, chain(*links), param_storage, rule.seed)
