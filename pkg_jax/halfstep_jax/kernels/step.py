"""The calls of leaves that wait, computed together by kernels, if there are any."""

from collections.abc import Sequence

import jax

from halfstep_jax.kernels.call import has_primitive, run_together
from halfstep_jax.kernels.program import LeafStep, leaf_steps
from halfstep_jax.kernels.registered import kernel_of, unavailable
from halfstep_jax.leaf_calls import LaterArray, LeafCall, Tree, value_of


def why_not_together() -> str:
    """Return why leaves are computed one by one here, or ""."""
    if not jax.sharding.get_abstract_mesh().empty:
        return "the mesh has explicit or manual axes"
    return unavailable() or ("" if has_primitive() else "this version of JAX has no such primitives")


def finished(calls: Sequence[LeafCall], made: Tree) -> Tree:
    """Return the results of a step, with the values of the calls that waited."""
    for steps in _together(calls, made):
        kernel = kernel_of(steps[0].program)
        kernel.here.start()
        if not kernel.here.problem:
            run_together(kernel, steps)
    return jax.tree.map(value_of, made)


def problems(calls: Sequence[LeafCall], made: Tree, weights: Sequence[Tree]) -> list[str]:
    """Return why no kernel computes it, or "", for each new weight among the results of a step."""
    found = {id(call): call.problem for call in calls}
    for steps in _together(calls, made):
        problem = kernel_of(steps[0].program).here.problem
        found |= {id(call): problem for step in steps for call in step.calls}
    return [
        found[id(x.call)]
        if isinstance(x, LaterArray) and not x.call.has_run
        else "its rule reads whole arrays"
        for x in weights
    ]


def _together(calls: Sequence[LeafCall], made: Tree) -> list[list[LeafStep]]:
    """Return the steps for which a kernel may exist, in lists that share kernel, numbers and keys."""
    waiting = [x for x in jax.tree.leaves(made) if isinstance(x, LaterArray) and x.value is None]
    groups: dict[tuple, list[LeafStep]] = {}
    for step in leaf_steps(calls, waiting):
        shared = tuple(map(id, step.numbers)), tuple(map(id, step.keys))
        groups.setdefault((step.program, shared), []).append(step)
    return list(groups.values())
