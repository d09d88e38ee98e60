"""A step that returns the new weights: on a CPU by one custom call for all leaves."""

import jax
import optax

from halfstep_jax.kernels.step import finished, why_not_together
from halfstep_jax.leaf_calls import (
    LaterArray,
    LeafCall,
    Tree,
    call_for_leaf,
    links_that_may_wait,
    waiting_calls,
)


def update_params(
    tx: optax.GradientTransformation, params: Tree, state: Tree, updates: Tree, **extra_args: object
) -> tuple[Tree, Tree]:
    """Take a step: return the new params and the new state, as `tx.update` and `optax.apply_updates` do.

    The results have the same bits, other than those of a NaN. On a CPU, under `jax.jit`, a generated C kernel
    computes all leaves by one custom call of XLA. That compiles in less time, however many leaves there are,
    and stores no updates. Donate `params` and `state`, in the order in which the step returns them: XLA gives
    the buffer of an argument to the first result of its shape, and copies if the two do not belong together.

    There is a kernel if `tx` is an optimizer of this package, or `chain` with links of this package at its
    end, and if there is a C compiler. XLA computes leaves whose step has no generated form, such as matrices
    of Muon. It computes all leaves on other devices, on several devices, under `jax.vmap`, in derivatives, in
    `jax.shard_map`, on meshes with explicit axes, and in programs for `jax.export`.

    Args:
        tx: any Optax transform.
        params: the weights.
        state: of `tx`.
        updates: gradients.
        extra_args: what `tx.update` wants beside these, such as `value`.

    Raises:
        ValueError: as `tx.update`.
        jax.errors.JaxRuntimeError: if a process runs a program that another process has compiled, and has not
            compiled the step itself: the kernel is no part of the program.

    Example:
        >>> import functools, jax.numpy as jnp
        >>> from halfstep_jax import adamw
        >>> tx, params = adamw(1e-3), {"w": jnp.ones(3, jnp.bfloat16)}
        >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
        ... def step(params, state):
        ...     return update_params(tx, params, state, jax.grad(lambda p: (p["w"] ** 2).sum())(params))
        >>> params, state = step(params, tx.init(params))
        >>> params["w"].dtype
        dtype(bfloat16)

    Source: ours.
    """
    links = links_that_may_wait(tx)
    is_chain = len(links) > 1 and isinstance(state, tuple) and len(links) == len(state)
    if not links or why_not_together() or (len(links) > 1 and not is_chain):
        us, state = optax.with_extra_args_support(tx).update(updates, state, params, **extra_args)
        return optax.apply_updates(params, us), state
    calls: list[LeafCall] = []
    states = state if is_chain else (state,)
    first = next(i for i in range(len(links) + 1) if all(map(_may_wait, links[i:])))
    after = []
    for i, (link, before) in enumerate(zip(links, states, strict=True)):
        with waiting_calls(calls if i >= first else None):
            updates, new = optax.with_extra_args_support(link).update(updates, before, params, **extra_args)
        after.append(new)
    with waiting_calls(calls):
        params = jax.tree.map(_new_weight, params, updates, is_leaf=lambda x: x is None)
    return finished(calls, (params, tuple(after) if is_chain else after[0]))


def _may_wait(link: optax.GradientTransformation) -> bool:
    """Whether a link takes arrays that wait: not a chain, whose links may be of any library."""
    return [x.update for x in links_that_may_wait(link)] == [link.update]


def _new_weight(p: Tree, u: Tree) -> Tree:
    if not isinstance(u, LaterArray):
        return optax.apply_updates(p, u)
    return call_for_leaf(_applied, None, (), (p, u), p)


def _applied(_: None, p: jax.Array, u: jax.Array) -> jax.Array:
    """Return p + u in the dtype of p, as `optax.apply_updates` does."""
    return (p + u).astype(p.dtype)
