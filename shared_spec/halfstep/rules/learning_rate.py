"""The learning rate (contract D2)."""

import functools

from halfstep.hyperparameters import Scalar, check_nonnegative
from halfstep.rule import Rule, number, option


class ScaleByLearningRate(Rule):
    """Multiply updates by minus the learning rate: (-learning_rate) u, or learning_rate u.

    In float32, rounded once. (Optax's own link does the same, but a compiler may fuse its product with a sum
    that follows.)

    The learning rate is a number >= 0 or a schedule, called with the count of steps before this one. In JAX
    it may also be a float32 scalar array, in torch a tensor of one element (float32 or float64, read at every
    step). `flip_sign` is True to descend.

    The group entry in torch is `lr`. For a schedule it shows the rate of the last step (before the first
    step, of the first), for loggers and state dicts. A 0 that is written there is used until it is changed.
    Any other number that is written there, as by `torch.optim.lr_scheduler`, changes nothing, and the log
    says so once.

    Raises:
        TypeError: if the learning rate is none of these.
        ValueError: if it is negative, infinite or NaN.

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
        """Return the rate with its sign."""
        return {"learning_rate": -h.learning_rate if self.flip_sign else h.learning_rate}

    def update(self, g, p, n, m, op):
        """Return (-lr) u, rounded once."""
        return n.learning_rate * g
