"""The codes of state formats by name; those in units of another moment are in `fine_codes.py`.

Contract: F5 to F10.
"""

from halfstep_torch.numbers.float_formats import FLOAT_FORMATS
from halfstep_torch.storage.base_codes import Codes
from halfstep_torch.storage.float_codes import INT8, PatternCodes, PlainCodes, SignedCodes
from halfstep_torch.storage.table_codes import TableCodes
from halfstep_torch.storage.tables import TABLES
from halfstep_torch.storage.unsigned_codes import UnsignedCodes
from halfstep_torch.storage.unsigned_floats import UNSIGNED_FLOATS

PLAIN_CODES: dict[str, Codes] = {
    "float32": PlainCodes("float32"),
    "bfloat16": PlainCodes("bfloat16"),
    "float16": PlainCodes("float16"),
    "ufloat8_e6m2": UnsignedCodes(UNSIGNED_FLOATS["ufloat8_e6m2"]),
}
SCALED_CODES: dict[str, Codes] = {
    "float16": SignedCodes(FLOAT_FORMATS["float16"], 15, 0x1FFF, 40),
    "float8_e4m3fn": SignedCodes(FLOAT_FORMATS["float8_e4m3fn"], 8, 0x1FFFFF, 18),
    "float8_e5m2": SignedCodes(FLOAT_FORMATS["float8_e5m2"], 15, 0x1FFFFF, 32),
    "float8_e3m4": PatternCodes(FLOAT_FORMATS["float8_e3m4"], 3, 0x7FFFF, 10),
    "int8": SignedCodes(INT8, 6, 0x1FFFF, 7),
    "ufloat8_e5m3": UnsignedCodes(UNSIGNED_FLOATS["ufloat8_e5m3"]),
    "ufloat8_e4m4": UnsignedCodes(UNSIGNED_FLOATS["ufloat8_e4m4"]),
}
"""Codes that `scaled` takes; F5 has the constants: exponent of the largest code, carry and lowest byte."""
CODEBOOK_CODES: dict[str, Codes] = {name: TableCodes(table) for name, table in TABLES.items()}
"""Codes that `codebook` takes."""
