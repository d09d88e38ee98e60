"""The state of any Optax transform, kept in a format: decode it, run the transform, encode it.

Contract: section S.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from halfstep.random_words import Role, leaf_id
from halfstep.storage.moment_formats import Rounding, check_stored_state
from halfstep_jax.leaf_calls import Tree, call_per_shape
from halfstep_jax.leaves import HELD_BY_FLOAT32, check_state, named_leaves, refuse_symbolic
from halfstep_jax.link_reports import Inside, report, reported_links
from halfstep_jax.numbers.random_words import LeafKeys, leaf_keys
from halfstep_jax.numbers.rounding import round_and_cast
from halfstep_jax.numbers.schedules import next_count
from halfstep_jax.numbers.seeds import new_seed, seed_words
from halfstep_jax.storage.format_tag import check_tag, new_tag, tag_of
from halfstep_jax.storage.formats import Encoded, Format
from halfstep_jax.storage.state_dtypes import StateDType, as_format
from halfstep_jax.storage.stored_moment import named_scales
from halfstep_jax.xla.exact import opaque_input, without_derivative
from halfstep_jax.xla.shards import Shard, shards

_FUNCTION = "store_state"
# Fields of states that are known to have negative numbers, or none.
_KNOWN_FIELDS = {"mu": True, "trace": True, "nu": False}


class StoreStateState(NamedTuple):
    """State of `store_state`.

    Attributes:
        outer_count: int32 scalar, steps taken, as in `SplitParamsState`.
        outer_seed: uint32[2], (high, low).
        inner_state: of the wrapped transform, with codes in place of every array that is stored.
        scale: scales of these, by the name of the array, such as "0/mu/encoder/kernel". If no array is large
            enough for a scale, a byte without meaning; if the format has no scales, `optax.EmptyState()`.
        formats: as in `ScaleByAdamState`, of all that is stored.
    """

    outer_count: jax.Array
    outer_seed: jax.Array
    inner_state: optax.OptState
    scale: Tree = optax.EmptyState()
    formats: Tree = optax.EmptyState()


def store_state(
    inner: optax.GradientTransformation,
    format: StateDType,
    *,
    rounding: Rounding = "stochastic",
    select: Callable[[str, Tree], bool] | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Keep the state arrays of any Optax transform in a format.

        s = decode(stored);  u, s <- inner.update(g, s);  stored <- encode(s)

    `inner` gets its arrays in the shapes and dtypes in which it made them. Rounds each array once a step,
    after `inner`: the update comes from the array before it was stored. So the bits differ from
    `mu_dtype=` or `nu_dtype=`, which only our own transforms have. Under `jax.jit` nothing but the codes is
    kept between steps.

    Not stored: integers, random keys, booleans, scalars (arrays without an axis), 8-bit and 64-bit floats,
    and arrays below the format's `min_size` (see `scaled`). All other arrays are stored, whatever they mean
    to `inner`: copies of weights and gradients too. `select` says otherwise:

        store_state(tx, "ufloat16_e7m9", select=lambda name, array: "nu" in name.split("/"))

    Only an array's name is known. In a format with a scale, a nonzero number never becomes zero in a block
    without negative numbers. So second moments are safe in "float8_e4m3fn". Formats without a sign keep
    magnitudes: select arrays without a sign. As no decay rate is known, freezing is not checked.

    Args:
        inner: any Optax transform.
        format: "float32", "bfloat16", "float16", "ufloat16_e7m9", or a format from `scaled` or `codebook`.
        rounding: "stochastic", or "nearest_unchecked", which freezes slow averages: see `scale_by_adam`.
        select: a function that says whether an array in the state of `inner` is stored. Its arguments are the
            name, such as "0/mu/encoder/kernel", and shape and dtype as a `jax.ShapeDtypeStruct`. None stores
            all.
        seed: of the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        An Optax transform, with the updates of `inner`. Give it `params` where `inner` makes its state from
        them: without, dtypes are taken from the updates. The bits are the same with and without `jax.jit`
        where the bits of `inner` are the same, as for the transforms of this package.

    Raises:
        TypeError: if an argument is of the wrong type; from `init` and `update`, if the state of `inner`
            holds complex numbers.
        ValueError: if there is no such format or rounding, or `seed` is out of range. From `init`, if
            `select` chooses nothing, or if an array with negative numbers would get a format without a sign.
            From `update`, if the state is not of `params`.

    Example:
        >>> params = {"w": jnp.ones((64, 64))}
        >>> tx = store_state(optax.adamax(1e-3), "bfloat16")
        >>> state = tx.init(params)
        >>> updates, state = tx.update(params, state, params)
        >>> optax.tree.get(state, "nu")["w"].dtype
        dtype(bfloat16)

    Source: ours (contract S).
    """
    fmt = as_format(_FUNCTION, "format", format)
    check_stored_state(_FUNCTION, fmt, rounding, select)
    storage = _Storage(fmt, rounding == "stochastic" and fmt.rounds, select)
    words = seed_words(_FUNCTION, seed)
    inner_update = optax.with_extra_args_support(inner).update

    def init(params):
        refuse_symbolic(_FUNCTION, named_leaves(params))
        with reported_links() as links:
            inner_state = inner.init(params)
        arrays = storage.arrays(inner_state)
        storage.check(arrays)
        first = storage.first(arrays, inner_state)
        seed = new_seed(words, params, first)
        state = StoreStateState(jnp.zeros([], jnp.int32), seed, *first, new_tag(storage.tag))
        return report(storage, params, state, Inside(links, inner_state, [array.format for array in arrays]))

    def update(updates, state, params=None, **extra_args):
        check_state(_FUNCTION, state, StoreStateState)
        check_tag(_FUNCTION, state, storage.tag)
        shapes = jax.eval_shape(inner.init, updates if params is None else params)
        arrays = storage.arrays(shapes, state.inner_state)
        inner_state = storage.decode(arrays, state)
        us, inner_state = inner_update(updates, inner_state, params, **extra_args)
        count = next_count(state.outer_count)
        stored = storage.encode(arrays, inner_state, state.outer_seed, count)
        return us, StoreStateState(count, state.outer_seed, *stored, state.formats)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class _Array:
    """One leaf of the state of the wrapped transform.

    Attributes:
        name: its key path.
        value: the array, or its shape and dtype.
        signed: whether it may hold negative numbers; None where that is not known.
        format: how it is stored; None: it is left alone.
        shard: which part of a whole array it is, inside `jax.shard_map`; None where it is whole.
    """

    name: str
    value: Tree
    signed: bool | None
    format: Format | None
    shard: Shard | None


