"""The codes of all state formats, by the functions that take them. Contract: F3, F5 to F18, F21.

A family of codes has a file of its own: names, limits and arithmetic. A line here makes it known.
"""

from halfstep.float_formats import FLOAT_FORMATS, HALVES, INT8
from halfstep.storage.base_codes import NAN_SCALE, Codes
from halfstep.storage.floats import FixedCodes, PlainCodes, SignedCodes
from halfstep.storage.fourth_roots import MULAW8, UROOT4
from halfstep.storage.integers import DEAD_ZONE, FINE_CODES, IntegerCodes
from halfstep.storage.tables import TABLES, TableCodes
from halfstep.storage.unsigned_floats import UFLOAT8
from halfstep.storage.unsigned_halves import UFLOAT16
from halfstep.storage.unsigned_roots import ROOT_CODES

__all__ = ["CODES", "DEAD_ZONE", "NAN_SCALE", "Codes"]

PLAIN_CODES: dict[str, Codes] = {
    **{name: PlainCodes.of(name) for name in ("float32", "bfloat16", "float16")},
    "ufloat16_e7m9": UFLOAT16,
    "uroot4_e4m4": UROOT4,
}
"""By name: codes without a scale, the dtypes of states."""
SCALED_CODES: dict[str, Codes] = {
    **{name: SignedCodes.of(FLOAT_FORMATS[name]) for name in ("float16", "float8_e4m3fn")},
    "int8": IntegerCodes.of(INT8),
    "ufloat8_e5m3": UFLOAT8,
    **ROOT_CODES,
}
"""The codes of `scaled`."""
CODEBOOK_CODES: dict[str, Codes] = {name: TableCodes.of(table) for name, table in TABLES.items()}
"""The codes of `codebook`."""
FIXED_CODES: dict[str, Codes] = {
    "float8_e3m4": FixedCodes.of(HALVES),
    "mulaw8": MULAW8,
}
"""The codes of `relative` without a block size."""
CODES = {
    "plain": PLAIN_CODES,
    "scaled": {**SCALED_CODES, **CODEBOOK_CODES},
    "fixed": FIXED_CODES,
    "fine": FINE_CODES,
}
"""All codes by their family (`Format.family`), and name."""
