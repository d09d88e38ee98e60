"""Clipping by the norm of all updates (contract N3)."""

from dataclasses import KW_ONLY

from halfstep.hyperparameters import Scalar, check_bound
from halfstep.rule import Rule, number


class ClipByGlobalNorm(Rule):
    """Scale all updates so that their norm is at most `max_norm`.

        u <- (max_norm / norm) u   where norm > max_norm

    Norm, quotient and product are float32, each operation rounded once, whatever the dtype of the updates.
    Updates whose norm is not above `max_norm` are passed on as they are, in float32. In place of
    `optax.clip_by_global_norm`, which adds squares in the dtype of the updates: of 1000 equal leaves in
    bfloat16 it sees half the norm.

    Finite updates are clipped whatever their norm, which may be above float32's largest number. A norm of NaN
    makes every update NaN; an infinite update makes the others 0, and itself NaN.

    In torch it is the first link of a chain. The norm is that of the gradients of all parameters of the
    optimizer. It is read on the host once per step, but stays on a GPU that has kernels, for gradients of one
    dtype. The gradients stay as they are. Shards exchange words once for all gradients together, with `exact`
    twice.

    Args:
        max_norm: the largest norm that is left as it is; a number >= 0, or in JAX a float32 scalar array.
        exact: add integers, so that the norm has the same bits in any order, on any number of devices and in
            either framework (contract N2). Updates are read twice. On a CPU it takes some 20 times the time
            in JAX, 5 times in torch.
        axis_names: of JAX alone. Inside `jax.shard_map`, the mesh axes over which updates are cut; () where
            every device has them whole. Of no effect elsewhere: under `jax.jit` a sharded array is a whole
            one.

    Raises:
        TypeError: if `max_norm` is no number.
        ValueError: if it is negative; inside `jax.shard_map` without `axis_names`.

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
