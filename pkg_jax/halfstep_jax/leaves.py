"""The leaves of a tree of updates, their names, and matching values of other trees.

Contract: W7. Names come from key paths, never from positions, which masks and partitions shift.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfstep_jax.leaf_calls import LaterArray, Tree

HELD_BY_FLOAT32 = ("float32", "bfloat16", "float16")
# Links round float64 to float32 when they read it, to nearest (contract P6).
_TAKEN = (*HELD_BY_FLOAT32, "float64")
WITHOUT_PARAMS = (
    'Where a library passes none, build the optimizer of float32 weights with param_storage="nearest".'
)
_VALUE = jax.tree_util.GetAttrKey("value")
_BOXES = ("Variable", "VariableState", "AxisMetadata")


@dataclasses.dataclass(frozen=True)
class Leaves:
    """A flattened tree of updates. Here None is a leaf; it stays None.

    Attributes:
        caller: the link that got the updates, for errors.
        names: one per leaf.
        values: the leaves.
        treedef: their tree.
        wide: of each leaf, whether it was float64.
    """

    caller: str
    names: list[str]
    values: list[Tree]
    treedef: Any  # a PyTreeDef, which checkers take for a variable
    wide: Sequence[bool] = ()

    def match(self, tree, owner: str, hint: str, shapes: list | None = None) -> list[Tree]:
        """Return the values of another tree of the same structure, leaf by leaf.

        Shapes are `shapes`, or the shapes of the updates. `owner`, such as "state", and the sentence `hint`
        are for errors.
        """
        values = self.match_any_shape(tree, owner, hint)
        due = [getattr(update, "shape", None) for update in self.values] if shapes is None else shapes
        for name, update, value, shape_due in zip(self.names, self.values, values, due, strict=True):
            shape = getattr(value, "shape", None)
            if update is not None and shape_due != shape:
                raise ValueError(
                    f"{self.caller}: the update of {quoted(name)} has shape {update.shape}, "
                    f"its {owner} {shape}. {hint}"
                )
        return values

    def match_any_shape(self, tree, owner: str, hint: str) -> list[Tree]:
        """Do as `match`, but for arrays of any shape."""
        try:
            return self.treedef.flatten_up_to(tree)
        except ValueError as error:
            other = [name for name, _ in named_leaves(tree, _is_none)]
            problem = difference("updates", self.names, f"the {owner}s", other, error)
            raise ValueError(
                f"{self.caller}: updates and {owner}s are different trees: {problem}. {hint}"
            ) from None

    def weights(self, params, *, wide: bool = True) -> list[Tree]:
        """Return the weight of every leaf; of float64 in float32, or refused if `wide` is False."""
        weights = self.match(params, "weight", "Pass the params that the updates are for.")
        for name, update, weight in zip(self.names, self.values, weights, strict=True):
            if update is not None:
                check_weight(self.caller, name, weight, wide=wide)
        return [_narrowed(weight) for weight in weights]

    def weight_dtypes(self, params) -> list[str | None]:
        """Return the dtype of the weight of every leaf; None where it is not known."""
        try:
            weights = self.treedef.flatten_up_to(params)
        except ValueError:  # of a link that reads no weights
            weights = [None] * len(self.values)
        known = [
            update is not None and hasattr(p, "dtype") for update, p in zip(self.values, weights, strict=True)
        ]
        return [_dtype_name(p) if is_known else None for p, is_known in zip(weights, known, strict=True)]

    def widened(self, us: Tree, params=None) -> Tree:
        """Return a tree of updates: in float64 where the leaf or its weight is float64, as Optax's are."""
        wide = [dtype == "float64" for dtype in self.weight_dtypes(params)]
        wide = [is_wide or p_is_wide for is_wide, p_is_wide in zip(self.wide, wide, strict=True)]
        if not any(wide) or jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
            return us
        rows = zip(self.treedef.flatten_up_to(us), wide, strict=True)
        return self.treedef.unflatten(
            [u if u is None or not is_wide else u.astype(np.float64) for u, is_wide in rows]
        )

    def unzip(self, columns: int, rows: list[tuple]) -> tuple[Tree, ...]:
        """Return `columns` trees; the k-th has the k-th entry of each leaf's row."""
        transposed = zip(*rows, strict=True) if rows else [()] * columns
        return tuple(self.treedef.unflatten(list(column)) for column in transposed)

    def map(self, rule: Callable, *others: list[Tree]) -> Tree:
        """Return the tree of rule(update, ...) over the leaves; None stays None."""
        rows = zip(self.values, *others, strict=True)
        return self.treedef.unflatten([None if row[0] is None else rule(*row) for row in rows])


def flatten_updates(caller: str, updates) -> Leaves:
    """Flatten `updates`; float64 leaves become float32, and `widened` makes float64 of their updates."""
    named = named_leaves(updates, _is_none)
    _check_names(caller, [name for name, _ in named])
    values = [_checked(caller, name, value) for name, value in named]
    wide = [_dtype_name(value) == "float64" for _, value in named]
    return Leaves(caller, [name for name, _ in named], values, jax.tree.structure(updates, _is_none), wide)


