"""How a state array is stored: encode float32 to codes and scales, decode them to float32.

Contract: section F. A `Format` is all that a transform knows of storage, and it knows nothing of transforms.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from halfstep.storage import formats as shared
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.meshes.placement import with_auto_axes
from halfstep_jax.storage.base_codes import Codes, Mask
from halfstep_jax.storage.blocks import (
    block_maximum,
    check_blocks,
    first_elements,
    kept_for_kernels,
    of_block_maximum,
    pack,
    per_element,
    unpack,
)
from halfstep_jax.storage.codes import CODES
from halfstep_jax.xla.shards import Shard, whole_shape

F = TypeVar("F", bound=Callable)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["shape"])
@dataclasses.dataclass(frozen=True)
class Encoded:
    """A stored array: a pytree of codes and scale.

    Attributes:
        codes: in the shape of the array, or, of 4 bits, two to a byte.
        scale: uint8, one per block; None in a format without.
        shape: of the array; None where that is the shape of the codes.
    """

    codes: jax.Array
    scale: jax.Array | None
    shape: tuple[int, ...] | None = None


def _on_auto_axes(method: F) -> F:
    """Return a method of a format that, where there are blocks to cut, sees no explicit mesh axes."""

    @functools.wraps(method)
    def on_auto_axes(self, *arrays, **options) -> Tree:
        bound = functools.partial(method, self, **options)
        if not self.scaled or not all(x is None or isinstance(x, jax.Array | Encoded) for x in arrays):
            return bound(*arrays)
        return with_auto_axes(bound, *arrays)

    return on_auto_axes  # pyright: ignore[reportReturnType]


class Format(shared.Format):
    """A way to store an array of float32, of JAX: it encodes and decodes."""

    @property
    def arithmetic(self) -> Codes:
        """The arithmetic of the codes."""
        return CODES[self.family][self.dtype]

    @property
    def ends_derivatives(self) -> bool:
        """Whether stored values pass no derivative on: integers, and numbers in units of a scale."""
        return self.scaled or not jnp.issubdtype(self.code_dtype, jnp.floating)

    def problem_of(self, scale, shape: tuple[int, ...]) -> str | None:
        """Return the fault of the scales of an array of `shape`, unless they are traced."""
        expected = self.scale_shape(shape)
        made = f"block_size={self.block_size!r} makes it uint8{list(expected)}"
        if scale is None:
            return f"is missing; {made}"
        if scale.shape != expected or scale.dtype != jnp.uint8:
            return f"is {scale.dtype}{list(scale.shape)}; {made}"
        return None if isinstance(scale, Tracer) else self.problem_of_scale(np.asarray(scale))

    def lacks_scales(self, encoded: Encoded) -> bool:
        """Whether codes stand beside the scales that zeros have, and were made with others; no traced arrays.

        A scale is the smallest under which the block fits. So codes that would fit under the next scale
        are of a block without its own scale. Numbers that small are rare, and not so in all blocks.
        """
        (lowest, _), scale = self.codes.scale_range, encoded.scale
        if scale is None or isinstance(encoded.codes, Tracer) or isinstance(scale, Tracer):
            return False
        if not (np.asarray(scale) == lowest).all():
            return False
        if not np.asarray(encoded.codes).any():
            return False
        if self.dithered:  # relative to a second moment, where no scale of a block is the lowest
            return True
        with jax.ensure_compile_time_eval():
            next_scale = jnp.full_like(scale, lowest + 1)
            values = self.decode(Encoded(encoded.codes, next_scale, encoded.shape))
            full = np.asarray(self.scale_of(values) > lowest)
            filled = np.asarray(block_maximum((values != 0).astype(jnp.float32), self.block_size)) > 0
        return bool(full.sum() >= 0.9 * filled.sum())

    @_on_auto_axes
    def zeros_like(self, p) -> Encoded:
        """Return the codes and scales of zeros, in the shape and with the sharding of `p`."""
        codes = jnp.zeros_like(p, dtype=self.code_dtype)
        if not self.scaled:
            return Encoded(codes, None)
        lowest, _ = self.codes.scale_range
        scale = jnp.full_like(first_elements(codes, self.block_size), lowest, dtype=jnp.uint8)
        return self._encoded(codes, scale)

    def for_shard(self, caller: str, name: str, shard: Shard | None, shape: tuple[int, ...]) -> "Format":
        """Return the format that an array gets which may be a shard; refuse one that ends within a block."""
        if self.scaled and shard is not None:
            shard.check()
        fmt = self.for_shape(whole_shape(shard, shape))
        if fmt.scaled:
            check_blocks(caller, name, shard, fmt.block_size)
        return fmt

    @_on_auto_axes
    def encode(self, x: jax.Array, words: jax.Array | None, *, keep_nonzero: str = "never") -> Encoded:  # noqa: D102 (its base has it)
        return self._encoded(*self._codes_and_scale(x, words, keep_nonzero))

    @_on_auto_axes
    def scale_of(self, x: jax.Array) -> jax.Array:
        """Return the scale bytes of the blocks of x."""
        # A block with a NaN that its codes cannot hold is marked, whatever else is in it.
        not_finite = np.inf if self.codes.nan_in_scale else 0.0
        # The bytes of packed codes a TPU keeps in another order, so that bytes of scales do not join them.
        packed = self.codes.packed
        return of_block_maximum(
            self.arithmetic.scale, x, self.block_size, not_finite, bytes_on_tpu=not packed
        )

    @_on_auto_axes
    def codes_of(
        self, x: jax.Array, words: jax.Array | None, scale: jax.Array | None, *, keep_nonzero: str = "never"
    ) -> Encoded:
        """Encode with the result of `scale_of`; not packed (see `packed_up`)."""
        codes, scale = self._codes_and_scale(x, words, keep_nonzero, scale)
        return Encoded(kept_for_kernels(codes) if self.packed else codes, scale)

    @_on_auto_axes
    def unpacked(self, encoded: Encoded) -> Encoded:
        """Return the stored arrays with a code for every element, also if they are packed."""
        if encoded.shape is None:
            return encoded
        codes = unpack(encoded.codes, encoded.shape, self.block_size)
        return Encoded(kept_for_kernels(codes), encoded.scale)

    @_on_auto_axes
    def packed_up(self, encoded: Encoded) -> Encoded:
        """Return the stored arrays in their own form, given the form of `unpacked`."""
        return self._encoded(encoded.codes, encoded.scale)

    @_on_auto_axes
    def round_trip(
        self, x: jax.Array, words: jax.Array | None, *, keep_nonzero: str = "never"
    ) -> tuple[Encoded, jax.Array]:
        """Return the codes of `encode` and the values that they decode to."""
        if not self.packed:
            encoded = self.encode(x, words, keep_nonzero=keep_nonzero)
            return encoded, self.decode(encoded, words)
        codes, scale = self._codes_and_scale(x, words, keep_nonzero)
        encoded = self._encoded(codes, scale)
        codes = unpack(encoded.codes, x.shape, self.block_size, codes)
        return encoded, self.arithmetic.decode(codes, self._of_elements(scale, x.shape), words)

    def _codes_and_scale(
        self, x: jax.Array, words: jax.Array | None, keep_nonzero: str, scale: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the code of every element, and the scale of every block, if it is not known."""
        if self.scaled and scale is None:
            scale = self.scale_of(x)
        nonzero: Mask = keep_nonzero == "always"
        if self.scaled and keep_nonzero == "where_nonnegative":
            nonzero = self._without_negative(x)
        return self.arithmetic.encode(x, self._of_elements(scale, x.shape), words, nonzero), scale

    @_on_auto_axes
    def decode(self, encoded: Encoded, words: jax.Array | None = None) -> jax.Array:  # noqa: D102 (its base has it)
        codes = encoded.codes
        if encoded.shape is not None:
            codes = unpack(codes, encoded.shape, self.block_size)
        return self.arithmetic.decode(codes, self._of_elements(encoded.scale, codes.shape), words)

    def _of_elements(self, scale: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
        """Return the scale of every element; None in a format without."""
        return None if scale is None else per_element(scale, shape, self.block_size)

    def _without_negative(self, x: jax.Array) -> jax.Array:
        """Tell of every element whether its block holds no number below zero."""
        # By bits: XLA on CPU takes a subnormal number for zero.
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        negative = (bits > np.uint32(0x80000000)) & (bits <= np.uint32(0xFF800000))
        largest = block_maximum(negative.astype(jnp.float32), self.block_size)
        return per_element((largest == 0).astype(jnp.uint8), x.shape, self.block_size) == 1

    def _encoded(self, codes: jax.Array, scale: jax.Array | None) -> Encoded:
        """Return the stored arrays, given the code of every element."""
        if not self.packed:
            return Encoded(codes, scale)
        return Encoded(pack(codes, self.block_size), scale, codes.shape)
