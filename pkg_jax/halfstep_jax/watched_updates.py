"""Watching the links that store weights while a whole chain runs.

Nothing after such a link may change its updates: they would be rounded again.
"""

import contextlib
import contextvars
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import Leaves

# They keep further bits of the weight that they show, and of no other.
EXACT_STORAGES = frozenset({"split_params", "keep_master_params"})


class WatchedUpdates:
    """The results of watched links: stand-ins for their updates.

    Attributes:
        by: of the leaves of 16 bits, the link that stored each last.
        updates: its results: numbers that no other link makes by chance.
        returned: the same, as the array that it returned.
        arrived: the update that it was given.
    """

    def __init__(self):
        self.by: dict[str, str] = {}
        self.updates: dict[str, np.ndarray] = {}
        self.returned: dict[str, jax.Array] = {}
        self.arrived: dict[str, jax.Array] = {}

    def stand_in(self, caller: str, name: str, u: jax.Array) -> jax.Array:
        """Return the stand-in for a leaf's update."""
        self.by[name], self.arrived[name] = caller, u
        self.updates[name] = np.linspace(0.3, 1.7, u.size, dtype=np.float32).reshape(u.shape)
        self.returned[name] = jnp.asarray(self.updates[name])
        return self.returned[name]


_watched: contextvars.ContextVar[WatchedUpdates | None] = contextvars.ContextVar("watching", default=None)


@contextlib.contextmanager
def watching(watched_updates: WatchedUpdates) -> Iterator[None]:
    """Let links that store weights return stand-ins, which differ from anything computed of them."""
    token = _watched.set(watched_updates)
    try:
        yield
    finally:
        _watched.reset(token)


def keeps_rounded_updates() -> bool:
    """Whether a check runs, and a cast leaves stored weights as they were."""
    watched_updates = _watched.get()
    return watched_updates is not None and EXACT_STORAGES.isdisjoint(watched_updates.by.values())


def is_wide(p) -> bool:
    """Whether a weight passes through every rule: one of float32, or wider (contract P6)."""
    return jnp.dtype(p.dtype).itemsize >= 4


def watched(caller: str, leaves: Leaves, weights: list, us: Tree) -> Tree:
    """Return the tree of updates that a link applies; if watched, stand-ins for updates of 16 bits."""
    _refuse_steps_left_out(caller, us)
    watched_updates = _watched.get()
    if watched_updates is None:
        return us
    rows = zip(leaves.names, weights, leaves.values, strict=True)
    return leaves.treedef.unflatten(
        [u if u is None or is_wide(p) else watched_updates.stand_in(caller, name, u) for name, p, u in rows]
    )


def _refuse_steps_left_out(caller: str, us: Tree) -> None:
    """Refuse Optax's wrappers under gradients of another dtype than updates.

    JAX would name two dtypes without a remedy. They call an update from a branch of `lax.cond`, and the
    other branch has the gradients' dtype. Only the frames of that call tell of it.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "do_update":
        frame = frame.f_back
    if frame is None or not frame.f_globals["__name__"].startswith("optax."):
        return
    gradients = jax.tree.leaves(frame.f_locals.get("updates"))
    for g, u in zip(gradients, jax.tree.leaves(us), strict=False):
        if g.dtype == u.dtype:
            continue
        raise TypeError(
            f"{caller}: a wrapper that leaves steps out, as optax.apply_if_finite, wants updates in the "
            f"dtype of the gradients, {g.dtype}, and the updates of these weights are {u.dtype}. "
            f"Cast the gradients to {u.dtype} before it; for apply_if_finite there is "
            "halfstep_jax.skip_nonfinite."
        )