def _is_none(x) -> bool:
    return x is None


def named_leaves(tree, is_leaf: Callable | None = None) -> list[tuple[str, Tree]]:
    """Return (name, leaf) for every leaf of a tree; a name is its key path joined with "/" (contract W7).

    The attribute `value` of Flax's variables and boxes is no part of a name: nnx has it in some trees and not
    in others. Params that are one array have the empty name, which gives their words.

    Example:
        >>> named_leaves({"layers": [1.0, 2.0]})
        [('layers/0', 1.0), ('layers/1', 2.0)]
    """
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    boxes: set = set()
    if any(path and path[-1] == _VALUE for path, _ in paths):
        stop = is_leaf or (lambda x: False)
        around = jax.tree_util.tree_leaves_with_path(tree, lambda x: _is_box(x) or stop(x))
        boxes = {path for path, x in around if _is_box(x)}
    return [
        (joined(path[:-1] if path and path[-1] == _VALUE and path[:-1] in boxes else path), x)
        for path, x in paths
    ]


def joined(path) -> str:
    """Return a key path as text."""
    return "/".join(_part(key) for key in path)


def _is_box(x) -> bool:
    """Whether a node is Flax's, around one array: `nnx.Variable`, or a box of linen for partitions."""
    return any(cls.__name__ in _BOXES and cls.__module__.startswith("flax.") for cls in type(x).__mro__)


def with_prefix(
    caller: str, owner: str, prefix, tree, is_leaf: Callable | None
) -> Iterator[tuple[str, Tree, Tree]]:
    """Yield the name of every leaf of a tree, the leaf, and its value in a prefix tree."""
    try:
        spread = jax.tree.map(
            lambda x, below: jax.tree.map(lambda _: x, below), prefix, tree, is_leaf=is_leaf
        )
    except ValueError as error:
        names, short = ([x for x, _ in named_leaves(*each)] for each in ((tree,), (prefix, is_leaf)))
        problem = difference(owner, short, "params", names, error)
        raise ValueError(
            f"{caller}: params and {owner} are different trees: {problem}. Pass {owner} of params."
        ) from None
    named = named_leaves(tree)
    for (name, leaf), x in zip(named, jax.tree.leaves(spread, is_leaf=is_leaf), strict=True):
        yield name, leaf, x


def difference(owner: str, prefix: list[str], other: str, names: list[str], error: Exception) -> str:
    """Return why a tree is no prefix of another, by leaf names, or JAX's own message.

    Example:
        >>> difference("mask", ["w", "v"], "params", ["w/0", "w/1"], ValueError())
        "'v' is in mask alone"
    """
    above = set(prefix)
    below = {"/".join(parts[:i]) for parts in (x.split("/") for x in names) for i in range(len(parts) + 1)}
    alone = [f"{quoted(x)} is in {owner} alone" for x in prefix if x not in below]
    for name in names:
        parts = name.split("/")
        if above.isdisjoint("/".join(parts[:i]) for i in range(len(parts) + 1)):
            alone.append(f"{quoted(name)} is in {other} alone")
    return alone[0] if alone else without_values(error)


def without_values(error: Exception) -> str:
    """Return JAX's message on two trees without the arrays, which it prints whole."""
    return re.split(r"[,;] (?:got|value)\b|\n", str(error))[0].rstrip(".")


def quoted(name: str) -> str:
    """Return the name of a leaf for error messages.

    Example:
        >>> quoted("layers/0"), quoted("")
        ("'layers/0'", "'' (the params are one array)")
    """
    return f"'{name}'" if name else "'' (the params are one array)"


def check_params(caller: str, params, *, wide: bool = True) -> None:
    """Refuse weights of dtypes that are not stepped, and two of one name. For `wide` see `Leaves.weights`."""
    named = named_leaves(params)
    _check_names(caller, [name for name, _ in named])
    for name, p in named:
        check_weight(caller, name, p, wide=wide)
    refuse_symbolic(caller, named)


def refuse_symbolic(caller: str, named: list[tuple[str, Tree]]) -> None:
    """Refuse the symbolic dimensions of `jax.export`, given leaves and their names."""
    for name, p in named:
        if not all(isinstance(n, int) for n in getattr(p, "shape", ())):
            raise TypeError(
                f"{caller}: the shape of {quoted(name)} is {p.shape}, with symbolic dimensions: random words "
                "and blocks go by places in a shape. Export with concrete shapes, one program for each."
            )


