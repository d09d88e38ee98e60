"""The learning rate (contract D2)."""

import functools

from halfstep.hyperparameters import Scalar, check_nonnegative
from halfstep.rule import Rule, number, option


class ScaleByLearningRate(Rule):
    """Multiply updates by minus the learning rate: (-learning_rate) u, or learning_rate u.

    The product is float32, rounded once. (Optax's own link computes the same product, but a compiler may fuse
    it with a sum that follows.)

    The learning rate is a number >= 0 or a schedule, called with the number of steps before the current step.
    In JAX it may also be a float32 scalar array, in torch a tensor with one element (float32 or float64, read
    at every step). `flip_sign` is True to descend.

    The group entry in torch is `lr`. For a schedule it shows the rate at the last step (before the first
    step, the first rate), for loggers and state dicts. A 0 written to the entry is used until it is changed.
    Any other number written to it, as by `torch.optim.lr_scheduler`, is ignored, with one line in the log.

    Raises:
        TypeError: if the learning rate has another type.
        ValueError: if the learning rate is negative, infinite or NaN.

    Example:
        >>> import halfstep_jax, halfstep_torch as hs, jax.numpy as jnp
        >>> tx = halfstep_jax.scale_by_learning_rate(0.5)
        >>> updates, _ = tx.update({"w": jnp.float32(1.0)}, tx.init({}))
        >>> float(updates["w"])
        -0.5
        >>> hs.chain(hs.scale_by_learning_rate(1e-3)).entries
        {'lr': 0.001}

    Source: as `optax.scale_by_learning_rate` (contract D2).
    """

    learning_rate: Scalar = number(
        schedule=True,
        torch="lr",
        check=functools.partial(check_nonnegative, hint="Use a number >= 0, or flip_sign=False to ascend."),
    )
    flip_sign: bool = option(True)

    def numbers(self, h, t, op):
        """Return the learning rate with its sign."""
        return {"learning_rate": -h.learning_rate if self.flip_sign else h.learning_rate}

    def update(self, g, p, n, m, op):
        """Return (-lr) u, rounded once."""
        return n.learning_rate * g
