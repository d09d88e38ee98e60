"""A tree of weights in 16 bits; norms and embeddings have their own choice."""

import jax
import jax.numpy as jnp

from halfstep.cast import checked_choices, kind_of
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import named_leaves


def cast_params(params: Tree, *, norms: str = "split16", embeddings: str = "bfloat16") -> tuple[Tree, Tree]:
    """Cast weights to bfloat16; return them with a tree of labels.

    Rounds to nearest, once. Norms and embeddings are known by the names of their modules, such as
    "LayerNorm_0", "ln_1", "embedding" or "wte". "float32" leaves them as they are, and Flax computes with
    them in float32. "split16" casts them for the model; give them `param_storage="split16"`, so that the
    optimizer keeps the further bits of its updates. Leaves that are not float32 stay.

    Args:
        params: the weights.
        norms: "split16", "float32" or "bfloat16".
        embeddings: likewise.

    Returns:
        The weights, and a tree of labels for `optax.partition`: one of the three words for each.

    Raises:
        ValueError: if a choice is none of the three.

    Example:
        >>> import optax
        >>> from halfstep_jax import adamw
        >>> params = {"dense": {"kernel": jnp.ones((4, 4))}, "ln_1": {"scale": jnp.ones(4)}}
        >>> params, labels = cast_params(params)
        >>> labels
        {'dense': {'kernel': 'bfloat16'}, 'ln_1': {'scale': 'split16'}}
        >>> exact = adamw(1e-3, param_storage="split16")
        >>> tx = optax.partition({"bfloat16": adamw(1e-3), "split16": exact}, labels)

    Source: ours.
    """
    choices = checked_choices("cast_params", norms=norms, embeddings=embeddings)
    leaves, treedef = jax.tree.flatten(params)
    kinds = [kind_of(name.split("/")) for name, _ in named_leaves(params)]
    labels = [choices.get(kind, "bfloat16") for kind in kinds]
    cast = [_cast(p, label) for p, label in zip(leaves, labels, strict=True)]
    return treedef.unflatten(cast), treedef.unflatten(labels)


def _cast(p: Tree, label: str) -> Tree:
    is_cast = label != "float32" and getattr(p, "dtype", None) == jnp.float32
    if not is_cast:
        return p
    if isinstance(p, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(p.shape, jnp.bfloat16)
    return jnp.asarray(p).astype(jnp.bfloat16)
