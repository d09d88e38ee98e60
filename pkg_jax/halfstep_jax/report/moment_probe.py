"""A probe of a transform's moments: whether they can shrink, are zero, and have the requested format."""

import collections
import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import optax

from halfstep.description import ArrayDescription
from halfstep.diagnosis import Count, MomentDiagnosis, MomentTally
from halfstep_jax.checkpoint.link_moments import moments_of
from halfstep_jax.leaves import HELD_BY_FLOAT32, named_leaves
from halfstep_jax.link_reports import Inside, state_map
from halfstep_jax.report.description import describe
from halfstep_jax.rules.store_state import StoreStateState
from halfstep_jax.storage.ends import count_at_ends, moment_pairs
from halfstep_jax.storage.formats import Encoded

NARROW = (jnp.bfloat16, jnp.float16)
"""Dtypes of 16 bits."""
PAIRS = {"nu": "mu"}
"""The names of second moments, and of the first ones beside them."""
SUMS = ("acc_grads", "grad_acc")
"""Fields of states that hold sums of gradients."""
_COUNT = jax.tree_util.GetAttrKey("count")
_MOST_STEPS = 64
# Dtypes of codes.
_CODES = (jnp.uint8, jnp.uint16, jnp.int8, jnp.float8_e4m3fn)
# Fields of states that hold part of the weights, or gradients.
_NO_MOMENTS = ("compensation", "extra", "master", *SUMS)


def diagnose_moments(tx: optax.GradientTransformation, params, zeros, state) -> dict[str, MomentDiagnosis]:
    """Return the findings of a probe on the moments, by name. A step without a gradient shows their rates."""
    shapes = {p.shape for p in jax.tree.leaves(params)}
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = [_moment_name(path) if getattr(x, "shape", ()) in shapes else "" for path, x in paths]
    narrow = [bool(name) and x.dtype in NARROW for name, (_, x) in zip(names, paths, strict=True)]
    ones = [_above_one(x) if is_narrow else x for is_narrow, (_, x) in zip(narrow, paths, strict=True)]
    after, rests = _after_a_step_of_all(tx, params, zeros, treedef.unflatten(ones))
    left = jax.tree.leaves(after)
    tallies: dict[str, MomentTally] = collections.defaultdict(MomentTally)
    # Codes may be of another shape than their weight, and their dtype does not say the format.
    coded: dict[str, list] = collections.defaultdict(list)
    rows = describe(tx, params).arrays
    for row in rows:
        if row.name not in ("weight", "other") and row.format not in HELD_BY_FLOAT32:
            coded[row.name].append(row)
    for name, (path, x), is_narrow, now in zip(names, paths, narrow, left, strict=True):
        if name and not (x.dtype in _CODES and name in coded):
            shrinks = bool((now != _above_one(x)).any()) if is_narrow and not rests else True
            # The arrays of a state have one rate.
            tallies[name].add(x.dtype.name, x.size, jax.tree_util.keystr(path[:-1]), shrinks)
    for row in (row for of_name in coded.values() for row in of_name):
        tallies[row.name].add(row.format, math.prod(row.shape), "codes", True)
    for name, why, count in _kept_otherwise(tx, params, rows, names, paths):
        tallies[name].otherwise[why] += count
    by_path, texts = dict(named_leaves(state)), {(row.leaf, row.name): row.format for row in rows}
    for leaf, second, x, other in moment_pairs(by_path, PAIRS):
        if jnp.issubdtype(other.dtype, jnp.floating):
            tallies[second].zero += int(((x == 0) & (other != 0)).sum())
        tallies[second].add_ends(leaf, *count_at_ends(texts.get((leaf, second), ""), x, other), x.size)
    return {name: tally.diagnosis for name, tally in tallies.items()}


