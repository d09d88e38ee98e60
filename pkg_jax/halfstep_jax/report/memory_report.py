"""Bytes of weights, gradients and state of any transform, in all and on one device, from shapes alone."""

import math

import jax
import optax
from jax.sharding import Sharding

from halfstep.memory_report import GRADIENTS, WEIGHTS, MemoryReport
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.meshes.state_shardings import state_shardings


def memory_report(tx: optax.GradientTransformation, params: Tree, shardings: Tree = None) -> MemoryReport:
    """Report the bytes of weights, gradients and state, in total and on one device, beside float32 AdamW.

    Gradients are counted in the dtypes of the weights. Activations are not counted, nor are temporaries of
    a step.

    Args:
        tx: any Optax transform.
        params: the weights, or their shapes and dtypes: nothing is made of them, so a model may be larger
            than the machine.
        shardings: of the weights, as for `state_shardings`; None: all on one device.

    Example:
        >>> from halfstep_jax import adamw, recipes
        >>> params = {"w": jax.ShapeDtypeStruct((2**17, 2**19), "bfloat16")}
        >>> report = memory_report(adamw(1e-3, **recipes.one_pass), params)
        >>> f"{report.size:,} weights, {report.total / report.size:.3f} bytes each"
        '68,719,476,736 weights, 6.000 bytes each'

    Source: ours.
    """
    weights = jax.tree.leaves(params)
    state = jax.tree_util.tree_leaves_with_path(jax.eval_shape(tx.init, params))
    placed: list[Tree] = [None] * len(weights)
    state_placed: list[Tree] = [None] * len(state)
    if shardings is not None:
        placed = jax.tree.leaves(state_shardings(optax.trace(0.0), params, shardings))
        state_placed = jax.tree.leaves(state_shardings(tx, params, shardings))
    rows = [(name, *row) for name in (WEIGHTS, GRADIENTS) for row in zip(weights, placed, strict=True)]
    rows += [(_field(path), x, where) for (path, x), where in zip(state, state_placed, strict=True)]
    nbytes = dict.fromkeys((WEIGHTS, GRADIENTS, *(name for name, _, _ in rows)), 0)
    per_device = dict(nbytes)
    for name, x, where in rows:
        nbytes[name] += _nbytes(x)
        per_device[name] += _nbytes(x, where)
    wide = [jax.ShapeDtypeStruct(p.shape, "float32") for p in weights]
    float32, on_one = 4 * sum(map(_nbytes, wide)), 4 * sum(map(_nbytes, wide, placed))
    return MemoryReport(sum(p.size for p in weights), nbytes, per_device, float32, on_one)


def _nbytes(x, sharding: Sharding | None = None) -> int:
    """Return the bytes of an array, or of its part on one device."""
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def _field(path) -> str:
    """Return the name of an array in a state: the field that holds it or its tree."""
    fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    return next((name for name in reversed(fields) if name not in ("value", "inner_state")), "state")
