"""The keys of random words, made once for all links of an alias.

Its links have one seed and one count, so their keys are equal, which XLA does not see. Where the last link
reads the keys of the first, the word that moments and weight share (contract W6) is mixed once.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence

import jax
import optax

from halfstep_jax.leaf_calls import Tree
from halfstep_jax.numbers.random_words import LeafKeys
from halfstep_jax.xla.exact import opaque_zero

_shared: contextvars.ContextVar[dict[tuple[int, ...], LeafKeys] | None] = contextvars.ContextVar(
    "shared", default=None
)


def share_keys(ids: Sequence[int], keys: LeafKeys) -> None:
    """Share the keys of leaves with the links that follow in an alias."""
    if (shared := _shared.get()) is not None:
        shared[tuple(ids)] = keys


def shared_keys_of(ids: Sequence[int], role: int) -> LeafKeys | None:
    """Return the keys of leaves for a role that an earlier link shared, or None."""
    keys = (_shared.get() or {}).get(tuple(ids))
    return keys if keys is not None and role in keys.roles else None


def shared_zero() -> jax.Array:
    """Return a zero for `exact.opaque`: that of shared keys, or a new one."""
    keys = next(iter((_shared.get() or {}).values()), None)
    return opaque_zero() if keys is None else keys.zero


@contextlib.contextmanager
def unshared_keys() -> Iterator[None]:
    """Share no keys inside: the tracers of a trial in an alias must not leave it."""
    with _sharing(None):
        yield


@contextlib.contextmanager
def _sharing(keys: dict[tuple[int, ...], LeafKeys] | None) -> Iterator[None]:
    token = _shared.set(keys)
    try:
        yield
    finally:
        _shared.reset(token)


def with_shared_keys(
    tx: optax.GradientTransformationExtraArgs, check_state: Callable[[Tree], None]
) -> optax.GradientTransformationExtraArgs:
    """Return the same transform. Its links have one seed and one count, and so may read each other's keys.

    `check_state` raises for the state of another transform.
    """
    update: Callable = tx.update

    # A function without a module-level name is pickled with the globals that it reads: no context variable.
    def update_with_shared_keys(updates, state, params=None, **extra_args):
        check_state(state)
        with _sharing({}):
            return update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update_with_shared_keys)
