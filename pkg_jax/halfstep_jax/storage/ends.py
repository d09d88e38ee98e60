"""How many second moments stand at the ends of what their codes hold. Contract: F16, F17."""

import jax
import jax.numpy as jnp

from halfstep.diagnosis import end_codes


def count_at_ends(second: str, codes: jax.Array, first: jax.Array) -> tuple[int, int]:
    """Return how many elements stand at the smallest and at the largest number: none where nothing stops so.

    At the smallest those count whose first moment is not zero: others have had no gradient yet.

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
    low = 0 if moves.size != codes.size else int(((codes.reshape(-1) == lowest) & moves.reshape(-1)).sum())
    return low, 0 if highest is None else int((codes == highest).sum())


def _nonzero(codes: jax.Array, size: int) -> jax.Array:
    """Return where a moment with a sign, of so many elements, is not zero, by its codes."""
    if codes.size < size:
        return jnp.stack([codes & 15, codes >> 4], -1) != 0
    if codes.dtype.itemsize > 1:
        return codes != 0
    return (jax.lax.bitcast_convert_type(codes, jnp.uint8) & 127) != 0
