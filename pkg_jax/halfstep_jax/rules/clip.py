"""Clipping by the norm of all updates, as an Optax transform. Contract: N3."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from halfstep.hyperparameters import check_bound
from halfstep.numbers import Number
from halfstep.op import Op
from halfstep.rule import Rule, number
from halfstep_jax.numbers.global_norm import global_norms
from halfstep_jax.numbers.norms import Norms, check_axis_names
from halfstep_jax.transform import as_transform


def clip_by_global_norm(
    max_norm: jax.typing.ArrayLike, *, exact: bool = False, axis_names: Sequence[str] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Scale all updates so that their norm is at most `max_norm`.

        u <- (max_norm / norm) u   where norm > max_norm

    Norm, quotient and product are float32, each operation rounded once, whatever the dtype of the updates.
    Updates whose norm is not above `max_norm` are passed on as they are, in float32. In place of
    `optax.clip_by_global_norm`, which adds squares in the dtype of the updates: of 1000 equal leaves in
    bfloat16 it sees half the norm.

    Args:
        max_norm: the largest norm that is left as it is; a number >= 0, or a float32 scalar array.
        exact: add integers, so that the norm has the same bits in any order, on any mesh, and in torch; see
            `global_norm`. It reads the updates twice, and takes some 20 times the time on a CPU.
        axis_names: inside `jax.shard_map`, the mesh axes over which updates are cut; () where every device
            has them whole. Of no effect elsewhere: under `jax.jit` a sharded array is a whole one.

    Returns:
        An Optax transform. Its updates are float32. Finite updates are clipped whatever their norm, which may
        be above float32's largest number. A norm of NaN makes every update NaN; an infinite update makes
        the others 0, and itself NaN.

    Errors are those of `scale_by_adam`, and ValueError inside `jax.shard_map` without `axis_names`.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = clip_by_global_norm(1.0)
        >>> updates, _ = tx.update({"a": jnp.bfloat16(3.0), "b": jnp.bfloat16(-4.0)}, tx.init({}))
        >>> print(updates["a"], updates["b"])
        0.6 -0.8

    Source: R. Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013,
        algorithm 1; the name and argument are Optax's.
    """
    names = None if axis_names is None else tuple(axis_names)
    return as_transform(ClipByGlobalNorm(max_norm, exact, names))


class ClipByGlobalNorm(Rule):
    """The rule of `clip_by_global_norm`."""

    scope = "all"

    max_norm: Any = number(check=check_bound)
    exact: bool = False
    axis_names: Any = None

    def update(self, g: Any, p, n, m, op):
        """Return the clipped updates of all leaves."""
        check_axis_names(self.name, self.axis_names)
        arrays = [op.bare(u) for u in g]
        norms = global_norms(arrays, exact=self.exact, axis_names=self.axis_names)
        return clip(g, norms, n.max_norm, op)


def clip(updates: Sequence[Number], norms: Norms, max_norm: Number, op: Op) -> tuple[Number, ...]:
    """Return updates, times max_norm / norm unless the norm is at most that: float32 (contract N3)."""
    divisor, scale = map(op.wrap, norms.in_range())
    passes = op.wrap(norms.whole) <= max_norm
    # A product with 1 keeps every bit.
    factor, scale = op.where(passes, 1.0, max_norm / divisor), op.where(passes, 1.0, scale)
    return tuple(op.scaled(u, factor, scale) for u in updates)