def _after_a_step_of_all(tx: optax.GradientTransformation, params, zeros, state):
    """Return the state after steps without a gradient, until every link took one, and whether one took none.

    Wrappers such as `optax.MultiSteps` and `optax.contrib.sam` call the transform inside at some steps alone.
    """
    nothing = jax.tree.map(jnp.zeros_like, params)
    update = jax.jit(tx.update)
    after = tx.update(zeros, state, nothing)[1]
    for _ in range(_MOST_STEPS):
        if not _one_rests(state, after):
            return after, False
        after = update(zeros, after, nothing)[1]
    return after, _one_rests(state, after)


def _one_rests(before, after) -> bool:
    """Whether the count of a link is the same in two states."""
    rows = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return any(path and path[-1] == _COUNT and bool((x == y).all()) for (path, x), y in rows)


def nonfinite_moments(tx: optax.GradientTransformation, params, state) -> dict[str, Count]:
    """Return the number of infinite or NaN elements, and of all elements, of each kind of moment."""
    sizes: dict[str, int] = {}

    def count(state):
        moments = _float32_moments(tx, params, state)
        sizes.update({name: sum(x.size for x in arrays) for name, arrays in moments.items()})
        return {name: sum((~jnp.isfinite(x)).sum() for x in arrays) for name, arrays in moments.items()}

    return {name: (int(number), sizes[name]) for name, number in jax.jit(count)(state).items()}


def _float32_moments(tx: optax.GradientTransformation, params, state) -> dict[str, list[jax.Array]]:
    """Return the moments by name: ours decoded, others' floating-point arrays."""
    links, fresh, _ = state_map(tx, params)
    ours = {id(link.state): link for link in links if link.inside}
    paths, treedef = jax.tree_util.tree_flatten_with_path(fresh, lambda x: id(x) in ours)
    moments: dict[str, list[jax.Array]] = collections.defaultdict(list)
    for (path, part), x in zip(paths, treedef.flatten_up_to(state), strict=True):
        link = ours.get(id(part))
        if link is None:
            rows = [(_moment_name(path), x)]
        elif isinstance(link.inside, Inside):
            rows = _stored_state(link.inside, x)
        else:
            rows = [(field, values) for field, _, values in moments_of(link).decoded(x)]
        for name, values in rows:
            if name and values.ndim and jnp.issubdtype(values.dtype, jnp.floating):
                moments[name].append(values)
    return moments


def _stored_state(inside: Inside, state: StoreStateState) -> Iterable[tuple[str, jax.Array]]:
    """Yield (field, values) of the state that `store_state` keeps."""
    codes = dict(named_leaves(state.inner_state))
    scales = state.scale if isinstance(state.scale, Mapping) else {}
    paths = jax.tree_util.tree_leaves_with_path(inside.state)
    for (path, _), name, fmt in zip(paths, codes, inside.formats, strict=True):
        stored = codes[name]
        yield _moment_name(path), fmt.decode(Encoded(stored, scales.get(name))) if fmt else stored


def _kept_otherwise(
    tx: optax.GradientTransformation, params, rows: Iterable[ArrayDescription], names, paths
) -> list[tuple[str, str, int]]:
    """Return name, reason and size of each array without the requested format."""
    otherwise = [(row.name, row.why, math.prod(row.shape)) for row in rows if not row.as_asked]
    fresh = {
        path: x.dtype for path, x in jax.tree_util.tree_leaves_with_path(jax.eval_shape(tx.init, params))
    }
    for name, (path, x) in zip(names, paths, strict=True):
        dtype = fresh.get(path, x.dtype) if name else None
        if dtype is not None and dtype != x.dtype:
            otherwise.append((name, f"it is {x.dtype.name}, and {dtype.name} where fresh", x.size))
    return otherwise


def _above_one(x: jax.Array) -> jax.Array:
    """Return arrays of the next number above 1, where the gap below is the largest relative to the number."""
    return jnp.full_like(x, 1 + jnp.finfo(x.dtype).eps)


def _moment_name(path) -> str:
    """Return the field of an Optax state that holds an array; "" if it is part of the weights."""
    fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    fields = [name for name in fields if name != "inner_state" and not name.endswith("_scale")]
    return "" if not fields or fields[-1] in _NO_MOMENTS else fields[-1]