@dataclasses.dataclass(frozen=True)
class _Storage:
    """Which arrays are stored, in which format, and whether rounding is stochastic."""

    name: ClassVar[str] = _FUNCTION
    format: Format
    stochastic: bool
    select: Callable[[str, Tree], bool] | None

    @property
    def tag(self) -> str:
        """The tag of the arrays in the state."""
        return tag_of({"stored": self.format})

    def arrays(self, state, stored=None) -> list[_Array]:
        """Return the leaves of a state or of its shapes, with the leaves of the `stored` state if given."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(state)
        codes = [x for _, x in leaves] if stored is None else jax.tree.leaves(stored)
        if len(codes) != len(leaves):
            raise ValueError(
                f"{_FUNCTION}: the state holds {len(codes)} arrays, a state of these params {len(leaves)}. "
                "Pass the tree that init saw."
            )
        names = [name for name, _ in named_leaves(state)]
        held = [x if self._is_chosen(name, x) else None for name, (_, x) in zip(names, leaves, strict=True)]
        cuts = shards(_FUNCTION, names, held, codes)
        rows = zip(leaves, names, held, cuts, strict=True)
        return [
            _Array(
                name,
                x,
                _sign(path),
                None if array is None else self._format_of(name, array, shard),
                shard,
            )
            for (path, x), name, array, shard in rows
        ]

    def check(self, arrays: list[_Array]) -> None:
        """Refuse an empty selection, and negative numbers in a format without a sign."""
        held = [array for array in arrays if _is_held(array.value)]
        if self.select and held and not any(self._chosen(array.name, array.value) for array in held):
            raise ValueError(
                f"{_FUNCTION}: select chooses none of {', '.join(repr(array.name) for array in held[:8])}. "
                "Choose one of them, or leave select out."
            )
        for array in arrays:
            if array.format and not self.format.signed and (array.signed or _has_negative(array.value)):
                raise ValueError(
                    f"{_FUNCTION}: format={self.format.dtype} has no sign, and '{array.name}' has one. "
                    'Choose second moments, as by select=lambda name, array: "nu" in name.split("/").'
                )

    def first(self, arrays: list[_Array], state) -> tuple[Tree, Tree]:
        """Return the codes and the scales of a new state."""
        stored = [self._encode(array, array.value, None, None) for array in arrays]
        return self._trees(arrays, state, stored)

    def decode(self, arrays: list[_Array], state: StoreStateState) -> Tree:
        """Return the state of the wrapped transform."""
        codes: list[Tree]
        codes, treedef = jax.tree.flatten(state.inner_state)
        scales = state.scale if isinstance(state.scale, Mapping) else {}
        stored = [Encoded(x, scales.get(array.name)) for x, array in zip(codes, arrays, strict=True)]
        return treedef.unflatten([self._decode(*pair) for pair in zip(arrays, stored, strict=True)])

    def encode(self, arrays: list[_Array], state, seed: jax.Array, count: jax.Array) -> tuple[Tree, Tree]:
        """Return the codes and the scales of the wrapped transform's new state."""
        values = jax.tree.leaves(state)
        if len(values) != len(arrays):
            kept = {name for name, _ in named_leaves(state)}
            lost = next((array.name for array in arrays if array.name not in kept), "")
            raise ValueError(
                f"{_FUNCTION}: the wrapped transform dropped or added arrays of its state, such as '{lost}'. "
                "Optax's do so where a gradient is None. Pass zeros."
            )
        if not arrays:
            return self._trees(arrays, state, [])
        keys = leaf_keys(seed, count, [leaf_id(array.name) for array in arrays], (Role.STATE,))
        rows = zip(arrays, values, keys.indices([array.shard for array in arrays]), strict=True)
        stored = [self._encode(array, x, keys, index) for array, x, index in rows]
        return self._trees(arrays, state, stored)

    def _is_chosen(self, name: str, x) -> bool:
        """Whether an array is to be stored, unless it is too small."""
        if jnp.issubdtype(getattr(x, "dtype", np.int32), jnp.complexfloating):
            raise TypeError(
                f"{_FUNCTION}: the state array '{name}' is {x.dtype}; formats hold real numbers. "
                "Wrap a transform of real numbers."
            )
        return _is_held(x) and self._chosen(name, x)

    def _format_of(self, name: str, x, shard: Shard | None) -> Format | None:
        fmt = self.format.for_shard(_FUNCTION, name, shard, x.shape)
        return fmt if fmt == self.format else None

    def _chosen(self, name: str, x) -> bool:
        return self.select is None or bool(self.select(name, jax.ShapeDtypeStruct(x.shape, x.dtype)))

    def _decode(self, array: _Array, stored: Encoded) -> jax.Array:
        if array.format is None:
            return stored.codes
        fmt, shape = array.format, array.value.shape
        if stored.codes.shape != fmt.code_shape(shape) or stored.codes.dtype != fmt.code_dtype:
            kind = f"{stored.codes.dtype}{list(stored.codes.shape)}"
            raise ValueError(
                f"{_FUNCTION}: the state array '{array.name}' is {kind}; "
                f"format={fmt.dtype} makes it {fmt.code_dtype}{list(fmt.code_shape(shape))}. "
                "Pass the state that init made, and the params that it saw."
            )
        if fmt.scaled and stored.scale is None:
            raise ValueError(
                f"{_FUNCTION}: the state has no scale of '{array.name}'. Pass the state that init made."
            )
        encoded = dataclasses.replace(stored, shape=shape if fmt.packed else None)
        return call_per_shape(_decoded, (fmt, jnp.dtype(array.value.dtype).name), encoded)

    def _encode(self, array: _Array, x: jax.Array, keys: LeafKeys | None, index) -> Encoded:
        """Return one encoded array; without keys, rounded to nearest."""
        if array.format is None:
            return Encoded(x, None)
        return call_per_shape(_encoded, (array.format, self.stochastic), x, keys, index)

    def _trees(self, arrays: list[_Array], state, stored: list[Encoded]) -> tuple[Tree, Tree]:
        codes = jax.tree.unflatten(jax.tree.structure(state), [encoded.codes for encoded in stored])
        scales = {array.name: encoded.scale for array, encoded in zip(arrays, stored, strict=True)}
        return codes, named_scales(self.format.scaled, scales)


