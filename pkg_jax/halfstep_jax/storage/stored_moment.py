"""How a link stores one of its moments: in which format, rounded how, with whose words.

Contract: F1 to F3. It stands between the update rules, which know moments, and the formats, which know codes.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from halfstep_jax.leaves import Leaves, flatten_updates
from halfstep_jax.numbers.random_words import Role, leaf_id, leaf_keys
from halfstep_jax.storage.blocks import scale_shape
from halfstep_jax.storage.formats import Encoded, Format, as_format, default_format

_WAY_OUT = "Pass the tree that init saw."

ROUNDINGS = ("stochastic", "nearest", "auto", "nearest_unchecked")


@dataclasses.dataclass(frozen=True)
class StoredMoment:
    """The storage of one moment of one link; checked when the link is built.

    Attributes:
        function: the link, for errors.
        name: of the moment in the link's state: "mu", "nu" or "trace".
        dtype: as the caller gave it; None takes bfloat16 for bfloat16 params, else float32.
        rounding: one of `ROUNDINGS`.
        rate_name: the argument that holds the decay rate.
        rate: the decay rate, a NumPy float32, or an array, which counts as not known (contract F3).
        role: of its random words.
        positive: a second moment, never negative and never stored as zero where it is not.
        dtype_name: the argument that holds `dtype`; "" for "mu_dtype" and the like.
        rounding_name: the argument that holds `rounding`; "" for "mu_rounding" and the like.

    Raises:
        TypeError: if `dtype` is no dtype.
        ValueError: if the format cannot hold a state, or nearest would freeze it.
    """

    function: str
    name: str
    dtype: Any
    rounding: str
    rate_name: str
    rate: Any
    role: Role
    positive: bool = False
    dtype_name: str = ""
    rounding_name: str = ""

    def __post_init__(self):
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"{self.function}: {self._rounding_name}={self.rounding!r} is not a rounding. "
                'Use "stochastic", "nearest", "auto" or "nearest_unchecked".'
            )
        if self.dtype is None:
            return
        if not self.positive and not self._asked_for.signed:
            raise ValueError(
                f"{self.function}: {self._dtype_name}={self._asked_for.dtype} has no sign. "
                f"Use it for nu, and a signed format for {self._dtype_name.removesuffix('_dtype')}."
            )
        self._refuse_freezing(self._asked_for)

    def init(self, params):
        """Return the codes and the scales of new moments, in the tree of `params`.

        A leaf of a format without scales has a byte that means nothing in the tree of scales; where no leaf
        can have a scale, that tree is an `optax.EmptyState`.
        """
        return self.trees(jax.tree.map(self._zeros_like, params))

    def read(self, leaves: Leaves, codes, scales) -> list[Encoded]:
        """Return what is stored for every leaf, and refuse what `init` would not have made.

        Args:
            leaves: of the updates.
            codes: the tree of codes, and
            scales: of scales, as `init` returned them.

        Raises:
            TypeError: if codes are of another dtype than asked for.
            ValueError: if a tree or a shape differs, or a scale is out of range; under `jax.jit` its value
                cannot be read, and is not checked.
        """
        all_codes = leaves.of(codes, "state", _WAY_OUT, self._code_shape)
        all_scales = (
            leaves.arrays_of(scales, "state", _WAY_OUT) if self._has_scales else [None] * len(all_codes)
        )
        rows = zip(leaves.names, leaves.values, all_codes, all_scales, strict=True)
        return [
            Encoded(code, scale) if g is None else self._checked(name, g.shape, code, scale)
            for name, g, code, scale in rows
        ]

    def decode(self, stored: Encoded) -> jax.Array:
        """Return the float32 values of what is stored."""
        shape = stored.codes.shape if stored.shape is None else stored.shape
        return self._format_of(stored.codes, shape).decode(stored)

    def encode(self, old: Encoded, moment: jax.Array, words: Callable[[Role], jax.Array]) -> Encoded:
        """Round the float32 `moment` to the format of `old`. `words` makes the words of a role, if needed."""
        fmt = self._format_of(old.codes, moment.shape)
        new = fmt.encode(moment, words(self.role) if self._stochastic(fmt) else None, positive=self.positive)
        return new if fmt.scaled else dataclasses.replace(new, scale=old.scale)

    def trees(self, stored):
        """Return the tree of codes and the tree of scales of a tree of `Encoded`."""
        codes, scales = (
            jax.tree.map(operator.attrgetter(name), stored, is_leaf=lambda x: isinstance(x, Encoded))
            for name in ("codes", "scale")
        )
        return codes, scales if self._has_scales else optax.EmptyState()

    def _stochastic(self, fmt: Format) -> bool:
        if not fmt.rounds:
            return False
        if self.rounding == "auto":
            return not _is_constant(self.rate) or fmt.freezes(self.rate)
        return self.rounding == "stochastic"

    @property
    def _has_scales(self) -> bool:
        return self.dtype is not None and self._asked_for.scaled

    def _zeros_like(self, p) -> Encoded:
        fmt = default_format(p) if self.dtype is None else self._asked_for.for_shape(p.shape)
        self._refuse_freezing(fmt)
        zeros = fmt.zeros_like(p)
        # Not an empty array: orbax does not save those.
        return zeros if fmt.scaled else dataclasses.replace(zeros, scale=jnp.zeros(1, jnp.uint8))

    def _code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the codes of a leaf."""
        return shape if self.dtype is None else self._asked_for.for_shape(shape).code_shape(shape)

    def _format_of(self, codes: jax.Array, shape: tuple[int, ...]) -> Format:
        """Return the format of a leaf's codes: the one asked for, or the plain one of their dtype."""
        if self.dtype is not None:
            return self._asked_for.for_shape(shape)
        return as_format(self.function, self._dtype_name, codes.dtype)

    def _checked(self, leaf: str, shape: tuple[int, ...], codes, scale) -> Encoded:
        fmt = self._format_of(codes, shape)
        if codes.dtype != fmt.code_dtype:
            raise TypeError(
                f"{self.function}: the {self.name} of '{leaf}' is {codes.dtype}, {self._dtype_name} is "
                f"{fmt.dtype}. Pass the state that init made."
            )
        if fmt.scaled and (fault := _fault(fmt, shape, scale)):
            raise ValueError(
                f"{self.function}: the {self.name}_scale of '{leaf}' {fault}. "
                "Pass the state that init made, and the block_size that it was made with."
            )
        return Encoded(codes, scale, shape if fmt.packed else None)

    @property
    def _dtype_name(self) -> str:
        return self.dtype_name or f"{self.name}_dtype"

    @property
    def _rounding_name(self) -> str:
        return self.rounding_name or f"{self.name}_rounding"

    @property
    def _asked_for(self) -> Format:
        return as_format(self.function, self._dtype_name, self.dtype)

    def _refuse_freezing(self, fmt: Format) -> None:
        if self.rounding == "nearest" and _is_constant(self.rate) and fmt.freezes(self.rate):
            dtype, rounding = self._dtype_name, self._rounding_name
            raise ValueError(
                f'{self.function}: {dtype}={fmt.dtype} with {rounding}="nearest" freezes '
                f"at {self.rate_name}={self.rate!s} (1-{self.rate_name} < {fmt.half_gap}). "
                f'Use {rounding}="stochastic", or {dtype}="float32".'
            )


