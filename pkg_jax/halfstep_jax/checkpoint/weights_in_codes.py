"""8-bit weights that only the state of an optimizer holds: read, and decoded where they are used.

Contract: P8.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep.rules.adamw_in_codes import AdamWInCodes
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import INT8
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import named_leaves
from halfstep_jax.rule import state_type
from halfstep_jax.storage.formats import Encoded, Format


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class StoredParam:
    """A weight as the state holds it: a pytree of codes and scales, which `jax.lax.scan` cuts into layers.

    Attributes:
        codes: int8, in the shape of the weight; float32 where that is too small for codes.
        scale: uint8, one for each row; None where codes are float32.
    """

    codes: jax.Array
    scale: jax.Array | None = None

    def decode(self, dtype: DType = "float32") -> jax.Array:
        """Return the weight: exact in float32, rounded to nearest in another `dtype`."""
        if self.scale is None:
            return self.codes.astype(dtype)
        return Format.of(INT8).decode(Encoded(self.codes, self.scale)).astype(dtype)


def stored_params(state: Tree) -> Tree:
    """Return the weights that the state of `adamw(..., param_storage="int8")` holds, in the tree of params.

    A training loop keeps the state alone, and decodes the weights within the compiled step. `decode_params`
    decodes all of them; a layer may decode its weight where it computes with it.

    Args:
        state: of the optimizer, or any nesting of states that has one such state in it.

    Returns:
        The tree of params with a `StoredParam` in place of every array.

    Raises:
        ValueError: if there is no such state, or there are several.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from halfstep_jax import adamw
        >>> tx = adamw(1e-3, param_storage="int8")
        >>> state = tx.init({"w": jnp.ones((64, 64)), "b": jnp.zeros(64)})
        >>> stored = stored_params(state)
        >>> print(stored["w"].codes.dtype, stored["b"].codes.dtype)
        int8 float32
        >>> @jax.jit
        ... def step(state, x):
        ...     params = decode_params(stored_params(state))
        ...     gradients = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)
        ...     return tx.update(gradients, state, params)[1]
        >>> state = step(state, jnp.ones((1, 64)))
        >>> int(state.count)
        1

    Source: ours (contract P8).
    """
    kind = state_type(AdamWInCodes)
    found = [x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)]
    if len(found) != 1:
        raise ValueError(
            f"stored_params: the state has {len(found) or 'no'} parts that hold weights in codes. Pass "
            'that of one adamw(..., param_storage="int8").'
        )
    scales = {} if isinstance(found[0].param_scale, optax.EmptyState | jax.Array) else found[0].param_scale
    nodes = [StoredParam(codes, scales.get(name)) for name, codes in named_leaves(found[0].param)]
    return jax.tree.structure(found[0].param).unflatten(nodes)


def stored_as(p: jax.Array, stored: StoredParam) -> StoredParam:
    """Return the weight p in codes, with new ones in rows that were changed since they were stored."""
    p, kept = jnp.asarray(p), stored.decode()
    if stored.scale is None:
        return StoredParam(p)
    # After a step a weight may be some units in the last place beside its code (contract P8).
    unit = jnp.maximum(jnp.abs(p), jnp.abs(kept)).max(-1, keepdims=True) * np.float32(2.0**-20)
    changed = ~(jnp.abs(p - kept) <= unit).all(-1, keepdims=True)
    new = Format.of(INT8).encode(p, None)
    assert new.scale is not None
    codes = jnp.where(changed, new.codes, stored.codes)
    return StoredParam(codes, jnp.where(changed.reshape(stored.scale.shape), new.scale, stored.scale))


def decode_params(stored: Tree, dtype: DType = "float32") -> Tree:
    """Return a tree with every `StoredParam` in it decoded; other leaves stay as they are.

    Exact in float32; rounded to nearest in another `dtype`.

    Args:
        stored: as `stored_params` returns it, or a part of that.
        dtype: of the arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> from halfstep_jax import adamw
        >>> state = adamw(1e-3, param_storage="int8").init({"w": jnp.full((64, 64), 0.5)})
        >>> decode_params(stored_params(state), "bfloat16")["w"].dtype
        dtype(bfloat16)

    Source: ours (contract P8).
    """
    return jax.tree.map(
        lambda x: x.decode(dtype) if isinstance(x, StoredParam) else x,
        stored,
        is_leaf=lambda x: isinstance(x, StoredParam),
    )
