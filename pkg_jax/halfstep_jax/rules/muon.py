"""The Muon update rule as an Optax transform, and `muon` as an optimizer, with AdamW for the rest.

Contract: A13, A14, A22.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from halfstep.hyperparameters import Arguments
from halfstep.recipes import Recipe, takes_recipe
from halfstep.rules import muon as shared
from halfstep.rules.muon import (
    NS_COEFFS,
    MatrixAxes,
    MuonMomentum,
    NormalizeRows,
    ScaleByMuon,
    axes_of,
    matrices_of,
)
from halfstep.rules.muon_split import MatrixChoice, announce, split
from halfstep.rules.named import MUON, MUON_OF_MATRICES, MUON_OF_THE_REST
from halfstep.storage.moment_formats import Rounding
from halfstep.weight_storage import ParamStorage
from halfstep_jax.leaf_calls import Tree, value_of, waiting_calls
from halfstep_jax.leaves import named_leaves
from halfstep_jax.meshes.placement import cut_as, whole_along
from halfstep_jax.numbers.hyperparameters import check_static
from halfstep_jax.numbers.newton_schulz import newton_schulz
from halfstep_jax.rule import state_of
from halfstep_jax.rules.named import links_of
from halfstep_jax.rules.weight_decay import Mask
from halfstep_jax.storage.state_dtypes import StateDType
from halfstep_jax.transform import as_transform, transform_of
from halfstep_jax.weights.weight_storage import with_param_storage

_MUON = "scale_by_muon"
OUTPUT_AXIS = 1


@state_of(MuonMomentum)
class ScaleByMuonState(NamedTuple):
    """State of `scale_by_muon`; its fields are as in `ScaleByAdamState`."""

    count: jax.Array
    seed: jax.Array
    mu: optax.Updates
    mu_scale: Tree = optax.EmptyState()
    formats: Tree = optax.EmptyState()


@state_of(NormalizeRows)
class NormalizeRowsState(NamedTuple):
    """State of `scale_by_muon(normalize="rows")`, after that of the momentum; `nu_row` is float32."""

    count: jax.Array
    seed: jax.Array
    nu_row: optax.Updates
    nu_row_scale: Tree = optax.EmptyState()
    formats: Tree = optax.EmptyState()


@takes_recipe(MUON.moments)
def muon(  # noqa: D417 (the others are its links')
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: str | Sequence = NS_COEFFS,
    ns_steps: int = 5,
    beta: jax.typing.ArrayLike = 0.95,
    eps: float = 1e-7,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask = None,
    mu_dtype: StateDType | None = None,
    *,
    nesterov: bool = True,
    bias_correction: bool = False,
    scale: str | None = "original",
    normalize: str | None = None,
    beta2: jax.typing.ArrayLike = 0.95,
    ns_dtype: str = "float32",
    matrices: MatrixChoice = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_eps_root: jax.typing.ArrayLike = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_mu_dtype: StateDType | None = None,
    nu_dtype: StateDType | None = None,
    mu_rounding: Rounding = "auto",
    adam_mu_rounding: Rounding = "auto",
    nu_rounding: Rounding = "stochastic",
    recipe: Recipe | None = None,
    param_storage: ParamStorage | None = None,
    cautious: bool = False,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Muon for the hidden matrices of a model, AdamW for the rest, for weights in 16 bits or float32.

    Partitions the params by `muon_labels`, which prints the split once. Muon steps arrays with two axes,
    unless the name says embedding, head, bias, scale or norm. AdamW steps all others. Both chains end in
    decoupled decay, the learning rate and the storage of weights. In float32 throughout, with
    `bias_correction`, it is `optax.contrib.muon` to within rounding, but for embeddings and heads. Arguments
    that are not listed are as in `scale_by_muon` and `adamw`.

    Args:
        learning_rate: of Muon, and of AdamW unless it has its own.
        weight_decay: decoupled decay of weights that Muon steps.
        weight_decay_mask: as `mask` of `add_decayed_weights`, for all weights.
        matrices: overrides the split. It is a function of leaf name ("layers/0/kernel") and array, or a
            mapping from patterns of names. Values are True (Muon), False (AdamW), `MatrixAxes` (Muon, with
            these axes) or None (as by default).
        adam_b1: decay rate of the first moment, for the weights updated by AdamW.
        adam_b2: decay rate of their second moment.
        adam_eps: added to the root of their second moment.
        adam_eps_root: added under this root.
        adam_weight_decay: their decoupled decay.
        adam_learning_rate: their learning rate; None: `learning_rate`.
        adam_mu_dtype: `mu_dtype` of `adamw`.
        adam_mu_rounding: `mu_rounding` of `adamw`.
        recipe: the name of one of `recipes`, for the weights updated by AdamW and for `param_storage`. The
            momentum is then `scaled("float16", 128)`, as large as two moments of 8 bits; under
            "full_precision" it is float32.
        cautious: of both decays, as in `add_decayed_weights`.

    Returns:
        An Optax transform that needs `params`.

    Errors are as in `scale_by_muon` and `adamw`, and from `init` ValueError if a pattern of `matrices`
    matches nothing, or nothing is left to Muon.

    Example:
        >>> params = {"embed": jnp.ones((8, 4)), "dense": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
        >>> tx = muon(1e-3, weight_decay=0.1)
        >>> state = tx.init(params)
        >>> muon_labels(params)["dense"]
        {'bias': 'adamw', 'kernel': 'muon'}

    Source: as `scale_by_muon`; arguments are Optax's.
    """
    arguments: Arguments = {**locals(), "mask": weight_decay_mask}
    check_static("muon", arguments, ("ns_steps", "eps"))
    of_the_rest = {"weight_decay": adam_weight_decay}
    if adam_learning_rate is not None:
        of_the_rest["learning_rate"] = adam_learning_rate
    adamw = optax.chain(*links_of(MUON_OF_THE_REST, {**arguments, **of_the_rest}))

    def of_label(axes: MatrixAxes) -> optax.GradientTransformation:
        link = functools.partial(scale_by_muon, **axes._asdict())
        return optax.chain(*links_of(MUON_OF_MATRICES, arguments, {MuonMomentum: link}))

    of_label(MatrixAxes(0, 1))  # so that wrong arguments are refused here, and not by `init`
    return with_param_storage(
        "muon", arguments["param_storage"], [_split_transform(of_label, adamw, matrices)], seed
    )