def update_moments(function: str, moments: Sequence[StoredMoment], updates, stored, seed, count, step):
    """Take the step of a link with stored moments on every leaf.

    Args:
        function: the link, for errors.
        moments: how each moment is stored.
        updates: the incoming tree.
        stored: of each moment, its trees of codes and of scales.
        seed: uint32[2], of the random words.
        count: int32 scalar, this step counted.
        step: from the key of a leaf, its update and its stored moments to its new update and stored moments.

    Returns:
        The tree of updates, and of each moment its trees of codes and of scales.

    Raises:
        TypeError: as `StoredMoment.read`, or if float32 does not hold an update.
        ValueError: as `StoredMoment.read`.
    """
    leaves = flatten_updates(function, updates)
    columns = [moment.read(leaves, *trees) for moment, trees in zip(moments, stored, strict=True)]
    ids = [leaf_id(name) for name in leaves.names]
    keys = leaf_keys(seed, count, ids, [moment.role for moment in moments]).split()
    rows = [
        (None, *arrays) if g is None else step(key, g, *arrays)
        for key, g, *arrays in zip(keys, leaves.values, *columns, strict=True)
    ]
    us, *columns = leaves.trees(1 + len(moments), rows)
    return us, [moment.trees(column) for moment, column in zip(moments, columns, strict=True)]


def _is_constant(rate) -> bool:
    """Whether a rate is known when the link is built, and the same under `jax.jit` as without it."""
    return isinstance(rate, np.floating | np.ndarray)


def _fault(fmt: Format, shape: tuple[int, ...], scale) -> str | None:
    """Return what is wrong with the scales of an array of `shape`, as far as it can be read now."""
    expected = scale_shape(shape, fmt.block_size)
    if scale.shape != expected or scale.dtype != jnp.uint8:
        found, made = f"{scale.dtype}{list(scale.shape)}", f"uint8{list(expected)}"
        return f"is {found}; block_size={fmt.block_size!r} makes it {made}"
    return None if isinstance(scale, Tracer) else fmt.fault_of_scale(np.asarray(scale))
