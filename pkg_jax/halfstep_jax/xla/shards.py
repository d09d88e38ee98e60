"""Shards inside `jax.shard_map`: which part of which array each is.

Contract: W8. Random words and blocks follow whole arrays; `in_shard_map` tells how these are cut.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from halfstep.arrays import Array
from halfstep_jax.leaf_calls import Traced


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions"],
    meta_fields=["shape", "pieces", "axes", "problem"],
)
@dataclasses.dataclass(frozen=True)
class Shard:
    """One of the equal parts into which an array is cut.

    Attributes:
        shape: of the part.
        pieces: of each axis, how many parts it is cut into.
        positions: of each axis, which of them this is: uint32, 0 where the axis is not cut.
        axes: the mesh axes that cut it.
        problem: why none of this is known, as an error says it; "" where it is.
    """

    shape: tuple[int, ...]
    pieces: tuple[int, ...]
    positions: tuple[Array, ...]
    axes: tuple[str, ...] = ()
    problem: str = ""

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return tuple(n * pieces for n, pieces in zip(self.shape, self.pieces, strict=True))

    def first(self, axis: int) -> Array:
        """Return the index along an axis, in the whole array, of the part's first element: uint32."""
        return self.positions[axis] * np.uint32(self.shape[axis])

    def check(self) -> None:
        """Raise an error: a shard must not be taken for the whole array."""
        if self.problem:
            raise ValueError(self.problem)


_shard_context: contextvars.ContextVar[Mapping[str, Shard] | None] = contextvars.ContextVar(
    "shard_context", default=None
)


@contextlib.contextmanager
def known_shards(shards: Mapping[str, Shard] | None) -> Iterator[None]:
    """Tell links which shards their arrays are, by weight names; None tells nothing."""
    token = _shard_context.set(shards)
    try:
        yield
    finally:
        _shard_context.reset(token)


def manual_axes() -> tuple[str, ...]:
    """Return the manual mesh axes of the surrounding `jax.shard_map`."""
    return tuple(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def varying(x) -> frozenset[str]:
    """Return the mesh axes over which an array varies, if JAX tracks them."""
    kind: Traced = jax.typeof(x)
    # Before JAX 0.10 it is called so.
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def vary_together(arrays: Sequence[Array]) -> list[Array]:
    """Return arrays that vary over the union of their mesh axes."""
    if not manual_axes():
        return list(arrays)
    axes = frozenset[str]().union(*map(varying, arrays))
    return [_marked(x, tuple(axes - varying(x))) for x in arrays]


def _marked(x, axes: tuple[str, ...]):
    if not axes:
        return x
    if hasattr(lax, "pcast"):
        return lax.pcast(x, axes, to="varying")
    return lax.pvary(x, axes)  # pyright: ignore[reportAttributeAccessIssue]


def shard_of(spec: PartitionSpec, shape: tuple[int, ...]) -> Shard:
    """Return the shard of `shape` on this device, for a PartitionSpec.

    Axes of the mesh that are not manual here do not count: over these an array is whole.
    """
    manual, sizes = manual_axes(), jax.sharding.get_abstract_mesh().shape
    pieces, positions, all_cut = [], [], []
    for axes in (*spec, *(None,) * (len(shape) - len(spec))):
        names = axes if isinstance(axes, tuple) else (axes,)
        cut = tuple(name for name in names if name in manual)
        all_cut += [name for name in cut if sizes[name] > 1]
        pieces.append(math.prod(sizes[name] for name in cut))
        positions.append(lax.axis_index(cut).astype(jnp.uint32) if pieces[-1] > 1 else np.uint32(0))
    return Shard(tuple(shape), tuple(pieces), tuple(positions), tuple(all_cut))


def shards(
    caller: str,
    names: Sequence[str],
    values: Sequence[Array | None],
    alike: Sequence[Array | None] | None = None,
) -> list[Shard | None]:
    """Return the shard of each array, found by the weight name that ends its own; None if it is whole.

    `values` are arrays or their shapes; None where there is none. `alike` are arrays that are whole where
    these are; None: these themselves.
    """
    if not manual_axes():
        return [None] * len(names)
    rows = zip(names, values, values if alike is None else alike, strict=True)
    return [None if x is None else _shard(caller, name, x.shape, other) for name, x, other in rows]


def refuse_other_shards(
    caller: str, names: Sequence[str], found: Sequence[Shard | None], read: Callable[[int], Iterable[int]]
) -> None:
    """Refuse shards in a step that reads elements of other shards.

    `read` gives, from the number of axes of an array, the axes along which the step reads.
    """
    for name, shard in zip(names, found, strict=True):
        if shard is None:
            continue
        shard.check()
        if any(shard.pieces[axis] > 1 for axis in read(len(shard.shape))):
            raise ValueError(
                f"{caller}: inside jax.shard_map '{name}' is {list(shard.shape)} of {list(shard.whole)}, and "
                "its step reads elements of the other shards. Step under jax.jit."
            )


def refuse_other_axes(
    caller: str, names: Sequence[str], found: Sequence[Shard | None], axis_names: Sequence[str]
) -> None:
    """Refuse norms over fewer mesh axes than the axes that cut an array."""
    for name, shard in zip(names, found, strict=True):
        missing = [axis for axis in (shard.axes if shard is not None else ()) if axis not in axis_names]
        if missing:
            raise ValueError(
                f"{caller}: inside jax.shard_map '{name}' is cut over {missing}, and axis_names are "
                f"{tuple(axis_names)}: a norm would be the norm of a shard. Add {missing} to axis_names."
            )


def whole_shape(shard: Shard | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the whole array, given a shard of `shape`."""
    return shape if shard is None or shard.problem else shard.whole


def _shard(caller: str, name: str, shape: tuple[int, ...], x) -> Shard | None:
    told = _shard_context.get()
    if told is None:
        return _unknown_shard(caller, name, shape, x)
    parts = name.split("/")
    ends = ("/".join(parts[k:]) for k in range(len(parts) + 1))
    shard = next((told[end] for end in ends if end in told), None)
    if shard is None or all(n == 1 for n in shard.pieces):
        return None
    if shard.shape != shape:
        raise ValueError(
            f"{caller}: inside jax.shard_map '{name}' is {list(shape)} beside a weight that is "
            f"{list(shard.shape)} of {list(shard.whole)}; how it is cut is not known. Step under jax.jit."
        )
    return shard


def _unknown_shard(caller: str, name: str, shape: tuple[int, ...], x) -> Shard | None:
    """Return None for an array that is whole, else a shard that raises when it is used."""
    manual = manual_axes()
    if isinstance(x, jax.Array) and varying(lax.axis_index(manual)) and not varying(x):
        return None
    problem = (
        f"{caller}: inside jax.shard_map over {manual} '{name}' may be a shard, whose step needs random "
        "words, blocks or elements of the whole array. Say how weights are cut: in_shard_map(tx, specs), or "
        "in_shard_map(tx, PartitionSpec()) where every device has them whole, as in jax.pmap."
    )
    return Shard(tuple(shape), (1,) * len(shape), (np.uint32(0),) * len(shape), problem=problem)
