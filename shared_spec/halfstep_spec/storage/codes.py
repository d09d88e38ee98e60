"""The codes of state formats by name; codes in units of another moment are in `relative_codes.py`.

Contract: F5 to F10, F16, F17, F21.
"""

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS
from halfstep_spec.storage.base_codes import Codes
from halfstep_spec.storage.float_codes import IntegerCodes, PlainCodes, SignedCodes
from halfstep_spec.storage.fourth_root_codes import FourthRootCodes
from halfstep_spec.storage.root_codes import RootCodes
from halfstep_spec.storage.table_codes import TableCodes
from halfstep_spec.storage.tables import TABLES
from halfstep_spec.storage.unsigned_codes import UnsignedCodes
from halfstep_spec.storage.unsigned_floats import E5M3
from halfstep_spec.storage.unsigned_halves import UnsignedHalfCodes

PLAIN_CODES: dict[str, Codes] = {
    "float32": PlainCodes(FLOAT_FORMATS["float32"]),
    "bfloat16": PlainCodes(FLOAT_FORMATS["bfloat16"]),
    "float16": PlainCodes(FLOAT_FORMATS["float16"]),
    "ufloat16_e7m9": UnsignedHalfCodes(),
    "uroot4_e4m4": FourthRootCodes(),
}
"""By name: codes without a scale."""
SCALED_CODES: dict[str, Codes] = {
    "float16": SignedCodes(FLOAT_FORMATS["float16"]),
    "float8_e4m3fn": SignedCodes(FLOAT_FORMATS["float8_e4m3fn"]),
    "int8": IntegerCodes(),
    "ufloat8_e5m3": UnsignedCodes(E5M3),
    "uroot8": RootCodes(),
}
"""By name: codes that `scaled` takes."""
CODEBOOK_CODES: dict[str, Codes] = {name: TableCodes(table) for name, table in TABLES.items()}
"""By name: codes that `codebook` takes."""
