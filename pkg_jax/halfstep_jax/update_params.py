"""A step that returns the new weights: by kernels, on a CPU by one custom call for all leaves."""

import jax
import numpy as np
import optax
from jax.core import Tracer

from halfstep_jax.kernels.step import finished, problems, why_not_together
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

    The results have the same bits, other than those of a NaN. On a CPU a generated C kernel computes all
    leaves by one custom call of XLA. That compiles in less time, however many leaves there are. The kernel
    stores no updates. Behind `tx.update` it would have to, in float32, for `optax.apply_updates` to read: 4
    bytes more per parameter, and 1.8 times the processor time (default, 4 million parameters).

    Donate `params` and `state`, in the order in which the step returns them: XLA gives the buffer of an
    argument to the first result of its shape, and copies if the two do not belong together. A step outside
    `jax.jit` is compiled by itself, and donates nothing.

    On an NVIDIA GPU a Pallas kernel steps each leaf, if no format has scales. XLA compiles it once for all
    leaves of one size. For an H100, 28 leaves then take 3 processor seconds instead of 7.6, and 148 take 3.4.
    Its PTX has the bits of XLA in an interpreter. No GPU has run it yet.

    There is a kernel if `tx` is an optimizer of this package, or `chain` with links of this package at its
    end, and on a CPU if there is a C compiler. Before a new kernel is called, it must have the bits of XLA on
    scratch memory. XLA computes leaves whose step has no generated form, such as codebooks. It computes all
    leaves on other devices, on several devices, under `jax.vmap`, in derivatives, in `jax.shard_map`, on
    meshes with explicit axes, and in programs for `jax.export`. `describe` shows the form and the reason.

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
    if not _why_by_xla(tx, state) and _may_be_compiled((params, state, updates, extra_args)):
        return _compiled(tx, params, state, updates, extra_args)
    return _step(tx, params, state, updates, extra_args)


def form_of_step(tx: optax.GradientTransformation, params: Tree, state: Tree, extra_args: dict) -> str:
    """Return in words by which form `update_params` steps the weights, and why: from shapes alone."""
    by_xla = "update_params stores all weights by XLA"
    placed = {len(x.sharding.device_set) for x in jax.tree.leaves(params) if isinstance(x, jax.Array)}
    if placed - {1}:
        return f"{by_xla}: they are on {max(placed)} devices."
    if why := _why_by_xla(tx, state):
        return f"{by_xla}: {why}."
    found: list[str] = []

    def step(params, state, updates):
        calls, made = _waiting(tx, params, state, updates, extra_args)
        found.extend(problems(calls, made, jax.tree.leaves(made[0])))

    jax.eval_shape(step, params, state, params)
    left = [why for why in found if why]
    if not left:
        return f"update_params stores all {len(found)} weights by a generated kernel."
    reasons = "; ".join(dict.fromkeys(left))
    return f"update_params stores {len(left)} of {len(found)} weights by XLA: {reasons}."


def _step(
    tx: optax.GradientTransformation, params: Tree, state: Tree, updates: Tree, extra_args: dict
) -> tuple[Tree, Tree]:
    if _why_by_xla(tx, state):
        us, state = optax.with_extra_args_support(tx).update(updates, state, params, **extra_args)
        return optax.apply_updates(params, us), state
    return finished(*_waiting(tx, params, state, updates, extra_args))


_compiled = jax.jit(_step, static_argnums=0)


def _why_by_xla(tx: optax.GradientTransformation, state: Tree) -> str:
    """Return why no weight is stepped by a kernel here, or ""."""
    links = links_that_may_wait(tx)
    is_chain = isinstance(state, tuple) and len(links) == len(state)
    if not links or (len(links) > 1 and not is_chain):
        return "it is no optimizer of halfstep_jax, or chain with links of it at its end"
    return why_not_together()


def _may_be_compiled(arguments: Tree) -> bool:
    """Whether there are arrays of one device, and none is traced: a step outside `jax.jit`."""
    leaves = jax.tree.leaves(arguments)
    devices = {x.sharding for x in leaves if isinstance(x, jax.Array) and not isinstance(x, Tracer)}
    return (
        all(isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves)
        and not any(isinstance(x, Tracer) for x in leaves)
        and len(set().union(*(x.device_set for x in devices))) <= 1
    )


def _waiting(
    tx: optax.GradientTransformation, params: Tree, state: Tree, updates: Tree, extra_args: dict
) -> tuple[list[LeafCall], tuple[Tree, Tree]]:
    """Return the calls of a step that wait, and the new params and state, made of their results."""
    links, calls = links_that_may_wait(tx), []
    is_chain = len(links) > 1
    states = state if is_chain else (state,)
    first = next(i for i in range(len(links) + 1) if all(map(_may_wait, links[i:])))
    after = []
    for i, (link, before) in enumerate(zip(links, states, strict=True)):
        with waiting_calls(calls if i >= first else None):
            updates, new = optax.with_extra_args_support(link).update(updates, before, params, **extra_args)
        after.append(new)
    with waiting_calls(calls):
        params = jax.tree.map(_new_weight, params, updates, is_leaf=lambda x: x is None)
    return calls, (params, tuple(after) if is_chain else after[0])


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
