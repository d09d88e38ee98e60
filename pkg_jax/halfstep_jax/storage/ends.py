"""The number of second moments at the ends of their codes, and of gradients outside. Contract: F16, F17."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from halfstep.diagnosis import Ends, end_codes, limits
from halfstep_jax.leaf_calls import Tree


def count_at_ends(second: str, codes: jax.Array, first: jax.Array) -> tuple[Tree, Tree]:
    """Return the number of elements at the smallest and the largest number of the codes, 0 for no such end.

    At the smallest, only elements with a first moment other than zero count: others have had no gradient yet.

    Args:
        second: the text of the second moment's format.
        codes: of the second moment.
        first: codes of the first, or its numbers.
    """
    ends = end_codes(second)
    if ends is None:
        return 0, 0
    lowest, highest = ends
    moves = _nonzero(first, codes.size)
    low = 0 if moves.size != codes.size else ((codes.reshape(-1) == lowest) & moves.reshape(-1)).sum()
    return low, 0 if highest is None else (codes == highest).sum()


def count_outside(grad: jax.Array, dtype: str) -> Ends:
    """Return the numbers of gradients whose squares are below and above a format, and of those not zero.

    Args:
        grad: the gradients of a weight.
        dtype: of a second moment without scales.
    """
    lowest, most = limits(dtype)
    size = jnp.abs(grad)
    low, high = ((size > 0) & (size < lowest)).sum(), (size > most).sum()
    return int(low), int(high), int((size > 0).sum())


def moment_pairs(
    by_path: Mapping[str, jax.Array], pairs: Mapping[str, str]
) -> Iterator[tuple[str, str, jax.Array, jax.Array]]:
    """Yield of a state weight, name, second moment and first moment, as they are stored.

    Args:
        by_path: the arrays of the state.
        pairs: the names of second moments, and of the first moments beside them.
    """
    for path, x in by_path.items():
        parts = path.split("/")
        for second, first in pairs.items():
            other = by_path.get("/".join(first if part == second else part for part in parts))
            if second in parts and other is not None:
                yield "/".join(parts[parts.index(second) + 1 :]), second, x, other


def _nonzero(codes: jax.Array, size: int) -> jax.Array:
    """Return where a signed moment of `size` elements is not zero, by its codes."""
    if codes.size < size:
        return jnp.stack([codes & 15, codes >> 4], -1) != 0
    if codes.dtype.itemsize > 1:
        return codes != 0
    return (jax.lax.bitcast_convert_type(codes, jnp.uint8) & 127) != 0
