"""Clipping by the norm of all updates, as an Optax transform. Contract: N3."""

from collections.abc import Sequence
from typing import Any

from halfstep.numbers import Number
from halfstep.op import Op
from halfstep.rules import clip as shared
from halfstep_jax.numbers.global_norm import global_norms
from halfstep_jax.numbers.norms import Norms, check_axis_names
from halfstep_jax.rule import OfNorms
from halfstep_jax.transform import transform_of


class ClipByGlobalNorm(shared.ClipByGlobalNorm, OfNorms):
    """Clip by the norm of all updates; in `jax.shard_map`, these may be cut over axes of a mesh."""

    scope = "all"

    def update(self, g: Any, p, n, m, op):  # g of all leaves: a tuple
        """Return the clipped updates of all leaves."""
        check_axis_names(self.name, self.axis_names)
        arrays = [op.bare(u) for u in g]
        norms = global_norms(arrays, exact=self.exact, axis_names=self.axis_names)
        return clip(g, norms, n.max_norm, op)


clip_by_global_norm = transform_of(ClipByGlobalNorm)


def clip(updates: Sequence[Number], norms: Norms, max_norm: Number, op: Op) -> tuple[Number, ...]:
    """Return updates, times max_norm / norm unless the norm is at most that: float32 (contract N3)."""
    divisor, scale = map(op.wrap, norms.in_range())
    passes = op.wrap(norms.whole) <= max_norm
    # A product with 1 keeps every bit.
    factor, scale = op.where(passes, 1.0, max_norm / divisor), op.where(passes, 1.0, scale)
    return tuple(op.scaled(u, factor, scale) for u in updates)
