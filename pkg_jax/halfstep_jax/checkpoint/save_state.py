"""Weights and optimizer state to a state file, and back: a run goes on with the bits that it would have had.

Contract: section T. `halfstep_torch` reads and writes the same files.
"""

import os
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep.checkpoint.header import Recipe, check_names, link_record, make_header, paired, read_recipes
from halfstep.checkpoint.header_form import Header
from halfstep.checkpoint.state_file import (
    DTYPES,
    FileArray,
    bytes_of,
    file_array,
    read_state_file,
    write_state_file,
)
from halfstep.rules.adamw_in_codes import AdamWInCodes
from halfstep_jax.checkpoint.slots import Entry, Slots, slots_of
from halfstep_jax.checkpoint.weights_in_codes import StoredParam, stored_as
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import named_leaves
from halfstep_jax.storage.format_tag import check_tags, new_tag

_HINT = "Pass the params, the state and the transform of one run."


def save_state(
    path: str | os.PathLike[str], params: Tree, state: Tree, tx: optax.GradientTransformation
) -> None:
    """Write weights and optimizer state to one file, from which either package goes on.

    The file is safetensors: `params/<leaf>`, `mu/<leaf>`, `nu_scale/<leaf>` and so on, as they are stored.
    Its header says of every weight which links step it, with their counts, seeds, numbers and formats. State
    of transforms that are not of this package goes into it too, by its place, for JAX alone.
    `docs/how-to/checkpoints.md` has the layout. A file of that name is replaced once the new file is whole.

    Args:
        path: of the file.
        params: the weights.
        state: of `tx`.
        tx: the transform that made `state`; it says how arrays are stored.

    Raises:
        TypeError: if an array is of a dtype that a file does not hold.
        ValueError: if `state` is not of `tx` and `params`, or two weights have one name.
        OSError: if the file cannot be written.

    Example:
        >>> import pathlib, tempfile, optax
        >>> from halfstep_jax import adamw, load_state
        >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
        >>> tx = adamw(1e-3, seed=7)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.safetensors"
        >>> save_state(path, params, tx.init(params), tx)
        >>> params, state = load_state(path, params, tx)
        >>> params["w"].dtype
        dtype(bfloat16)

    Source: ours (contract T).
    """
    write_state_file(path, *state_file_of("save_state", params, state, tx))


def state_file_of(caller: str, params, state, tx) -> tuple[Header, dict[str, FileArray]]:
    """Return the header and the arrays that `save_state` writes."""
    state_slots, weights = slots_of(tx, params), _weights(caller, params)
    leaves = _as_params_are(_leaves_of(caller, state_slots, state), state_slots, weights)
    arrays = {f"params/{leaf}": _file_array(caller, leaf, p, False) for leaf, p in weights.items()}
    formats, known = {}, {"count": {}, "seed": {}}
    for slot, x in zip(state_slots.slots, leaves, strict=True):
        if slot.kind in ("count", "seed"):
            known[slot.kind] |= dict.fromkeys(slot.entries, np.asarray(x).tolist())
        elif slot.kind not in ("tag", "nothing"):
            arrays[slot.name] = _file_array(caller, slot.name, x, slot.kind == "array")
            formats |= {slot.name: slot.label} if slot.label else {}
    recipes = _recipes(weights, state_slots.entries, known["count"], known["seed"])
    return make_header("halfstep_jax", recipes, formats), arrays


def load_state(
    path: str | os.PathLike[str], params: Tree, tx: optax.GradientTransformation
) -> tuple[Tree, Tree]:
    """Return the weights and the optimizer state of a file that `save_state` of either package wrote.

    Counts and seeds come from the file. Numbers such as b1 come from `tx`, and must agree with the file;
    learning rates and weight decay need not.

    Args:
        path: of the file.
        params: weights of the run's names, shapes and dtypes, or `jax.ShapeDtypeStruct`s. Arrays of a
            weight's shape are placed as it is.
        tx: the transform, built as in the run.

    Raises:
        ValueError: if the file is no state file, damaged, of a later version, of other weights or of another
            transform. The message names the first difference.
        OSError: if it cannot be read.

    Source: ours (contract T).
    """
    caller = "load_state"
    return read_state(caller, *read_state_file(caller, path), params, tx)


