"""What is known of codes before there is an array: the names, constants and limits of every state format.

Contract: F3, F5 to F18. The arithmetic of each kind is a framework's.
"""

import dataclasses
import math
from typing import Any, TypeVar

import numpy as np

from halfstep.float_formats import FLOAT_FORMATS, HALVES, INT4, INT8, FloatFormat
from halfstep.storage.fourth_roots import FOURTH_ROOT, MU_LAW
from halfstep.storage.tables import TABLES, Table
from halfstep.storage.unsigned_floats import UNSIGNED_FLOATS, UnsignedFloat
from halfstep.storage.unsigned_roots import UNSIGNED_ROOTS, UnsignedRoot

DEAD_ZONE = 1 / 16
"""The share of a unit up to which dithered codes store exact zero: an average that decays ends there."""
NAN_SCALE = 255
"""The scale byte of a block that holds a NaN which its codes cannot."""


@dataclasses.dataclass(frozen=True)
class Codes:
    """What codes are, and what they hold.

    Attributes:
        kind: by which arithmetic they are made: "plain", "signed", "integer", "unsigned", "root", "table",
            "fixed", "fixed integer", "fine", "dithered", "fourth root" or "mu law".
        dtype: of their arrays, as ml_dtypes calls it.
        numbers: what they stand for: a `FloatFormat`, `UnsignedFloat`, `UnsignedRoot`, `ShiftedFloat` or
            `Table`; None: float32.
        half_gap: half the largest relative gap between codes, above the subnormal range (F3); 0 for float32.
        signed: whether negative values can be stored.
        for_second_moments: whether small positive numbers are held well enough beside large numbers.
        packed: whether codes are of 4 bits, two of them kept in a byte; they are packed by who calls.
        nan_in_scale: whether a NaN marks its block, since there is no code for it.
        dithered: whether one word serves a block, and is asked for again by `decode`.
        scale_range: the lowest and the highest scale byte: no decoded value is subnormal in float32.
        carry: what takes the pattern of a maximum past the largest code to the next exponent field.
        step: what is added to that field to make the scale byte.
        exponent: of the largest code: under the scale byte s the code of 1 stands for 2^(s - 127 - exponent).
    """

    kind: str
    dtype: str
    numbers: Any
    half_gap: float
    signed: bool = True
    for_second_moments: bool = True
    packed: bool = False
    nan_in_scale: bool = False
    dithered: bool = False
    scale_range: tuple[int, int] = (0, 0)
    carry: int = 0
    step: int = 0
    exponent: int = 0

    @classmethod
    def of(cls: "type[_Codes]", codes: "Codes") -> "_Codes":
        """Return the same codes as this class, which adds their arithmetic."""
        return cls(**{field.name: getattr(codes, field.name) for field in dataclasses.fields(codes)})


_Codes = TypeVar("_Codes", bound=Codes)


def _plain(name: str) -> Codes:
    fmt = FLOAT_FORMATS.get(name)
    # Squares go down to 1e-20: that takes the exponents of float32.
    return Codes("plain", name, fmt, _half_gap(fmt) if fmt else 0.0, for_second_moments=name != "float16")


def _signed(fmt: FloatFormat) -> Codes:
    # From the byte under which the smallest code would decode to a subnormal float32.
    exponent = math.frexp(fmt.max)[1] - 1
    lowest = exponent - math.frexp(fmt.smallest)[1] + 2
    scale = {"scale_range": (lowest, 254), "carry": _carry(fmt.max), "exponent": exponent}
    return Codes("signed", fmt.name, fmt, _half_gap(fmt), **scale)


def _integer(fmt: FloatFormat) -> Codes:
    # Of all gaps the largest is below the largest code; and integers lift what is small by orders.
    changes: dict[str, Any] = {"kind": "integer", "half_gap": 0.5 / fmt.max}
    return dataclasses.replace(_signed(fmt), **changes, nan_in_scale=True, for_second_moments=False)


def _unsigned(fmt: UnsignedFloat) -> Codes:
    scaled = fmt.fixed is None
    # From the byte whose block has a normal number for its smallest.
    scale_range = (2**fmt.exponent_bits - 1, 253) if scaled else (0, 0)
    gap = _half_gap(fmt)
    return Codes("unsigned", "uint8", fmt, gap, signed=False, nan_in_scale=scaled, scale_range=scale_range)


