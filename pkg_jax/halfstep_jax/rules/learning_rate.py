"""The learning rate as an Optax transform.

Contract: section D.
"""

import optax

from halfstep_jax.leaves import flatten_updates
from halfstep_jax.numbers.exact import arrived, hidden_zero, hide
from halfstep_jax.numbers.schedules import as_rate


def scale_by_learning_rate(learning_rate, *, flip_sign: bool = True) -> optax.GradientTransformationExtraArgs:
    """Multiply the updates by the learning rate: (-learning_rate) u, or learning_rate u without `flip_sign`.

    In float32, rounded once. (Optax's own link does the same, but a compiler may fuse its product with a sum
    that follows.)

    Args:
        learning_rate: a number >= 0, a float32 scalar array, or a schedule of the count before its increment.
        flip_sign: True to descend.

    Returns:
        An Optax transform. Its updates are float32.

    Raises:
        TypeError: if `learning_rate` is no number, or an array of another dtype than float32; from `update`,
            if a leaf is not float32, bfloat16 or float16.
        ValueError: if `learning_rate` is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = scale_by_learning_rate(0.5)
        >>> updates, _ = tx.update({"w": jnp.float32(1.0)}, tx.init({}))
        >>> float(updates["w"])
        -0.5

    Source: as `optax.scale_by_learning_rate` (contract D2).
    """
    function = "scale_by_learning_rate"
    way_out = "Use a number >= 0, or flip_sign=False to ascend."
    rate = as_rate(function, "learning_rate", learning_rate, way_out)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        leaves = flatten_updates(function, updates)
        size, state = rate.read(state)
        zero = hidden_zero()
        factor = -size if flip_sign else size
        return leaves.map(lambda u: hide(factor * arrived(u, zero), zero)), state

    return optax.GradientTransformationExtraArgs(rate.init, update)
