"""The dtypes of moments in JAX: the formats of `halfstep`, which encode and decode its arrays."""

import jax

from halfstep.storage import formats
from halfstep.storage import state_dtypes as shared
from halfstep.storage.formats import DType
from halfstep.storage.relative import from_text
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.storage.formats import Format

StateDType = jax.typing.DTypeLike | formats.Format
"""The format of a stored moment."""

scaled = formats.returning(Format, shared.scaled)
codebook = formats.returning(Format, shared.codebook)


def as_format(caller: str, argument: str, dtype: DType) -> Format:
    """Return the format of a plain state dtype, or the format itself: see `halfstep`."""
    return Format.of(shared.as_format(caller, argument, from_text(caller, argument, dtype)))


def default_format(p: Tree) -> Format:
    """Return the format of a moment of the weight `p` where none is asked for (contract F1)."""
    return Format.of(shared.default_format(p.dtype.name))
