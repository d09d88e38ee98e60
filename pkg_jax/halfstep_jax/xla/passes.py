"""A step in several passes over memory: only stored arrays cross memory between them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from halfstep_jax.leaf_calls import Traced, Tree
from halfstep_jax.xla.exact import zero_of_pass

try:
    from jax.extend import core
except ImportError:
    core: Any = None  # a module

# Where a version of JAX has moved these, a step takes one pass: the bits stay, and more crosses memory.
ARE_THERE = all(hasattr(core, name) for name in ("ClosedJaxpr", "Literal", "jaxpr_as_fun"))


def step_in_passes(take: Callable, stored: Tree, zero: jax.Array, *, on_gpu: bool) -> tuple[Tree, Tree]:
    """Run a step in passes, one for each stored array; return its result and the stored arrays.

    XLA keeps an array with a root in it and two uses in float32. So nothing has two: a pass begins with the
    inputs again, behind another zero, and XLA does not see that it is the same step. The step is traced once.
    A pass is the part of that trace that its result depends on, given what the passes before it stored.

    Args:
        take: from a zero and the stored arrays of the step to its result and its new arrays.
        stored: arrays like those that it stores: their tree, shapes and dtypes.
        zero: of the step.
        on_gpu: whether passes are kept apart there too; see `zero_of_pass`.

    Source: ours.
    """
    like, tree = jax.tree.flatten(stored)
    trees: list[Tree] = []

    def flat(zero, *new):
        result, made = take(zero, tree.unflatten(new))
        result, returned = jax.tree.flatten(result)
        trees.append(returned)
        return *jax.tree.leaves(made), *result

    trace = jax.make_jaxpr(flat)(zero, *like)
    passes = {i: _part(trace.jaxpr, [x]) for i, x in enumerate(trace.jaxpr.outvars[: len(like)])}
    new: dict[int, jax.Array] = {}
    while passes:
        i = next(i for i, part in passes.items() if _reads(part) <= new.keys())
        zero = zero_of_pass(zero, on_gpu=on_gpu)
        (new[i],) = _run(passes.pop(i), trace.consts, zero, like, new)
    last = _part(trace.jaxpr, trace.jaxpr.outvars[len(like) :])
    result = _run(last, trace.consts, zero_of_pass(zero, on_gpu=on_gpu), like, new)
    return trees[0].unflatten(result), tree.unflatten([new[i] for i in range(len(like))])


def _part(trace: Traced, results: Sequence[Traced]) -> Traced:
    """Return the part of a trace that given results depend on."""
    needed, eqns = _variables(results), []
    for eqn in reversed(trace.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed |= _variables(eqn.invars)
            eqns.append(eqn)
    return trace.replace(eqns=eqns[::-1], outvars=list(results))


def _reads(part: Traced) -> set[int]:
    """Return which of the arrays that are stored a part of a trace reads."""
    read = _variables(part.outvars).union(*(_variables(eqn.invars) for eqn in part.eqns))
    return {i for i, x in enumerate(part.invars[1:]) if x in read}


def _variables(atoms: Sequence[Traced]) -> set[Traced]:
    return {x for x in atoms if not isinstance(x, core.Literal)}


def _run(part: Traced, consts: Sequence, zero: jax.Array, like: list, new: dict[int, jax.Array]) -> list:
    # Inputs that it does not read may be anything.
    given = [new.get(i, x) for i, x in enumerate(like)]
    return core.jaxpr_as_fun(core.ClosedJaxpr(part, consts))(zero, *given)
