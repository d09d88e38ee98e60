"""Formats and roundings of all arrays of a run, and the reasons: for any transform, from shapes alone."""

import collections
from collections.abc import Collection, Iterable

import jax
import optax

from halfstep.description import NOT_STORED, WEIGHT, ArrayDescription, Description, moment_reason
from halfstep.rule import Rule
from halfstep.storage.formats import DType
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import named_leaves
from halfstep_jax.link_reports import Inside, Link, state_map
from halfstep_jax.storage.format_tag import check_tags
from halfstep_jax.storage.stored_moment import StoredMoment
from halfstep_jax.update_params import form_of_step
from halfstep_jax.watched_updates import is_wide
from halfstep_jax.weights.chain_check import ChainFault, chain_fault
from halfstep_jax.weights.weight_rule import WeightRule


def describe(
    tx: optax.GradientTransformation, params: Tree, state: Tree = None, **extra_args: object
) -> Description:
    """Report the format and the rounding of every weight and its state, and the reason for each.

    It shows where a format that you asked for is not used, because an array is too small for scales. It also
    shows a weight that no link stores, and one with updates that another link changes after they were
    rounded. Below the table is the form in which `update_params` steps the weights on this device.

    Args:
        tx: any Optax transform; of links that are not of this package only shapes and dtypes are known.
        params: the weights, or their shapes and dtypes.
        state: a state to check, such as one that was restored; None for none.
        extra_args: further arguments of `tx.update`, such as `value`.

    Raises:
        ValueError: if `state` is of a recipe other than that of `tx`.

    Example:
        >>> from halfstep_jax import adamw, scaled
        >>> shapes = {"w": (64, 64), "b": (64,)}
        >>> params = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
        >>> found = describe(adamw(1e-3, nu_dtype=scaled("ufloat8_e5m3")), params)
        >>> found.of("w", "nu").format, found.of("b", "nu").format
        ('ufloat8_e5m3, blocks of 128', 'float32')
        >>> found.of("b", "nu").why
        'asked for ufloat8_e5m3, blocks of 128, but 64 elements are fewer than min_size=4096'

    Source: ours.
    """
    links, made, shapes = state_map(tx, params)
    if state is not None:
        check_tags("describe", shapes, state)
    fault = chain_fault(tx, params, extra_args)
    stored_by = {
        name: link.rule for link in links if _stores_weights(link) for name, _ in named_leaves(link.params)
    }
    rows: dict[str, list[ArrayDescription]] = collections.defaultdict(list)
    for row in (row for link in links for row in _rows(link)):
        rows[row.leaf].append(row)
    arrays: list[ArrayDescription] = []
    for name, p in named_leaves(params):
        arrays += [_weight(name, p, stored_by.get(name), fault), *rows[name]]
    known = {id(x) for link in links for x in jax.tree.leaves(_own_state(link))}
    others = [(name, x) for name, x in named_leaves(made) if id(x) not in known and hasattr(x, "shape")]
    arrays += [
        ArrayDescription(name, "other", x.shape, str(x.dtype), "", _nbytes(x), "of a link without formats")
        for name, x in others
        if x.ndim
    ]
    return Description(tuple(arrays), _form(tx, params, shapes, extra_args))


def _form(tx: optax.GradientTransformation, params: Tree, state: Tree, extra_args: dict) -> str:
    try:
        return form_of_step(tx, params, state, extra_args)
    except (
        TypeError,
        ValueError,
    ) as error:  # of a chain whose step fails, whose arrays are described all the same
        return f"A step raises {type(error).__name__}: {str(error)[:300]}"


def weights_that_links_store(tx: optax.GradientTransformation, params: Tree) -> set[str]:
    """Return the names of the weights that a link of this package stores, so that rounding loses nothing."""
    names = {name for name, _ in named_leaves(params)}
    links = state_map(tx, params).links
    stored = {name for link in links if _stores_weights(link) for name, _ in named_leaves(link.params)}
    # A transform that renames weights, such as `optax.flatten`, hides which of them its links store.
    return stored if stored <= names else names


