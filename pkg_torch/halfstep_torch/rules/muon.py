"""The Muon update rule, and `Muon` as an optimizer, with AdamW for the rest. Contract: A13, A14, A22."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from halfstep.hyperparameters import Arguments, Values, several
from halfstep.recipes import Recipe, takes_recipe
from halfstep.rule import Rule
from halfstep.rules import muon as shared
from halfstep.rules.muon import NS_COEFFS, ScaleByMuon, matrices_of
from halfstep.rules.muon_split import MatrixChoice
from halfstep.rules.named import MUON, MUON_OF_MATRICES, MUON_OF_THE_REST
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.links.chain import Chain, ChainByOptions, chain
from halfstep_torch.links.link import Link, ParamInfo, checked_rule, link_of
from halfstep_torch.numbers.newton_schulz import newton_schulz
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.rules.muon_split import OUTPUT_AXIS, split_groups
from halfstep_torch.rules.named import links_of
from halfstep_torch.storage.state_dtypes import DType
from halfstep_torch.weights.weight_storage import with_param_storage

_MUON = "scale_by_muon"
_SCALES = {None: "original", "original": "original", "match_rms_adamw": "consistent_rms"}
Axes = int | tuple[int, ...]


class Orthogonalize(shared.Orthogonalize, Link):
    """The factor of matrices in torch."""

    name = _MUON
    usual_output_axis = OUTPUT_AXIS
    reads_names = True
    needs_finite = True

    def bind(self, caller: str, h: Values, info: ParamInfo) -> BoundRule | None:
        """Refuse, by its name, a parameter that is no matrix."""
        matrices_of(f"{caller}: '{info.name}'", tuple(info.shape), self.reduction_axis, self.output_axis)
        return super().bind(caller, h, info)

    def factor(self, x: Tensor, matrices: shared.Matrices) -> Tensor:
        """Return the Newton-Schulz factor of every matrix."""
        coefficients = shared.coefficients_of(self.ns_coeffs, self.ns_steps)
        return newton_schulz(x, matrices, coefficients, self.eps, self.ns_dtype)


def _links(rule: ScaleByMuon) -> Chain:
    """Return the links of the momentum and of the factors of matrices."""
    of_factor = _of_factor(_MUON, rule)
    return chain(checked_rule(rule.momentum), *of_factor)


def _of_factor(caller: str, rule: ScaleByMuon) -> list[Rule]:
    """Return the link of the factor, and that of normalized rows if asked for."""
    factor, rows = rule.of_factor(caller, Orthogonalize)
    return [factor] if rows is None else [factor, checked_rule(rows)]


scale_by_muon = link_of(ScaleByMuon, _links)


class Muon(Optimizer):
    """Muon for the hidden matrices of a model, AdamW for the rest, with weights of 16 bits or float32.

    Every group of parameters becomes two, with the entry `use_muon`. Muon steps parameters with two axes,
    unless the name says embedding or head. AdamW steps all others. The split is printed once. A group that
    has `use_muon` stays as it is. Chains are `scale_by_muon` or `scale_by_adam`, then decoupled decay, the
    learning rate and the storage of weights, as in `AdamW`. In float32, with `ns_dtype="bfloat16"`, what Muon
    steps is `torch.optim.Muon` to within the rounding of its factor. Arguments that are not listed are those
    of `scale_by_muon` and `AdamW`.

    Args:
        params: pairs (name, parameter), or dicts of groups of them.
        lr: as in `AdamW`, for both.
        weight_decay: decoupled decay of what Muon steps.
        momentum: `beta` of `scale_by_muon`.
        ns_coefficients: `ns_coeffs` there.
        adjust_lr_fn: None or "original", or "match_rms_adamw": `scale="consistent_rms"`.
        matrices: overrides the split: a function of leaf name ("layers/0/weight") and parameter, or a mapping
            from patterns of names. True is Muon, False AdamW, `MatrixAxes` Muon with these axes, None the
            default.
        mu_rounding: as there; in a group of AdamW the entry is for `exp_avg`.
        adam_lr: the learning rate of AdamW; None: `lr`.
        betas: as `adam_eps` and the like those of `AdamW`, for what it steps.
        adam_eps: as there.
        adam_weight_decay: as there; None: `weight_decay`.
        adam_mu_dtype: as `mu_dtype` there.
        adam_mu_rounding: as `mu_rounding` there.
        recipe: as in `AdamW`, for what it steps and for `param_storage`. The momentum is then
            `scaled("float16", 128)`, which takes as many bytes as two moments of 8 bits; float32 under
            "full_precision".
        cautious: of both decays, as in `add_decayed_weights`.
        compile: as there; the factor is made of torch's own products of matrices.
        names: as there. A parameter with two names is tied, and AdamW steps it.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if one is out of range, parameters have no names, a pattern of `matrices` matches nothing,
            or nothing is left to Muon.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8)).to(torch.bfloat16)
        >>> optimizer = hs.Muon(model.named_parameters(), lr=0.02)
        >>> [(group["use_muon"], group["param_names"]) for group in optimizer.param_groups]
        [(True, ['0.weight', '1.weight']), (False, ['0.bias', '1.bias'])]

    Source: as `scale_by_muon`; arguments are those of `torch.optim.Muon`.
    """

    named = MUON

    @takes_recipe(MUON.moments)
    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor | Callable[[int], float] = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence = NS_COEFFS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        normalize: str | None = None,
        beta2: float = 0.95,
        matrices: MatrixChoice = None,
        maximize: bool = False,
        ns_dtype: str = "float32",
        bias_correction: bool = False,
        mu_dtype: DType = None,
        mu_rounding: Rounding = "auto",
        adam_lr: float | Tensor | Callable[[int], float] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        adam_weight_decay: float | None = None,
        adam_mu_dtype: DType = None,
        nu_dtype: DType = None,
        adam_mu_rounding: Rounding = "auto",
        nu_rounding: Rounding = "stochastic",
        recipe: Recipe | None = None,
        param_storage: ParamStorage | None = None,
        cautious: bool = False,
        seed: Seed = 0,
        compile: bool | Literal["auto"] = "auto",
        names: Iterable | None = None,
        state_device: str | None = None,
    ) -> None:
        caller = type(self).__name__
        options = {"ns_dtype": ns_dtype, "normalize": normalize, "beta2": beta2}
        rule = ScaleByMuon(
            ns_coefficients, ns_steps, eps=eps, scale=_scale_of(caller, adjust_lr_fn), **options
        )
        of_factor = _of_factor(caller, rule)
        b1, b2 = several(caller, "betas", betas, 2)
        given = {**locals(), "beta": momentum, "learning_rate": lr, "adam_b1": b1, "adam_b2": b2}
        given = {name: given[name] for name in MUON.arguments & given.keys()}
        given["seed"] = as_seed(caller, seed)
        options = {"use_muon": True, "output_axis": OUTPUT_AXIS, "reduction_axis": None}
        options |= {"mu_rounding": mu_rounding, "nu_rounding": nu_rounding, "param_storage": param_storage}
        of_adamw = {"lr": lr if adam_lr is None else adam_lr, "mu_dtype": adam_mu_dtype}
        of_adamw["mu_rounding"] = adam_mu_rounding
        of_adamw["weight_decay"] = weight_decay if adam_weight_decay is None else adam_weight_decay
        names = None if names is None else list(names.items() if isinstance(names, Mapping) else names)
        groups = split_groups(caller, params, matrices, names)
        groups = [group if group["use_muon"] else {**of_adamw, **group} for group in groups]
        make = functools.partial(_chain, caller, given, of_factor)
        adam = chain(links_of(MUON_OF_THE_REST, given)[0])
        tx = ChainByOptions(make, options, others=adam.entries)
        super().__init__(
            groups, tx, maximize=maximize, compile=compile, names=names, state_device=state_device
        )


def _scale_of(caller: str, adjust_lr_fn: str | None) -> str | None:
    if adjust_lr_fn not in _SCALES:
        raise ValueError(
            f"{caller}: adjust_lr_fn={adjust_lr_fn!r} is not a scale. "
            'Use None, "original" or "match_rms_adamw".'
        )
    return _SCALES[adjust_lr_fn]


def _chain(
    caller: str,
    given: Arguments,
    of_factor: Sequence[Rule],
    *,
    use_muon: bool,
    output_axis: Axes,
    reduction_axis: Axes | None,
    param_storage: str,
    mu_rounding: str,
    nu_rounding: str,
) -> Chain:
    """Return the chain of a group: that of Muon, or that of AdamW."""
    rounded = {"mu_rounding": mu_rounding, "adam_mu_rounding": mu_rounding, "nu_rounding": nu_rounding}
    links = links_of(MUON_OF_MATRICES if use_muon else MUON_OF_THE_REST, {**given, **rounded})
    if use_muon:
        axes = {"output_axis": output_axis, "reduction_axis": reduction_axis}
        links[1:1] = [dataclasses.replace(link, **axes) for link in of_factor]
    return with_param_storage(caller, chain(*links), param_storage, given["seed"])