def check_state(caller: str, state, kind: type) -> None:
    """Refuse the state of another transform, or of none: `kind` is the NamedTuple of the link."""
    if getattr(state, "_fields", ()) != getattr(kind, "_fields", ()):
        given = "an array" if isinstance(state, jax.Array) else type(state).__name__
        if any(map(_is_of_optax, jax.tree.leaves(state, is_leaf=_is_of_optax))):
            raise ValueError(
                f"{caller}: the state is of an Optax optimizer, expected {kind.__name__}. Pass the state "
                "that init made; from_optax(state, tx, params) makes one of the state of an Optax optimizer."
            )
        raise ValueError(
            f"{caller}: the state is {given}, expected {kind.__name__}: it belongs to another "
            "transform, or was loaded without its types. Pass the state that init made, or load it into that."
        )
    for name in ("seed", "outer_seed", "count", "outer_count"):
        dtype = getattr(getattr(state, name, None), "dtype", np.int32)
        if not jnp.issubdtype(dtype, np.integer):
            raise TypeError(
                f"{caller}: {name} in {kind.__name__} is {dtype}, and init made it "
                f"{'uint32' if name.endswith('seed') else 'int32'}: a map changed "
                "the whole state, and seeds, counts and codes are no numbers to average or cast. Pass the "
                "state that init made. Map moments as to_optax gives them, and put them back by from_optax. "
                "To cast weights, use set_float32_params."
            )


def _is_of_optax(x) -> bool:
    """Whether a part of a state is one that Optax makes; its `EmptyState` other transforms have too."""
    return type(x).__module__.startswith("optax.") and bool(getattr(x, "_fields", ()))


def check_states(caller: str, state, count: int) -> None:
    """Refuse a state that does not belong to a chain of `count` links; 0 means no chain."""
    if count and isinstance(state, Mapping):
        raise ValueError(
            f"{caller}: the state is a {type(state).__name__}, expected a tuple of {count} parts: it was "
            "loaded without its types. Load it into the target jax.eval_shape(tx.init, params)."
        )
    if count and not (isinstance(state, (tuple, list)) and len(state) == count):
        given = (
            f"has {len(state)} parts" if isinstance(state, (tuple, list)) else f"is {type(state).__name__}"
        )
        raise ValueError(
            f"{caller}: the state {given}, expected {count}: it belongs to another transform. Pass the "
            "state that init made; from_optax(state, tx, params) makes one of the state of an Optax "
            "optimizer."
        )


def _way_out(p) -> str:
    """Return the advice for a leaf that is not stepped: `optax.masked` would add its gradient as it is."""
    if not hasattr(p, "dtype"):
        return "Filter the model, as by equinox.filter(model, equinox.is_inexact_array)."
    if _dtype_name(p).startswith("complex"):
        return (
            "Wrap the optimizer in optax.contrib.split_real_and_imaginary, or freeze the leaf by "
            "optax.partition with optax.set_to_zero()."
        )
    return "Cast it, or freeze the leaf by optax.partition with optax.set_to_zero()."


def check_weight(caller: str, name: str, p, *, wide: bool = False) -> None:
    """Refuse one weight of a dtype that is not stepped. For `wide` see `Leaves.weights`."""
    refuse_raw_bytes(caller, f"the weight {quoted(name)}", p)
    due = _TAKEN if wide else HELD_BY_FLOAT32
    if (dtype := _dtype_name(p)) not in due:
        raise TypeError(
            f"{caller}: the weight {quoted(name)} is {dtype}; weights are {_one_of(due)}. {_way_out(p)}"
        )


def refuse_raw_bytes(caller: str, what: str, x) -> None:
    """Refuse void arrays, which `np.load` returns for dtypes that NumPy does not know."""
    if (dtype := _dtype_name(x)).startswith("void"):
        raise TypeError(
            f"{caller}: {what} is {dtype}, bytes of a dtype that np.savez has not kept. View it as what it "
            "was, such as x.view(jnp.bfloat16), or save by save_state."
        )


def _check_names(caller: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(
                f"{caller}: two leaves have the name '{name}', and so would share random words. "
                "Rename one of them."
            )
        seen.add(name)


def _checked(caller: str, name: str, update):
    if update is None:
        return None
    if (dtype := _dtype_name(update)) not in _TAKEN:
        raise TypeError(
            f"{caller}: the update of {quoted(name)} is {dtype}; updates are {_one_of(_TAKEN)}. "
            f"{_way_out(jnp.asarray(update))}"
        )
    return update if isinstance(update, LaterArray) else jnp.asarray(_narrowed(update))


def _narrowed(x):
    """Return an array of float64 in float32, and others as they are."""
    return jnp.asarray(x, jnp.float32) if _dtype_name(x) == "float64" else x


def _one_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _dtype_name(value) -> str:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return type(value).__name__
    # The result of `jax.grad` for an integer; its own name is "void". Keys are of no dtype of NumPy's.
    if dtype == jax.dtypes.float0:
        return "float0"
    return str(dtype) if jnp.issubdtype(dtype, jax.dtypes.extended) else jnp.dtype(dtype).name


def _part(key) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