def _own_state(link: Link) -> Tree:
    """Return the state of a link, without the states of links that it wraps."""
    wraps = "inner_state" in getattr(link.state, "_fields", ()) and not isinstance(link.inside, Inside)
    return link.state._replace(inner_state=None) if wraps else link.state


def _stores_weights(link: Link) -> bool:
    """Whether a link stores the weights."""
    return isinstance(link.rule, WeightRule) or (isinstance(link.rule, Rule) and link.rule.rounds_weights)


def _weight(name: str, p, stored_by: WeightRule | Rule | None, fault: ChainFault | None) -> ArrayDescription:
    """Return the row of a weight."""
    rounding, why = "nearest", NOT_STORED
    if is_wide(p):
        rounding, why = "none", f"{p.dtype} weights pass through"
    elif fault is not None and name in fault.leaves:
        why = f"{fault.link} changes what {fault.storage} applies: it is rounded again"
    elif stored_by is not None:
        rounding, why = _rounding(stored_by, p.dtype), stored_by.name
    return ArrayDescription(name, WEIGHT, p.shape, str(p.dtype), rounding, _nbytes(p), why)


def _rounding(stored_by: WeightRule | Rule, dtype: DType) -> str:
    """Return how a link rounds weights of 16 bits."""
    if isinstance(stored_by, Rule):
        return "feedback"
    return "stochastic" if stored_by.rounds(dtype) else "nearest"


def _rows(link: Link) -> Iterable[ArrayDescription]:
    """Return the rows of a link's state."""
    weights = dict(named_leaves(link.params))
    if isinstance(link.inside, Inside):
        yield from _stored_rows(link, link.inside, weights)
        return
    for name, moment in (link.inside or {}).items():
        scales = getattr(link.state, f"{name}_scale")
        for leaf, codes in named_leaves(getattr(link.state, name)):
            scale = scales.get(leaf) if isinstance(scales, dict) else None
            yield _moment_row(leaf, weights[leaf], moment, codes, scale)
    if isinstance(link.rule, WeightRule) and link.rule.extra_field:
        for leaf, x in named_leaves(getattr(link.state, link.rule.extra_field)):
            why = f"kept by {link.rule.name}"
            yield ArrayDescription(
                leaf, link.rule.extra_field, weights[leaf].shape, str(x.dtype), "", _nbytes(x), why
            )


def _moment_row(leaf: str, p, moment: StoredMoment, codes, scale) -> ArrayDescription:
    fmt, rounding = moment.storage_of(codes, p.shape)
    by_default = moment.default_of_narrow
    why, as_asked = moment_reason(moment.asked_for, fmt, tuple(p.shape), str(p.dtype), by_default)
    nbytes = _nbytes(codes) + (0 if scale is None else _nbytes(scale))
    rounding = rounding if fmt.rounds else "none"
    return ArrayDescription(leaf, moment.name, p.shape, fmt.text, rounding, nbytes, why, as_asked)


def _stored_rows(link: Link, inside: Inside, weights: dict[str, Tree]) -> Iterable[ArrayDescription]:
    """Return the rows of the state of `store_state`, by the names of the wrapped state."""
    scales = link.state.scale if isinstance(link.state.scale, dict) else {}
    codes = dict(named_leaves(link.state.inner_state))
    for (name, x), fmt in zip(named_leaves(inside.state), inside.formats, strict=True):
        if not x.ndim:
            continue
        leaf = leaf_at_end(name, weights)
        short = name.removesuffix(leaf).rstrip("/") or name
        nbytes = _nbytes(codes[name]) + (_nbytes(scales[name]) if name in scales else 0)
        stored = str(x.dtype) if fmt is None else fmt.text
        rounding = "" if fmt is None else "stochastic" if link.rule.stochastic else "nearest"
        why = "left as it was made" if fmt is None else "by store_state"
        yield ArrayDescription(leaf, f"{short}", x.shape, stored, rounding, nbytes, why)


def leaf_at_end(name: str, weights: Collection[str]) -> str:
    """Return the longest weight name that ends the name of a state array; "" if none."""
    parts = name.split("/")
    ends = ("/".join(parts[i:]) for i in range(len(parts)))
    return next((end for end in ends if end in weights), "")


def _nbytes(x) -> int:
    return x.size * x.dtype.itemsize
