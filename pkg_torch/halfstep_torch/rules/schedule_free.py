"""Schedule-free averaging: link, `AdamWScheduleFree`, and the averaged weights of any run. Contract: A17."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules.named import SCHEDULE_FREE_ADAMW, Named
from halfstep.rules.schedule_free import ScaleByScheduleFree
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_torch.checkpoint.float32_state import decoded_states
from halfstep_torch.checkpoint.float32_weights import Weights, float32_params
from halfstep_torch.distributed.shards import local_part
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.signals import between_steps
from halfstep_torch.leaves.group_names import Group, StateDict
from halfstep_torch.links.link import link_of
from halfstep_torch.numbers.seeds import Seed
from halfstep_torch.optimizer import Optimizer, check_optimizer
from halfstep_torch.optimizer_state.form import SavedState
from halfstep_torch.optimizer_state.saved_state import headers_of, load
from halfstep_torch.optimizer_state.state_dict import read_groups
from halfstep_torch.rules.named import optimizer_arguments
from halfstep_torch.storage.state_dtypes import DType

_TRAINED = "trained"
"""Key in a state dict for the trained weights of a parameter, present while the model has averages."""

scale_by_schedule_free = link_of(ScaleByScheduleFree)


@between_steps
@torch.no_grad()
def schedule_free_eval_params(optimizer: Optimizer) -> Weights:
    """Return the averaged weights of schedule-free training in float32, for evaluation and export.

    The average is each weight (with its extra bits, if any) minus its lead. The model's own weights are for
    training. Only the difference is rounded. With DTensors all processes call it together.

    Args:
        optimizer: an `AdamWScheduleFree`, or an `Optimizer` with `scale_by_schedule_free` in its chain.

    Returns:
        Copies, as `float32_params` returns them.

    Raises:
        TypeError: if it is not an `Optimizer`.
        ValueError: if its chain has no `scale_by_schedule_free`.

    Example:
        >>> import halfstep_torch as hs
        >>> w = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> optimizer = hs.AdamWScheduleFree([("w", w)], lr=0.1, param_storage="split16")
        >>> for _ in range(2):
        ...     w.grad = torch.ones_like(w)
        ...     optimizer.step()
        >>> round(hs.schedule_free_eval_params(optimizer)["w"].item(), 6)  # of 0.9 and 0.8
        0.85

    Source: see `scale_by_schedule_free` (contract A17).
    """
    caller = "schedule_free_eval_params"
    optimizer = check_optimizer(caller, optimizer)
    links = [link for group in optimizer.bound_links() for link, _ in group]
    if not any(link.name == ScaleByScheduleFree.name for link in links):
        raise ValueError(
            f"{caller}: the optimizer averages no weights. Pass an AdamWScheduleFree, or an Optimizer of a "
            "chain with scale_by_schedule_free()."
        )
    weights = float32_params(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    leads = decoded_states(optimizer, {param for param in params if optimizer.state.get(param)})
    keys = list(weights) if isinstance(weights, dict) else range(len(weights))
    averaged: Any = weights.copy()  # by name, or by place
    for key, param in zip(keys, params, strict=True):
        if "lead" in leads.get(param, ()):
            averaged[key] = averaged[key] - leads[param]["lead"]
    return averaged


class AdamWScheduleFree(Optimizer):
    """Schedule-free AdamW, with weights of 16 bits: no schedule, and no end to choose.

    `chain(scale_by_rms, add_decayed_weights, scale_by_learning_rate, scale_by_schedule_free,
    round_stochastically)`, the first with the bias correction of Adam. All arithmetic is in float32. A step
    rounds the second moment, the lead and the weight to their dtypes, once each.

    The model holds the weights at which gradients are computed. `eval()` replaces them by the averaged
    weights, rounded to nearest, and keeps a copy. `train()` restores the copy, bit for bit. Between `eval()`
    and `train()`, `step()` raises RuntimeError, `model.state_dict()` has the averaged weights, and the
    optimizer's `state_dict()` also has the copy. So a run can resume from a checkpoint saved in either mode.

    The first arguments are as in the `schedulefree` package, `warmup_steps` and `lead_dtype` as in
    `scale_by_schedule_free`, and other arguments and errors as in `AdamW`. Besides the entries of `AdamW`,
    param groups have `momentum` (betas[0]), `alpha` (betas[1]) and `warmup_steps`.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.AdamWScheduleFree(model.named_parameters(), lr=0.0025, warmup_steps=100)
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step(zero_grad=True)
        >>> optimizer.eval()  # and model.eval()
        >>> optimizer.train()

    Source: A. Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, algorithm 1. Contract A16, A17.
    """

    named: ClassVar[Named | None] = SCHEDULE_FREE_ADAMW
    _trained: dict[Tensor, Tensor] | None = None

    @takes_recipe(SCHEDULE_FREE_ADAMW.moments)
    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        *,
        maximize: bool = False,
        lead_dtype: DType = None,
        nu_dtype: DType = None,
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
            warmup_steps=warmup_steps, maximize=maximize, lead_dtype=lead_dtype, nu_dtype=nu_dtype,
            nu_rounding=nu_rounding, recipe=recipe, param_storage=param_storage, seed=seed, compile=compile,
            names=names, state_device=state_device,
            capturable=capturable,
        )  # fmt: skip
        super().__init__(**arguments)

    @between_steps
    @torch.no_grad()
    def eval(self) -> None:
        """Put the averaged weights into the model, rounded to nearest, for evaluation or export.

        If interrupted, it restores the trained weights. If that is interrupted too, call `train()`.
        """
        self.train()  # a call before may have been interrupted
        averaged = schedule_free_eval_params(self)
        values = averaged.values() if isinstance(averaged, dict) else averaged
        params = [param for _, _, param in self._named()]
        # Set before the first weight changes, so that `train()` can restore the weights after any failure.
        self._trained = {param: param.detach().clone() for param in params}
        try:
            for param, value in zip(params, values, strict=True):
                local_part(param).copy_(local_part(value))
        except BaseException:
            self.train()
            raise

    @between_steps
    @torch.no_grad()
    def train(self) -> None:
        """Restore the trained weights, bit for bit. If interrupted, call it again."""
        if self._trained is not None:
            for param, weights in self._trained.items():  # also for a parameter since removed from its group
                local_part(param).copy_(local_part(weights))
            self._trained = None

    @between_steps
    def state_dict(self) -> StateDict:
        """Return the state as `Optimizer` does, after `eval()` with the weights that `train()` restores."""
        state_dict = super().state_dict()
        if self._trained is not None:
            state = dict(state_dict["state"])
            ids = [i for group in state_dict["param_groups"] for i in group["params"]]
            params = [param for group in self.param_groups for param in group["params"]]
            for i, param in zip(ids, params, strict=True):
                if param in self._trained:
                    state[i] = {**state.get(i, {}), _TRAINED: self._trained[param]}
            state_dict["state"] = state
        return state_dict

    @between_steps
    @torch.no_grad()
    def load_state_dict(self, state_dict: SavedState) -> None:
        """Restore as `Optimizer` does. If the state was saved after `eval()`, call `train()` then.

        A state dict does not contain the model's weights, so load them too.
        """
        rest, saved = _without_trained(state_dict)
        trained = None
        if saved:
            ids = read_groups(rest, headers_of(self))[1]
            named = [
                (_checked_trained(name, saved.get(ids[i][name]), param), param)
                for i, name, param in self._named()
            ]
            trained = {param: weights.to(param, copy=True) for weights, param in named}
        load(self, rest, lambda: setattr(self, "_trained", trained))

    def __getstate__(self) -> StateDict:
        return {**super().__getstate__(), "_trained": self._trained}

    def check_steps(self) -> None:
        """Raise RuntimeError after `eval()`. Otherwise as `Optimizer`."""
        self._refuse_averaged()
        super().check_steps()

    def plans(self) -> Iterator[tuple[str, Tensor, Plan]]:
        """Raise RuntimeError after `eval()`, when the weights are averages. Otherwise as `Optimizer`."""
        self._refuse_averaged()
        return super().plans()

    def add_param_group(self, param_group: Group) -> None:
        """Raise RuntimeError after `eval()`, which kept no weights of these. Otherwise as `Optimizer`."""
        self._refuse_averaged()
        super().add_param_group(param_group)

    def _refuse_averaged(self) -> None:
        if self._trained is not None:
            raise RuntimeError(
                f"{self._name}: the model has the averaged weights, of eval(), and a step needs those that "
                "are trained. Call train() first."
            )


def _without_trained(state_dict: SavedState) -> tuple[SavedState, dict[int | str, object]]:
    """Return a state dict without the trained weights that `eval` stored, and these by parameter id."""
    saved = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    saved = saved if isinstance(saved, Mapping) else {}
    held = {i: kept for i, kept in saved.items() if isinstance(kept, Mapping) and _TRAINED in kept}
    if not held:
        return state_dict, {}
    rest = {i: {key: x for key, x in kept.items() if key != _TRAINED} for i, kept in held.items()}
    weights = {i: kept[_TRAINED] for i, kept in held.items()}
    return {**state_dict, "state": {**saved, **rest}}, weights


def _checked_trained(name: str, weights: object, param: Tensor) -> Tensor:
    """Return saved weights; raise ValueError unless `train()` can put them back into its parameter."""
    if not isinstance(weights, Tensor):
        found = "not there" if weights is None else f"a {type(weights).__name__}"
    elif (weights.shape, weights.dtype, weights.layout) != (param.shape, param.dtype, param.layout):
        found = f"{weights.layout}, {weights.dtype}{list(weights.shape)}"
    elif weights.is_meta and not param.is_meta:
        found = "on meta, without numbers"
    else:
        return weights
    raise ValueError(
        f"load_state_dict: {_TRAINED!r} of {name!r}, the weights that train() puts back, is {found}; the "
        f"parameter is {param.layout}, {param.dtype}{list(param.shape)}. The file is damaged: load another."
    )
