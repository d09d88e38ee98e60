"""A transform inside `jax.shard_map`, where arrays are shards, with the bits of a step on whole arrays."""

import contextlib
import functools
import logging
from collections.abc import Iterator

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import named_leaves, with_prefix
from halfstep_jax.xla.shards import Shard, known_shards, manual_axes, shard_of, varying

_LOG = logging.getLogger("halfstep_jax")
_FUNCTION = "in_shard_map"


def in_shard_map(inner: optax.GradientTransformation, specs: Tree) -> optax.GradientTransformationExtraArgs:
    """Tell a transform how weights are cut, for steps inside `jax.shard_map`.

    There every device sees its part of an array alone. Once the links of this package know which part that
    is, they use the random words of these elements in the whole array. They also use the formats of the whole
    array, which may be large enough for scales where its parts are not. So the bits are the same as on one
    device. Nothing is sent. The state is the state of `inner`, so that it may be made outside. A step outside
    is a step of `inner`.

    Where a cut goes through blocks that share a scale, no device alone can find it: refused. So is a cut
    array in a link that reads whole arrays, such as Muon and `clip_by_block_rms`. Without this, so is
    whatever needs random words, blocks or elements of an array of which it is not known that it is whole.
    Norms are told by `axis_names` of the links that take them, which must have the axes of the cuts.

        state_specs = jax.tree.map(lambda s: s.spec, state_shardings(tx, params, shardings))
        step = jax.shard_map(step, in_specs=(specs, state_specs, specs), out_specs=(specs, state_specs))

    Args:
        inner: any Optax transform: a whole chain.
        specs: a `jax.sharding.PartitionSpec` per weight, in the tree of the weights or a prefix of it; or
            shardings that have one.

    Returns:
        An Optax transform, with the updates and the state of `inner`.

    Raises:
        TypeError: if something in `specs` is neither.
        ValueError: from `init` and `update`, if trees differ, a spec has more axes than its weight, or a cut
            goes through blocks. From `update`, if a link reads elements of other shards.

    Example:
        >>> import jax.numpy as jnp
        >>> from halfstep_jax import adamw
        >>> mesh, specs = jax.sharding.Mesh(jax.devices()[:1], "x"), {"w": PartitionSpec("x")}
        >>> tx = in_shard_map(adamw(1e-3), specs)
        >>> params = {"w": jnp.ones(8, jnp.bfloat16)}
        >>> def step(params, grads):
        ...     updates, _ = tx.update(grads, tx.init(params), params)
        ...     return optax.apply_updates(params, updates)
        >>> step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, specs), out_specs=specs))
        >>> step(params, params)["w"].shape
        (8,)

    Source: ours (contract W8).
    """
    leaves = jax.tree.leaves(specs, is_leaf=_is_spec)
    wrong = [x for x in leaves if not _is_spec(x)]
    if wrong:
        raise TypeError(
            f"{_FUNCTION}: specs holds {wrong[0]!r}, which does not say how axes are cut. "
            "Use jax.sharding.PartitionSpec."
        )
    inner_update = optax.with_extra_args_support(inner).update

    def init(params):
        with _shard_context(specs, params):
            return inner.init(params)

    def update(updates, state, params=None, **extra_args):
        with _shard_context(specs, updates) as shards:
            _say_what_varies(shards, params)
            return inner_update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


@contextlib.contextmanager
def _shard_context(specs, tree) -> Iterator[dict[str, Shard]]:
    """Tell links which shards the arrays of a tree are; outside of `jax.shard_map`, do nothing."""
    shards: dict[str, Shard] = {}
    if not manual_axes():
        yield shards
        return
    for name, x, spec in with_prefix(_FUNCTION, "specs", specs, tree, _is_spec):
        spec = spec.spec if isinstance(spec, NamedSharding) else spec
        if len(spec) > x.ndim:
            raise ValueError(
                f"{_FUNCTION}: the spec of '{name}' is {spec}, its shape {x.shape}. Use a spec of its axes."
            )
        shards[name] = shard_of(spec, x.shape)
    with known_shards(shards):
        yield shards


def _say_what_varies(shards: dict[str, Shard], params: Tree) -> None:
    """Log once of weights that differ by device where specs say that they are equal."""
    for name, x in named_leaves(params) if shards else []:
        if isinstance(x, jax.Array) and name in shards and (axes := varying(x) - {*shards[name].axes}):
            _say_once(tuple(sorted(axes)), name)
            return


@functools.cache
def _say_once(axes: tuple[str, ...], name: str) -> None:
    _LOG.warning(
        f"in_shard_map: specs say that devices along {axes} have the same '{name}', and it may differ. If it "
        "is cut there, name the axes in its spec. If each device trains its own weights, give each its own "
        "seed, made of jax.lax.axis_index. Where the weights are the same, nothing is wrong."
    )


def _is_spec(x) -> bool:
    return isinstance(x, PartitionSpec | NamedSharding)
