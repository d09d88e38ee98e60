"""The codes of all state formats, with their arithmetic."""

import torch

from halfstep.storage import codes as shared
from halfstep_torch.storage.base_codes import Codes
from halfstep_torch.storage.float_codes import IntegerCodes, PatternCodes, PlainCodes, SignedCodes
from halfstep_torch.storage.fourth_root_codes import FourthRootCodes, MuLawCodes
from halfstep_torch.storage.relative_codes import (
    DitheredCodes,
    FineIntegerCodes,
    FixedCodes,
    FixedIntegerCodes,
)
from halfstep_torch.storage.root_codes import RootCodes
from halfstep_torch.storage.table_codes import TableCodes
from halfstep_torch.storage.unsigned_codes import UnsignedCodes

_KINDS: dict[str, type[Codes]] = {
    "plain": PlainCodes,
    "signed": SignedCodes,
    "integer": IntegerCodes,
    "unsigned": UnsignedCodes,
    "root": RootCodes,
    "table": TableCodes,
    "fixed": FixedCodes,
    "fixed integer": FixedIntegerCodes,
    "fine": FineIntegerCodes,
    "dithered": DitheredCodes,
    "fourth root": FourthRootCodes,
    "mu law": MuLawCodes,
}


def _with_arithmetic(codes: shared.Codes) -> Codes:
    kind = PatternCodes if not hasattr(torch, codes.dtype) else _KINDS[codes.kind]
    return kind.of(codes)


CODES = {
    family: {name: _with_arithmetic(codes) for name, codes in entries.items()}
    for family, entries in shared.CODES.items()
}
"""By the family of the format, and by name."""
