"""The formats of moments in torch: the formats of `halfstep`, on tensors."""

import torch

from halfstep.storage import formats
from halfstep.storage import state_dtypes as shared
from halfstep.storage.relative import from_description, from_text
from halfstep_torch.storage.formats import Format

DType = str | torch.dtype | formats.Format | None
"""Value of `mu_dtype` and `nu_dtype`."""

scaled = formats.returning(Format, shared.scaled)
codebook = formats.returning(Format, shared.codebook)


def as_format(caller: str, argument: str, dtype: DType) -> Format | None:
    """Return the format of an argument, or None: see `halfstep`."""
    if dtype is None:
        return None
    if isinstance(dtype, dict):
        return Format.of(from_description(dtype))
    return Format.of(shared.as_format(caller, argument, from_text(caller, argument, dtype)))