def read_state(caller: str, header: Header, arrays: Mapping[str, FileArray], params, tx) -> tuple[Tree, Tree]:
    """Return params and state from the header and the arrays of a state file, as `load_state` does."""
    state_slots, weights = slots_of(tx, params), _weights(caller, params)
    recipes = _recipes(weights, state_slots.entries, {}, {})
    saved = read_recipes(caller, header, recipes)
    due = {f"params/{leaf}": p for leaf, p in weights.items()}
    rows = list(zip(state_slots.slots, state_slots.shapes, strict=True))
    due |= {slot.name: x for slot, x in rows if slot.kind in ("array", "other")}
    check_names(caller, "array", arrays, due)
    read = {name: _array(caller, name, arrays[name], like) for name, like in due.items()}
    placed = {leaf: _sharding(p) for leaf, p in weights.items()}
    known = _counts_and_seeds(caller, state_slots.entries, recipes, saved)
    leaves = []
    for slot, shape in rows:
        if slot.kind == "nothing":
            leaves.append(jnp.zeros(shape.shape, shape.dtype))
        elif slot.kind == "tag":
            leaves += new_tag(slot.name).values()
        elif slot.kind in ("count", "seed"):
            leaves.append(_of_links(caller, slot.kind, [known[i][slot.kind] for i in slot.entries], shape))
        else:
            leaf = slot.name.partition("/")[2] if slot.kind == "array" else ""
            same = leaf in weights and weights[leaf].shape == shape.shape
            leaves.append(_placed(read[slot.name], placed[leaf] if same else None))
    new = [_placed(read[f"params/{leaf}"], placed[leaf]) for leaf, _ in named_leaves(params)]
    return jax.tree.structure(params).unflatten(new), state_slots.treedef.unflatten(leaves)


def _weights(caller: str, params) -> Header:
    """Return the weights by name."""
    named = named_leaves(params)
    names = [name for name, _ in named]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twice:
        raise ValueError(f"{caller}: two weights have the name {min(twice)!r}. Rename one.")
    return dict(named)


def _leaves_of(caller: str, state_slots: Slots, state) -> list[Tree]:
    """Return the leaves of a state, if it is one of the transform."""
    leaves, treedef = jax.tree.flatten(state)
    check_tags(caller, state_slots.treedef.unflatten(state_slots.shapes), state)
    if treedef != state_slots.treedef:
        raise ValueError(f"{caller}: the state has another structure than tx makes of these params. {_HINT}")
    for slot, x, due in zip(state_slots.slots, leaves, state_slots.shapes, strict=True):
        if (x.shape, x.dtype) != (due.shape, due.dtype):
            raise ValueError(
                f"{caller}: {slot.name or slot.kind} is {x.dtype}{list(x.shape)}, tx makes it "
                f"{due.dtype}{list(due.shape)}. {_HINT}"
            )
    return leaves


def _as_params_are(leaves: list[Tree], state_slots: Slots, weights: Header) -> list[Tree]:
    """Return the leaves of a state; weights in codes that are changed in params have new codes (P8)."""
    own = {i for i, entry in enumerate(state_slots.entries) if entry.name == AdamWInCodes.name}
    places = {slot.name: i for i, slot in enumerate(state_slots.slots) if not own.isdisjoint(slot.entries)}
    leaves = list(leaves)
    for leaf, p in weights.items():
        found = [places[name] for name in (f"param/{leaf}", f"param_scale/{leaf}") if name in places]
        if found:
            stored = stored_as(p, StoredParam(*(leaves[i] for i in found)))
            for i, x in zip(found, (stored.codes, stored.scale), strict=False):
                leaves[i] = x
    return leaves


