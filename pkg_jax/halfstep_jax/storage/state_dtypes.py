"""What a moment's dtype may be, for JAX: the formats of `halfstep`, which encode and decode its arrays."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import jax

from halfstep.storage import formats
from halfstep.storage import state_dtypes as shared
from halfstep_jax.storage.formats import Format

StateDType = jax.typing.DTypeLike | formats.Format
"""What says how a moment is stored."""

_P = ParamSpec("_P")


def making_formats(function: Callable[_P, formats.Format]) -> Callable[_P, Format]:
    """Return a function that makes formats of JAX."""

    @functools.wraps(function)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> Format:
        return Format.of(function(*args, **kwargs))

    return make


scaled = making_formats(shared.scaled)
codebook = making_formats(shared.codebook)


def as_format(caller: str, argument: str, dtype: Any) -> Format:
    """Return the format of a plain state dtype, or the format itself: see `halfstep`."""
    return Format.of(shared.as_format(caller, argument, dtype))


def default_format(p: Any) -> Format:
    """Return the format of a moment of the weight `p` where none is asked for (contract F1)."""
    return Format.of(shared.default_format(p.dtype.name))
