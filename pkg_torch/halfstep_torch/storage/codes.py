"""The codes of all state formats, on tensors."""

import torch

from halfstep.storage import codes, floats, unsigned_halves
from halfstep.storage.base_codes import Codes as SharedCodes
from halfstep_torch.storage.base_codes import Codes
from halfstep_torch.storage.float_codes import (
    FixedCodes,
    PatternCodes,
    PlainCodes,
    SignedCodes,
    UnsignedHalfCodes,
)

# Codes with arithmetic of torch's own.
_OWN: dict[type[SharedCodes], type[Codes]] = {
    floats.PlainCodes: PlainCodes,
    floats.SignedCodes: SignedCodes,
    floats.FixedCodes: FixedCodes,
    unsigned_halves.UnsignedHalfCodes: UnsignedHalfCodes,
}


def _on_tensors(entry: SharedCodes) -> Codes:
    known = hasattr(torch, entry.dtype) or entry.dtype == "uint16"
    return (_OWN.get(type(entry), Codes) if known else PatternCodes)(entry)


CODES = {
    family: {name: _on_tensors(entry) for name, entry in entries.items()}
    for family, entries in codes.CODES.items()
}
"""Codes by the family of the format, and by name."""