def _recipes(
    weights: Iterable[str], entries: list[Entry], counts: Mapping[int, int], seeds: Mapping[int, list[int]]
) -> dict[str, Recipe]:
    """Return the links that touch each weight."""
    recipes: dict[str, Recipe] = {leaf: [] for leaf in weights}
    for i, entry in enumerate(entries):
        numbers, options = entry.numbers, entry.options
        for leaf, stored in entry.arrays.items():
            if leaf not in recipes:
                raise ValueError(
                    f"save_state: {entry.name} steps '{leaf}', which is no weight of these params: a wrapper "
                    "such as optax.flatten renames them, and a file goes by names. Save without it."
                )
            idle = leaf in entry.idle
            record = link_record(entry.name, counts.get(i), seeds.get(i), numbers, options, stored, idle)
            recipes[leaf].append(record)
    return recipes


def _counts_and_seeds(
    caller: str, entries: list[Entry], recipes: Mapping[str, Recipe], saved: Mapping[str, Recipe]
) -> list[Header]:
    """Return count and seed of every entry, which must agree between its weights."""
    found: list[Header] = [{"count": None, "seed": None} for _ in entries]
    for leaf, recipe in recipes.items():
        touching = [i for i, entry in enumerate(entries) if leaf in entry.arrays]
        for i, link in zip(touching, paired(saved[leaf], recipe), strict=True):
            for what, value in (("count", link["count"]), ("seed", link["seed"])):
                before = found[i][what]
                if None not in (before, value) and before != value:
                    raise ValueError(
                        f"{caller}: {entries[i].name} has {what}={value} at {leaf!r} and {before} at another "
                        "weight; in JAX they are one. Load it in halfstep_torch, or use optax.partition."
                    )
                found[i][what] = before if value is None else value
    return found


def _of_links(caller: str, kind: str, values: list[Tree], shape) -> jax.Array:
    """Return a count or a seed, which several links may share."""
    distinct = [value for i, value in enumerate(values) if value is not None and value not in values[:i]]
    if len(distinct) > 1:
        raise ValueError(f"{caller}: the file has {kind}s {distinct} where one state holds one. {_HINT}")
    # A link without weights was never stepped.
    value = distinct[0] if distinct else np.zeros(shape.shape)
    return jnp.array(np.array(value, shape.dtype))


def _file_array(caller: str, name: str, x, codes: bool) -> FileArray:
    """Return an array as a file holds it: codes of a byte as bytes, random keys as their words."""
    if _is_key(x):
        x = jax.random.key_data(x)
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(
            f"{caller}: {name!r} is {type(x).__name__}; a file holds arrays of numbers. Leave it out."
        )
    values = np.asarray(x)
    as_bytes = values.itemsize == 1 and (codes or values.dtype.name not in DTYPES)
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return file_array(caller, name, "uint8" if as_bytes else values.dtype.name, values.shape, data)


def _array(caller: str, name: str, array: FileArray, like) -> Tree:
    """Return an array of a file, in memory of its own, if it is of the shape and dtype of `like`."""
    if _is_key(like):
        return _key(_array(caller, name, array, jax.eval_shape(jax.random.key_data, like)), like)
    dtype = np.dtype(like.dtype)
    due = "uint8" if dtype.itemsize == 1 and array.dtype == "U8" else dtype.name
    return bytes_of(caller, name, array, due, like.shape).view(dtype).reshape(array.shape)


def _is_key(x) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key(data: np.ndarray, like) -> jax.Array:
    """Return random keys from words, for the generator of `like`."""
    generators: list[Tree] = []
    jax.eval_shape(lambda key: generators.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(jnp.asarray(data), impl=generators[0])


def _placed(x, sharding) -> jax.Array:
    return jnp.asarray(x) if sharding is None else jax.device_put(x, sharding)


def _sharding(p) -> jax.sharding.Sharding | None:
    """Return the sharding for a weight; None if none was given."""
    return p.sharding if getattr(p, "committed", True) and hasattr(p, "sharding") else None
