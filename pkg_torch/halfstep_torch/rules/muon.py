"""The Muon update rule, and `Muon` as an optimizer, with AdamW for the rest. Contract: A13, A14, A22."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from halfstep.hyperparameters import Values, several
from halfstep.recipes import Recipe, takes_recipe
from halfstep.rule import Rule
from halfstep.rules import muon as shared
from halfstep.rules.muon import NS_COEFFS, ScaleByMuon, matrices_of
from halfstep.rules.muon_split import MatrixChoice
from halfstep.rules.named import MUON
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.links.chain import Chain, ChainByOptions, chain
from halfstep_torch.links.link import Link, ParamInfo, checked_rule, link_of
from halfstep_torch.numbers.newton_schulz import newton_schulz
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.rules.muon_parts import MuonChain
from halfstep_torch.rules.muon_split import OUTPUT_AXIS, check_use_muon, split_groups, split_new
from halfstep_torch.storage.state_dtypes import DType

_MUON = "scale_by_muon"
_SCALES = {None: "original", "original": "original", "match_rms_adamw": "consistent_rms"}


class Orthogonalize(shared.Orthogonalize, Link):
    """The factor of matrices in torch."""

    name = _MUON
    usual_output_axis = OUTPUT_AXIS
    reads_names = True
    needs_finite = True

    def bind(self, caller: str, h: Values, info: ParamInfo) -> BoundRule | None:
        """Bind the rule. Raise ValueError with its name for a parameter that is not a matrix."""
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
    """Return the link of the factor and, if requested, the link that normalizes rows."""
    factor, rows = rule.of_factor(caller, Orthogonalize)
    return [factor] if rows is None else [factor, checked_rule(rows)]


scale_by_muon = link_of(ScaleByMuon, _links)


class Muon(Optimizer):
    """Muon for the hidden matrices of a model, AdamW for the rest, with weights of 16 bits or float32.

    Muon updates parameters with two axes, unless the name contains embedding or head. AdamW updates all
    others. The split is printed once. Param groups are not changed, and each may hold both kinds of
    parameters. A group with `use_muon` True or False has only one kind. Matrices go through `scale_by_muon`
    and others through `scale_by_adam`, both then through decoupled decay, the learning rate and weight
    storage, as in `AdamW`. In float32 with `ns_dtype="bfloat16"`, the matrices match `torch.optim.Muon` to
    within the rounding of its factor. Arguments not listed are as in `scale_by_muon` and `AdamW`.

    A group has entries for both kinds: `lr`, `weight_decay`, `momentum`, `mu_dtype` for Muon, and `betas`,
    `nu_dtype`, `adam_eps`, `adam_weight_decay`, `adam_mu_dtype` for AdamW. The learning rate for AdamW is
    `lr` times `adam_lr_ratio`, so schedulers change both. In a new group with `use_muon=False`, `eps`,
    `mu_dtype` and `mu_rounding` set the values for AdamW.

    Args:
        params: pairs (name, parameter), or dicts of groups of them.
        lr: as in `AdamW`, for both.
        weight_decay: decoupled decay of the weights updated by Muon.
        momentum: decay rate of the momentum, `beta` of `scale_by_muon`.
        ns_coefficients: coefficients of the Newton-Schulz iteration, `ns_coeffs` of `scale_by_muon`.
        adjust_lr_fn: None or "original", or "match_rms_adamw": `scale="consistent_rms"`.
        matrices: overrides the split: a function of leaf name ("layers/0/weight") and parameter, or a mapping
            from patterns of names. True is Muon, False AdamW, `MatrixAxes` Muon with these axes, None the
            default.
        mu_rounding: rounding of the momentum: "auto", "stochastic", "nearest" or "nearest_unchecked".
        adam_lr: the learning rate for AdamW, or None for `lr`. A group may set its own, otherwise it has the
            same `adam_lr_ratio`. If `lr` or `adam_lr` is a function, the two rates are independent.
        betas: decay rates of both moments of `AdamW`.
        adam_eps: `eps` of `AdamW`.
        adam_weight_decay: decay of the weights updated by AdamW, or None for `weight_decay`. A group's
            `weight_decay` is for both kinds.
        adam_mu_dtype: `mu_dtype` of `AdamW`.
        adam_mu_rounding: `mu_rounding` of `AdamW`.
        recipe: as in `AdamW`, for the weights updated by AdamW and for `param_storage`. The momentum is then
            `scaled("float16", 128)`, which takes as many bytes as two moments of 8 bits; float32 under
            "full_precision".
        cautious: for both decays, as in `add_decayed_weights`.
        compile: as in `Optimizer`. Torch's own matrix products compute the orthogonalization.
        names: as in `Optimizer`. A parameter with two names is tied, and AdamW steps it.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if an argument is out of range, parameters have no names, a pattern of `matrices` matches
            nothing, nothing is left to Muon, or `adam_lr` is a number beside lr=0.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8)).to(torch.bfloat16)
        >>> optimizer = hs.Muon(model.named_parameters(), lr=0.02)
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> [sorted(optimizer.state[p]) for p in model[0].parameters()]
        [['momentum_buffer', 'step'], ['exp_avg', 'exp_avg_sq', 'step']]

    Source: as `scale_by_muon`, with the arguments of `torch.optim.Muon`.
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
        options = {"use_muon": None, "output_axis": OUTPUT_AXIS, "reduction_axis": None}
        options |= {"mu_rounding": mu_rounding, "adam_mu_rounding": adam_mu_rounding}
        options |= {"nu_rounding": nu_rounding, "param_storage": param_storage}
        names = None if names is None else list(names.items() if isinstance(names, Mapping) else names)
        groups, axes = split_groups(caller, params, matrices, names)
        patterns = matrices if isinstance(matrices, Mapping) else None
        make = MuonChain(caller, given, of_factor, lr, adam_lr, adam_weight_decay, axes, patterns)
        tx = ChainByOptions(make, options)
        super().__init__(
            groups, tx, maximize=maximize, compile=compile, names=names, state_device=state_device
        )

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in `Optimizer`.

        Without `use_muon` its parameters are split by name and axes, and by `matrices` if it is a mapping.
        """
        if isinstance(param_group, dict) and "params" in param_group:
            check_use_muon(self._name, param_group)
            make, names = self._tx.make, self._given_names or {}
            assert isinstance(make, MuonChain)
            if param_group.get("use_muon") is None:
                param_group = split_new(self._name, param_group, names, make.axes, make.patterns)
            param_group = make.completed(param_group)
        super().add_param_group(param_group)


def _scale_of(caller: str, adjust_lr_fn: str | None) -> str | None:
    if adjust_lr_fn not in _SCALES:
        raise ValueError(
            f"{caller}: adjust_lr_fn={adjust_lr_fn!r} is not a scale. "
            'Use None, "original" or "match_rms_adamw".'
        )
    return _SCALES[adjust_lr_fn]
