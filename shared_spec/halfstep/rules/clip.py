"""Clipping by the norm of all updates (contract N3)."""

from dataclasses import KW_ONLY

from halfstep.hyperparameters import Scalar, check_bound
from halfstep.rule import Rule, number


class ClipByGlobalNorm(Rule):
    """Scale all updates so that their norm is at most `max_norm`.

        u <- (max_norm / norm) u   if norm > max_norm

    Norm, quotient and product are float32, each operation rounded once, whatever the updates' dtype. Updates
    with a norm of at most `max_norm` are returned unchanged, in float32. Use the link instead of
    `optax.clip_by_global_norm`, which adds squares in the updates' dtype: for 1000 equal bfloat16 leaves it
    computes half the norm.

    Finite updates are clipped even if their norm is above float32's largest number. A NaN norm makes every
    update NaN. An infinite update makes the other updates 0, and itself NaN.

    In torch it is the first link in a chain. The norm is computed over all gradients in the optimizer. It is
    read on the host once per step, but stays on a GPU that has kernels if all gradients have one dtype. The
    gradients are not modified. Shards exchange words once for all gradients together, with `exact` twice.

    Args:
        max_norm: the largest norm that is not clipped, a number >= 0, or in JAX a float32 scalar array.
        exact: whether to add integers, so that the norm has the same bits in any order, on any number of
            devices and in either framework (contract N2). Updates are read twice. On a CPU it takes some 20
            times the time in JAX, 5 times in torch.
        axis_names: only in JAX. Inside `jax.shard_map`, the mesh axes over which updates are sharded, or ()
            if every device has whole updates. Outside it they have no effect, because under `jax.jit` a
            sharded array is a whole array.

    Raises:
        TypeError: if `max_norm` is not a number.
        ValueError: if `max_norm` is negative, or inside `jax.shard_map` without `axis_names`.

    Example:
        >>> import halfstep_jax, halfstep_torch as hs, jax.numpy as jnp
        >>> tx = halfstep_jax.clip_by_global_norm(1.0)
        >>> updates, _ = tx.update({"a": jnp.bfloat16(3.0), "b": jnp.bfloat16(-4.0)}, tx.init({}))
        >>> print(updates["a"], updates["b"])
        0.6 -0.8
        >>> tx = hs.chain(hs.clip_by_global_norm(1.0), hs.scale_by_learning_rate(1.0))

    Source: R. Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013,
        algorithm 1; the name and argument are Optax's.
    """

    max_norm: Scalar = number(torch=None, check=check_bound)  # torch's entry `max_norm` is LAMB's
    _: KW_ONLY
    exact: bool = False
