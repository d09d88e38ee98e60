"""How a link stores one of its moments: in which format, rounded how, with whose words.

Contract: F1 to F3. It stands between the update rules, which know moments, and the formats, which know codes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from halfstep_jax.blocks import scale_shape
from halfstep_jax.formats import Encoded, Format, as_format, default_format
from halfstep_jax.leaves import Leaves
from halfstep_jax.random_words import Role

WAY_OUT = "Pass the tree that init saw."
ROUNDINGS = ("stochastic", "nearest", "auto", "nearest_unchecked")
_NO_SCALE = functools.partial(jnp.zeros, (1,), jnp.uint8)
"""Stands in a tree of scales for a leaf without: not an empty array, which orbax does not save."""


@dataclasses.dataclass(frozen=True)
class StoredMoment:
    """The storage of one moment of one link; checked when the link is built.

    Attributes:
        function: the link, for errors.
        name: "mu" or "nu": the arguments are `mu_dtype` and `mu_rounding`, so `nu`.
        dtype: as the caller gave it; None takes bfloat16 for bfloat16 params, else float32.
        rounding: one of `ROUNDINGS`.
        rate_name: the argument that holds the decay rate.
        rate: the decay rate, a NumPy float32, or an array, which counts as not known (contract F3).
        role: of its random words.
        positive: a second moment, never negative and never stored as zero where it is not.

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

    def __post_init__(self):
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"{self.function}: {self.name}_rounding={self.rounding!r} is not a rounding. "
                'Use "stochastic", "nearest", "auto" or "nearest_unchecked".'
            )
        if self.dtype is None:
            return
        if not self.positive and not self._asked_for.signed:
            raise ValueError(
                f"{self.function}: {self.name}_dtype={self._asked_for.dtype} has no sign. "
                f"Use it for nu, and a signed format for {self.name}."
            )
        self._refuse_freezing(self._asked_for)

    def init(self, params):
        """Return the trees of codes and of scales of new moments; without scales, an `optax.EmptyState`."""
        leaves, treedef = jax.tree.flatten(params)
        stored = [self._new_format(p).zeros_like(p) for p in leaves]
        return self._trees(treedef, stored, [_NO_SCALE() for _ in leaves])

    def read(self, leaves: Leaves, codes, scales) -> list[Any]:
        """Return what is stored for every leaf; refuse what `init` would not have made.

        Args:
            leaves: of the updates.
            codes: the tree of codes, and
            scales: of scales, as `init` returned them.

        Raises:
            TypeError: if codes or scales are of another dtype than asked for.
            ValueError: if a tree or a shape differs, or, where bytes can be read now, a scale is out of range.
        """
        codes = leaves.of(codes, "state", WAY_OUT)
        scales = leaves.values_of(scales, "state", WAY_OUT) if self._has_scales else [None] * len(codes)
        rows = zip(leaves.names, leaves.values, codes, scales, strict=True)
        return [None if g is None else self._checked(name, code, scale) for name, g, code, scale in rows]

    def write(self, leaves: Leaves, stored: list[Any], codes, scales):
        """Return the trees of new codes and scales; where `stored` is None, the old ones stay."""
        old = leaves.treedef.flatten_up_to(codes)
        old_scales = leaves.treedef.flatten_up_to(scales) if self._has_scales else [None] * len(old)
        kept = [
            Encoded(code, scale) if new is None else new
            for new, code, scale in zip(stored, old, old_scales, strict=True)
        ]
        return self._trees(leaves.treedef, kept, old_scales)

    def decode(self, stored: Encoded) -> jax.Array:
        """Return the float32 values of what is stored."""
        return self._format_of(stored.codes).decode(stored)

    def encode(self, old: Encoded, moment: jax.Array, words: Callable[[Role], jax.Array]) -> Encoded:
        """Round the float32 `moment` to the format of `old`. `words` makes the words of a role, if needed."""
        fmt = self._format_of(old.codes)
        return fmt.encode(moment, words(self.role) if self._stochastic(fmt) else None, positive=self.positive)

    def _stochastic(self, fmt: Format) -> bool:
        if not fmt.rounds:
            return False
        if self.rounding == "auto":
            return not _is_constant(self.rate) or fmt.freezes(self.rate)
        return self.rounding == "stochastic"

    def _trees(self, treedef, stored: list[Encoded], no_scales: list[Any]):
        """Return codes and scales as trees; a leaf of a format without scales gets its entry of `no_scales`."""
        codes = treedef.unflatten([code for code, _ in stored])
        if not self._has_scales:
            return codes, optax.EmptyState()
        pairs = zip(stored, no_scales, strict=True)
        return codes, treedef.unflatten([none if s.scale is None else s.scale for s, none in pairs])

    @property
    def _has_scales(self) -> bool:
        return self.dtype is not None and self._asked_for.scaled

    def _new_format(self, p) -> Format:
        fmt = default_format(p) if self.dtype is None else self._asked_for.for_shape(p.shape)
        self._refuse_freezing(fmt)
        return fmt

    def _format_of(self, codes: jax.Array) -> Format:
        """Return the format that codes are in: the one asked for, or else the plain one of their dtype."""
        if self.dtype is not None:
            return self._asked_for.for_shape(codes.shape)
        return as_format(self.function, f"{self.name}_dtype", codes.dtype)

    def _checked(self, leaf: str, codes: jax.Array, scale) -> Encoded:
        fmt = self._format_of(codes)
        if codes.dtype != fmt.code_dtype:
            raise TypeError(
                f"{self.function}: the {self.name} of '{leaf}' is {codes.dtype}, {self.name}_dtype is "
                f"{fmt.dtype}. Pass the state that init made."
            )
        if not fmt.scaled:
            return Encoded(codes, None)
        if fault := _fault(fmt, codes, scale):
            raise ValueError(
                f"{self.function}: the {self.name}_scale of '{leaf}' {fault}. "
                f"Pass the state that init made, or the block_size that it was made with."
            )
        return Encoded(codes, scale)

    @property
    def _asked_for(self) -> Format:
        return as_format(self.function, f"{self.name}_dtype", self.dtype)

    def _refuse_freezing(self, fmt: Format) -> None:
        if self.rounding == "nearest" and _is_constant(self.rate) and fmt.freezes(self.rate):
            raise ValueError(
                f'{self.function}: {self.name}_dtype={fmt.dtype} with {self.name}_rounding="nearest" freezes '
                f"at {self.rate_name}={self.rate} (1-{self.rate_name} < {fmt.half_gap}). "
                f'Use {self.name}_rounding="stochastic", or {self.name}_dtype="float32".'
            )


def _is_constant(rate) -> bool:
    """Whether a rate is known when the link is built, and the same under `jax.jit` as without it."""
    return isinstance(rate, np.floating | np.ndarray)


def _fault(fmt: Format, codes: jax.Array, scale) -> str | None:
    """Return what is wrong with the scales of codes, as far as it can be read now."""
    expected = scale_shape(codes.shape, fmt.block_size)
    if scale.shape != expected or scale.dtype != jnp.uint8:
        return f"is {scale.dtype}{scale.shape}, block_size={fmt.block_size!r} needs uint8{expected}"
    return None if isinstance(scale, Tracer) else fmt.check_scale(np.asarray(scale))