def muon_labels(params: Tree, matrices: MatrixChoice = None) -> Tree:
    """Return the tree of labels by which `muon` splits params: "muon" or "adamw"; print the split once.

    For a chain of your own: `optax.partition({"muon": ..., "adamw": ...}, muon_labels(params))`.

    Args:
        params: the weights, or their shapes and dtypes.
        matrices: as in `muon`. Weights with `MatrixAxes` other than inputs by outputs have a label with them.

    Raises:
        TypeError: if `matrices` is neither a function nor a mapping, or gives something else.
        ValueError: if a pattern of it matches nothing, no array is left to Muon, or a kernel in a stack of
            layers has no axes.

    Example:
        >>> muon_labels({"head": jnp.ones((4, 8)), "kernel": jnp.ones((4, 4))})
        {'head': 'adamw', 'kernel': 'muon'}

    Source: ours.
    """
    choices = split("muon", named_leaves(params), matrices, OUTPUT_AXIS)
    announce("muon", choices)
    return jax.tree.unflatten(jax.tree.structure(params), [_label(choice.axes) for choice in choices])


class Orthogonalize(shared.Orthogonalize):
    """The factor of matrices in XLA."""

    name = _MUON
    usual_output_axis = OUTPUT_AXIS

    def factor(self, x: jax.Array, matrices: shared.Matrices) -> jax.Array:
        """Return the Newton-Schulz factor of every matrix."""
        coefficients = shared.coefficients_of(self.ns_coeffs, self.ns_steps)
        return newton_schulz(x, matrices, coefficients, self.eps, self.ns_dtype)


def _links(rule: ScaleByMuon) -> optax.GradientTransformationExtraArgs:
    """Return the links of the momentum and of the factors of matrices."""
    factor, rows = rule.of_factor(_MUON, Orthogonalize)
    axes = MatrixAxes(factor.reduction_axis, factor.output_axis)
    whole = as_transform(factor)
    if rows is not None:
        whole = optax.chain(whole, as_transform(rows))
    return _of_matrices(axes, optax.chain(as_transform(rule.momentum), _of_whole(axes, whole)))


scale_by_muon = transform_of(ScaleByMuon, _links)


def _label(axes: MatrixAxes | None) -> str:
    if axes is None:
        return "adamw"
    return "muon" if tuple(axes) == (0, 1) else f"muon {axes.reduction_axis} {axes.output_axis}"


def _split_transform(
    of_label: Callable[[MatrixAxes], optax.GradientTransformation], adamw, matrices: MatrixChoice
) -> optax.GradientTransformationExtraArgs:
    """Return the transform that makes a chain for every kind of matrix as it sees the params."""

    def partition(params) -> optax.GradientTransformationExtraArgs:
        choices = split("muon", named_leaves(params), matrices, OUTPUT_AXIS)
        kinds = {_label(choice.axes): choice.axes for choice in choices if choice.axes is not None}
        transforms = {label: of_label(axes) for label, axes in kinds.items()}
        labels = muon_labels(params, matrices)
        return optax.partition({**transforms, "adamw": adamw}, labels)

    def init(params):
        return partition(params).init(params)

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "muon: params is None; weights decay. Pass params to update(updates, state, params)."
            )
        return partition(params).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _of_whole(axes: MatrixAxes, tx: optax.GradientTransformationExtraArgs):
    """Return a transform of whole matrices: every device gathers matrices that explicit mesh axes cut."""

    def whole(g: jax.Array) -> jax.Array:
        spanned = (*axes_of(axes.reduction_axis), *axes_of(axes.output_axis))
        every = axes.reduction_axis is None
        return whole_along(g, range(g.ndim) if every else [axis % g.ndim for axis in spanned])

    def update(updates, state, params=None, **extra_args):
        factors, after = tx.update(jax.tree.map(whole, updates), state, params, **extra_args)
        return jax.tree.map(cut_as, factors, updates), after

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _of_matrices(axes: MatrixAxes, tx: optax.GradientTransformationExtraArgs):
    """Return a transform that refuses leaves that are no matrices or not finite, by name."""

    def check(tree) -> None:
        for name, x in named_leaves(tree):
            matrices_of(f"{_MUON}: '{name}'", x.shape, *axes)

    def init(params):
        check(params)
        return tx.init(params)

    def update(updates, state, params=None, **extra_args):
        check(updates)
        updates = jax.tree.map(value_of, updates)
        with waiting_calls(None):
            factors, after = tx.update(updates, state, params, **extra_args)
        for (name, g), (_, factor) in zip(named_leaves(updates), named_leaves(factors), strict=True):
            if not isinstance(factor, Tracer) and not bool(jnp.isfinite(factor).all()):
                what, cure = "momentum", "Go on from a state from before it"
                if not bool(jnp.isfinite(g).all()):
                    what, cure = "gradient", "Leave the step out, as skip_nonfinite does"
                raise ValueError(
                    f"{_MUON}: the {what} of '{name}' has an infinity or a NaN, and the factor would make "
                    f"NaN of its whole matrix. {cure}."
                )
        return factors, after

    return optax.GradientTransformationExtraArgs(init, update)
