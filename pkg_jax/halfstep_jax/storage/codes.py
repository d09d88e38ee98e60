"""The codes of all state formats, with their arithmetic."""

from halfstep.storage import codes
from halfstep_jax.storage.base_codes import Codes
from halfstep_jax.storage.float_codes import IntegerCodes, PlainCodes, SignedCodes
from halfstep_jax.storage.fourth_root_codes import FourthRootCodes, MuLawCodes
from halfstep_jax.storage.relative_codes import DitheredCodes, FineIntegerCodes, FixedCodes, FixedIntegerCodes
from halfstep_jax.storage.root_codes import RootCodes
from halfstep_jax.storage.table_codes import TableCodes
from halfstep_jax.storage.unsigned_codes import UnsignedCodes

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
CODES = {
    family: {name: _KINDS[entry.kind].of(entry) for name, entry in entries.items()}
    for family, entries in codes.CODES.items()
}
"""By the family of the format, and by name."""