def _root(fmt: UnsignedRoot) -> Codes:
    # As of a table: half of the smallest number is normal, and the inverse of the largest scale.
    scale_range = (3 - math.frexp(fmt.smallest)[1], 253)
    gap = fmt.largest_gap / 2
    return Codes(
        "root", "uint8", fmt, gap, signed=False, nan_in_scale=True, scale_range=scale_range, carry=_carry(1.0)
    )


def _table(table: Table) -> Codes:
    # A maximum fits on either side of zero: a signed table ends short of -1.
    fraction, exponent = math.frexp(table.shorter_end)
    return Codes(
        "table",
        "uint8",
        table,
        table.largest_gap / 2,
        signed=table.signed,
        # A sign that is always the same costs half of the numbers, and the small ones.
        for_second_moments=not table.signed,
        packed=table.bits == 4,
        nan_in_scale=True,
        # An average that decays from the smallest number passes half of it; and the inverse of the largest
        # scale is normal too.
        scale_range=(3 - math.frexp(table.smallest)[1], 253),
        carry=_carry(fraction),
        step=1 - exponent,
    )


def _fixed(kind: str, dtype: str, fmt: FloatFormat, half_gap: float) -> Codes:
    """Return codes under one scale, of a block whose largest magnitude is 7.5: none is stored."""
    return Codes(kind, dtype, fmt, half_gap, for_second_moments=False)


def _fine(kind: str, dtype: str, fmt: FloatFormat, packed: bool = False) -> Codes:
    """Return integers under a scale of three significant bits."""
    return Codes(
        kind,
        dtype,
        fmt,
        0.5 / fmt.max,
        for_second_moments=False,
        packed=packed,
        nan_in_scale=True,
        dithered=packed,
        scale_range=(1, 254),
    )


def _half_gap(fmt: FloatFormat | UnsignedFloat) -> float:
    return 2.0 ** -(fmt.mantissa_bits + 1)


def _carry(largest: float) -> int:
    return 0x7FFFFF - (int(np.float32(largest).view(np.uint32)) & 0x7FFFFF)


PLAIN_CODES = {
    **{name: _plain(name) for name in ("float32", "bfloat16", "float16")},
    "ufloat8_e6m2": _unsigned(UNSIGNED_FLOATS["ufloat8_e6m2"]),
    # A gap of a fourth root is four of its number.
    "uroot4_e4m4": Codes("fourth root", "uint8", FOURTH_ROOT, 4 * 2.0**-5, signed=False),
}
"""By name: codes without a scale, the dtypes of states."""
SCALED_CODES = {
    **{name: _signed(fmt) for name, fmt in FLOAT_FORMATS.items() if name != "bfloat16"},
    "int8": _integer(INT8),
    **{name: _unsigned(UNSIGNED_FLOATS[name]) for name in ("ufloat8_e5m3", "ufloat8_e4m4")},
    **{name: _root(fmt) for name, fmt in UNSIGNED_ROOTS.items()},
}
"""Those that `scaled` takes."""
CODEBOOK_CODES = {name: _table(table) for name, table in TABLES.items()}
"""Those that `codebook` takes."""
FIXED_CODES = {
    "float8_e3m4": _fixed("fixed", "uint8", HALVES, _half_gap(HALVES)),
    "int8": _fixed("fixed integer", "int8", INT8, 0.5 / INT8.max),
    "mulaw8": Codes("mu law", "uint8", MU_LAW, 2.0**-5, for_second_moments=False),
}
"""Those that `relative` takes without a block size."""
FINE_CODES = {"int8": _fine("fine", "int8", INT8), "int4": _fine("dithered", "uint8", INT4, packed=True)}
"""Those under a fine scale."""
CODES = {
    "plain": PLAIN_CODES,
    "scaled": {**SCALED_CODES, **CODEBOOK_CODES},
    "fixed": FIXED_CODES,
    "fine": FINE_CODES,
}
"""All codes by their family (`Format.family`), and name."""
