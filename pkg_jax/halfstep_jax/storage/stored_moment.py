"""How a link stores one of its moments: in which format, with which rounding and words.

Contract: F1 to F3. It stands between the update rules, which know moments, and the formats, which know codes.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep.random_words import role_of, word_role
from halfstep.rule import Moment
from halfstep.storage import state_dtypes as shared
from halfstep.storage.blocks import block_layout
from halfstep.storage.moment_formats import (
    AMPLIFIED,
    check_format,
    check_freezing,
    check_rounding,
    check_weight_dtype,
    dtype_argument,
    feeds_back,
    is_stochastic,
)
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import Leaves, named_leaves, refuse_raw_bytes
from halfstep_jax.numbers.random_words import LeafKey
from halfstep_jax.storage.formats import Encoded, Format
from halfstep_jax.storage.state_dtypes import as_format, default_format
from halfstep_jax.xla.shards import Shard, shards

_HINT = "Pass the tree that init saw."
# The dtypes of a moment if no format is given.
_DEFAULTS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class StoredMoment:
    """The storage of one moment of one link; checked when the link is built.

    Attributes:
        caller: the link, for errors.
        field: the moment as its rule declares it.
        asked_for: its format; None takes bfloat16 for bfloat16 params, else float32.
        rounding: one of `moment_formats.ROUNDINGS`.
        rate: the decay rate; None where it is an array, which counts as not known (contract F3).
        default_of_narrow: whether no format was given, and the format is that of bfloat16 weights alone
            (F20); arrays without scales in the state are then float32.

    Raises:
        ValueError: if the format cannot hold a state, or nearest would freeze it.
    """

    caller: str
    field: Moment
    asked_for: Format | None
    rounding: str
    rate: np.float32 | None
    default_of_narrow: bool = False

    @classmethod
    def of(cls, rule, field: Moment) -> "StoredMoment":
        """Return the storage of a moment of `rule`, from the fields that its declaration names.

        Raises:
            TypeError: if its dtype is no dtype.
            ValueError: if the format cannot hold a state, or nearest would freeze it.
        """
        rate = getattr(rule, field.rate) if field.rate else np.float32(0)
        dtype = getattr(rule, field.dtype) if field.dtype else field.always or None
        asked_for = None if dtype is None else as_format(rule.name, field.dtype, dtype)
        # Known when the link is built, and the same under `jax.jit` as without it.
        constant = np.float32(rate) if isinstance(rate, np.floating | np.ndarray) else None
        rounding = getattr(rule, field.rounding) if field.rounding else "auto"
        default_of_narrow = asked_for is None and field.errors == "amplified"
        if default_of_narrow:
            asked_for = Format.of(AMPLIFIED)
        return cls(rule.name, field, asked_for, rounding, constant, default_of_narrow)

    def __post_init__(self):
        check_rounding(self.caller, self.field, self.rounding)
        if self.asked_for is not None:
            check_format(self.caller, self.field, self.asked_for)
            if not self.default_of_narrow:
                self._refuse_freezing(self.asked_for)

    @property
    def name(self) -> str:
        """Of the moment in the state."""
        return self.field.name

    @property
    def dtype_name(self) -> str:
        """Of the field that says how it is stored, for errors."""
        return dtype_argument(self.field)

    @property
    def role(self) -> int:
        """Of its random words."""
        return role_of(self.name)

    @property
    def key_role(self) -> int:
        """The role of the key that its rounding reads."""
        return word_role(self.role)

    def init(self, params):
        """Return the codes of new moments, in the tree of `params`, and their scales (`named_scales`)."""
        named, treedef = named_leaves(params), jax.tree.structure(params)
        names, values = [name for name, _ in named], [p for _, p in named]
        parts = self.shards(names, values)
        rows = zip(names, values, parts, strict=True)
        return self.split_tree(treedef.unflatten([self._zeros_for(*row) for row in rows]))

    def shards(self, names: list[str], weights: list) -> list[Shard | None]:
        """Return the parts of whole arrays that the moment's arrays are, inside `jax.shard_map`.

        Raises:
            ValueError: if a weight is cut, and the moment has another shape.
        """
        found = shards(self.caller, names, weights)
        for name, shard in zip(names, found, strict=True):
            if shard is not None and self.field.shape is not None:
                shard.check()
                raise ValueError(
                    f"{self.caller}: inside jax.shard_map '{name}' is a shard, and how {self.name}, which is "
                    "of another shape, is cut is not known. Step under jax.jit."
                )
        return found

    def read(self, leaves: Leaves, codes, scales, dtypes: Sequence[str | None]) -> list[Encoded]:
        """Return the stored arrays of every leaf; arrays that `init` would not have made raise.

        Args:
            leaves: of the updates.
            codes: the tree of codes, and
            scales: by name, as `init` returned them.
            dtypes: of the weights; None where they are not known.

        Raises:
            TypeError: if codes are of another dtype than asked for.
            ValueError: if a tree or a shape differs, or a scale is out of range; under `jax.jit` its value
                cannot be read, and is not checked.
        """
        parts = self.shards(leaves.names, leaves.values)
        shapes = [None if g is None else self.field.shape_for(self.caller, g.shape) for g in leaves.values]
        rows = zip(leaves.names, shapes, parts, strict=True)
        kept = scales if isinstance(scales, Mapping) else {}
        formats = [
            None if shape is None else self._format_here(name, shape, part, kept.get(name) is None)
            for name, shape, part in rows
        ]
        due = [
            fmt.code_shape(shape) if fmt and shape is not None else shape
            for fmt, shape in zip(formats, shapes, strict=True)
        ]
        # Of another recipe codes may be of another shape too: their dtype says more.
        unshaped = leaves.match_any_shape(codes, "state", _HINT)
        for name, shape, fmt, code, dtype in zip(
            leaves.names, shapes, formats, unshaped, dtypes, strict=True
        ):
            if shape is not None:
                self._check_dtype(name, fmt, code, dtype)
            elif self.dithered and kept.get(name) is not None:
                self._refuse_leaving_out(name)
        all_codes = leaves.match(codes, self.name, _HINT, due)
        return [
            Encoded(code, kept.get(name))
            if shape is None
            else self._checked(name, shape, fmt, code, kept.get(name))
            for name, shape, fmt, code in zip(leaves.names, shapes, formats, all_codes, strict=True)
        ]

    def decode(self, encoded: Encoded, key: LeafKey | None) -> jax.Array:
        """Return the float32 values of stored arrays.

        Args:
            encoded: codes and scales.
            key: of the leaf at the step that stored them, for dithered codes.
        """
        fmt, shape = self.format_of(encoded), encoded.codes.shape if encoded.shape is None else encoded.shape
        return fmt.decode(encoded, self.words(fmt, shape, key) if fmt.dithered else None)

    def round_trip(self, old: Encoded, moment: jax.Array, key: LeafKey) -> tuple[Encoded, jax.Array]:
        """Round the float32 `moment` to the format of `old`, with words of the leaf's key, and decode it."""
        fmt = self.format_of(old)
        words = self.words(fmt, moment.shape, key)
        return fmt.round_trip(moment, words, keep_nonzero=self.keep_nonzero)

    def round_with_inverse_root(
        self, old: Encoded, moment: jax.Array, key: LeafKey
    ) -> tuple[Encoded, jax.Array]:
        """Round as `round_trip` does; return the stored arrays, and about 1/sqrt of the unrounded moment."""
        fmt = self.format_of(old)
        codes, inverse = fmt.arithmetic.with_inverse_root(
            moment, self.words(fmt, moment.shape, key), key.zero
        )
        return Encoded(codes, None), inverse

    def split_tree(self, encoded):
        """Return the tree of codes, and the scales by name, of a tree of `Encoded`."""
        named = named_leaves(encoded, _is_encoded)
        codes = jax.tree.unflatten(
            jax.tree.structure(encoded, is_leaf=_is_encoded), [one.codes for _, one in named]
        )
        return codes, named_scales(self._has_scales, {name: one.scale for name, one in named})

    def format_of(self, encoded: Encoded) -> Format:
        """Return the format of stored arrays: the given one, or the plain one of their dtype."""
        small = self._has_scales and encoded.scale is None
        if self.asked_for is None or small:
            return as_format(self.caller, self.dtype_name, encoded.codes.dtype)
        return self.asked_for

    def cut_of(self, encoded: Encoded, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the length of a block and of a run of what is stored; (0, 0) without scales."""
        if encoded.scale is None:
            return 0, 0
        _, run, block = block_layout(shape, self.format_of(encoded).block_size)
        return block, run

    def storage_of(self, codes, shape: tuple[int, ...]) -> tuple[Format, str]:
        """Return how the moment of a weight of `shape` is stored, and whether it is rounded stochastically.

        Args:
            codes: an array of their dtype.
            shape: of the weight.
        """
        if self.asked_for is None:
            fmt = as_format(self.caller, self.dtype_name, codes.dtype)
        else:
            fmt = self.asked_for.for_shape(self.field.shape_for(self.caller, shape))
            if self.default_of_narrow and codes.dtype == jnp.float32:
                fmt = as_format(self.caller, self.dtype_name, codes.dtype)
        if self.feeds_back(fmt):
            return fmt, "feedback"
        return fmt, "stochastic" if self._stochastic(fmt) else "nearest"

    def feeds_back(self, fmt: Format) -> bool:
        """Whether the error of storing the moment in a format is fed back."""
        return feeds_back(fmt, self.rounding)

    @property
    def dithered(self) -> bool:
        """Whether decoding asks for the key of the step that stored."""
        return self.asked_for is not None and self.asked_for.dithered

    @property
    def keep_nonzero(self) -> str:
        """Whether other numbers are kept from zero when they are stored: see `Format.encode`."""
        return "never" if self.field.signed else "always"

    def words(self, fmt: Format, shape, key: LeafKey | None) -> jax.Array | None:
        """Return one word per element, of dithered codes that of its block; to nearest None."""
        if not self._stochastic(fmt):
            return None
        assert key is not None
        if fmt.dithered:
            return key.block_words(self.role, shape, fmt.block_size)
        return key.words(self.role, shape)

    def _stochastic(self, fmt: Format) -> bool:
        return is_stochastic(self.field, fmt, self.rounding, self.rate)

    @property
    def _has_scales(self) -> bool:
        return self.asked_for is not None and self.asked_for.scaled

    def _zeros_for(self, name: str, p, shard: Shard | None) -> Encoded:
        if self.field.shape is not None:
            p = jnp.zeros(self.field.shape_for(self.caller, p.shape), p.dtype)
        fmt = self._format_here(name, p.shape, shard, p.dtype != jnp.bfloat16) or default_format(p)
        self._refuse_freezing(fmt)
        if not self.field.copies_weights:
            return fmt.zeros_like(p)
        check_weight_dtype(self.caller, self.field, name, p.dtype.name)
        # A copy: a buffer that is donated with the weights is not donated twice.
        return fmt.encode(jnp.array(p, jnp.float32), None)

    def _format_here(
        self, name: str, shape: tuple[int, ...], shard: Shard | None, is_wide: bool
    ) -> Format | None:
        """Return the format asked for, for an array of `shape` that may be a shard; None if none was.

        `is_wide` tells, where bfloat16 weights decide, that these are others.

        Raises:
            ValueError: if the shard ends within a block.
        """
        if self.asked_for is None:
            return None
        if self.default_of_narrow and is_wide:
            return Format("float32")
        return self.asked_for.for_shard(self.caller, name, shard, shape)

    def _check_dtype(self, leaf: str, fmt: Format | None, codes, weight_dtype: str | None) -> None:
        """Refuse codes of a dtype that the format does not have; without one, of none that `init` makes."""
        what, dtype = f"the {self.name} of '{leaf}'", getattr(codes, "dtype", None)
        if weight_dtype is not None:
            check_weight_dtype(self.caller, self.field, leaf, weight_dtype)
        refuse_raw_bytes(self.caller, what, codes)
        if fmt is None and dtype is not None and dtype not in _DEFAULTS:
            raise TypeError(
                f"{self.caller}: {what} is {dtype}, as another recipe keeps it: {self.dtype_name}=None "
                "keeps bfloat16 or float32. Pass the state that init made, or the arguments that it had."
            )
        due = None if weight_dtype is None else shared.default_format(weight_dtype).dtype
        if fmt is None and None not in (dtype, due) and dtype != due:
            raise TypeError(
                f"{self.caller}: {what} is {dtype}, and its weight is {weight_dtype}, for which "
                f"{self.dtype_name}=None makes {due}: the weight or the state was cast since init. "
                "Apply updates by optax.apply_updates, which keeps the dtype (eqx.apply_updates does not). "
                "If a library adds them, end the chain with cast_updates(). For weights cast on purpose, "
                f'pass {self.dtype_name}="{dtype}".'
            )
        if fmt is not None and dtype is not None and dtype != fmt.code_dtype:
            raise TypeError(
                f"{self.caller}: {what} is {dtype}, {self.dtype_name} is {fmt.dtype}. "
                "Pass the state that init made."
            )

    def _refuse_leaving_out(self, leaf: str) -> None:
        """Refuse no gradient for codes that are decoded with the words of the step before."""
        raise ValueError(
            f"{self.caller}: the gradient of '{leaf}' is None, and its {self.name}, in codes of 4 bits, is "
            "decoded with the random words of the last step, so a step cannot leave it out. Pass zeros, "
            f'which let it decay, or {self.dtype_name} of recipe "eight_bit".'
        )

    def _checked(self, leaf: str, shape: tuple[int, ...], fmt: Format | None, codes, scale) -> Encoded:
        fmt = fmt or as_format(self.caller, self.dtype_name, codes.dtype)
        if fmt.scaled and (problem := fmt.problem_of(scale, shape)):
            raise ValueError(
                f"{self.caller}: the {self.name}_scale of '{leaf}' {problem}. "
                "Pass the state that init made, and the block_size that it was made with."
            )
        encoded = Encoded(codes, scale, shape if fmt.packed else None)
        if fmt.scaled and fmt.lacks_scales(encoded):
            raise ValueError(
                f"{self.caller}: the {self.name} of '{leaf}' has codes, and its {self.name}_scale is that of "
                f"a fresh state: {self.name} was moved without its scales. Move {self.name}_scale too, a "
                "dict by the names of weights."
            )
        return encoded

    def _refuse_freezing(self, fmt: Format) -> None:
        check_freezing(self.caller, self.field, fmt, self.rounding, self.rate)


def _is_encoded(x) -> bool:
    return isinstance(x, Encoded)


def named_scales(has_scales: bool, scales: Mapping[str, jax.Array | None]) -> Tree:
    """Return the scales of a state by the names of their leaves.

    Not in the tree of the params: clients place arrays there as they place the weight, and scales have
    other shapes. Where a format has scales but no leaf is large enough for it, it is one byte that means
    nothing: Optax takes the state of no leaves at all for a pattern of all states. A format without scales
    has an `optax.EmptyState`.
    """
    if not has_scales:
        return optax.EmptyState()
    return {name: scale for name, scale in scales.items() if scale is not None} or jnp.zeros([], jnp.uint8)