def _decoded(static: tuple[Format, str], encoded: Encoded) -> jax.Array:
    """Return a decoded array in its dtype in the wrapped transform."""
    fmt, dtype = static
    values = fmt.decode(encoded)
    return values if dtype == "float32" else round_and_cast(values, dtype, None, saturate=True)


def _encoded(static: tuple[Format, bool], x: jax.Array, keys: LeafKeys | None, index) -> Encoded:
    """Return an encoded array; without keys, rounded to nearest."""
    fmt, stochastic = static
    key = None if keys is None else keys.of_leaf(index)
    wide = x.astype(jnp.float32) if key is None else opaque_input(x, key.zero)
    wide = without_derivative(wide) if fmt.ends_derivatives else wide
    words = key.words(Role.STATE, x.shape) if key is not None and stochastic else None
    return fmt.encode(wide if fmt.signed else jnp.abs(wide), words, keep_nonzero="where_nonnegative")


def _is_held(x) -> bool:
    """Whether a format can hold an array at all."""
    return hasattr(x, "dtype") and len(x.shape) > 0 and any(x.dtype == dtype for dtype in HELD_BY_FLOAT32)


def _sign(path) -> bool | None:
    """Return whether the array at a path may be negative, judged by Optax's field names."""
    fields = (key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey))
    return next((_KNOWN_FIELDS[name] for name in fields if name in _KNOWN_FIELDS), None)


def _has_negative(x) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and bool((x < 0).any())
