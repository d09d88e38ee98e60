"""Floats with a sign, and integers as floats that are all subnormal. Contract: F3, F5."""

import math

from halfstep.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep.storage.base_codes import Codes, carry_past


class PlainCodes(Codes):
    """float32, bfloat16 or float16, with no scale."""

    @classmethod
    def of(cls, name: str) -> "PlainCodes":
        """Return the codes of a dtype."""
        fmt = FLOAT_FORMATS.get(name)
        # Squares go down to 1e-20: that takes the exponents of float32.
        return cls(name, fmt, half_gap(fmt) if fmt else 0.0, for_second_moments=name != "float16")


class SignedCodes(Codes):
    """Floats with a sign: a code y stands for y 2^(byte - 127 - e), e the exponent of the largest code."""

    @classmethod
    def of(cls, fmt: FloatFormat) -> "SignedCodes":
        """Return the codes of a format."""
        return cls(fmt.name, fmt, half_gap(fmt), **_scales(fmt))


class IntegerCodes(SignedCodes):
    """Integers, floats with the quantum 1, which have one zero and no NaN."""

    @classmethod
    def of(cls, fmt: FloatFormat) -> "IntegerCodes":
        """Return the codes of a format."""
        # Of all gaps the largest is below the largest code; and integers lift what is small by orders.
        gap = 0.5 / fmt.max
        return cls(fmt.name, fmt, gap, nan_in_scale=True, for_second_moments=False, **_scales(fmt))


class FixedCodes(Codes):
    """Floats of 8 bits, kept as patterns, under the scale of a block with the maximum 7.5: none is stored."""

    @classmethod
    def of(cls, fmt: FloatFormat) -> "FixedCodes":
        """Return the codes of a format."""
        return cls("uint8", fmt, half_gap(fmt), for_second_moments=False)


def half_gap(fmt: FloatFormat) -> float:
    """Return half of the largest relative gap between normal numbers."""
    return 2.0 ** -(fmt.mantissa_bits + 1)


def _scales(fmt: FloatFormat) -> dict:
    # From the byte under which the smallest code would decode to a subnormal float32.
    exponent = math.frexp(fmt.max)[1] - 1
    lowest = exponent - math.frexp(fmt.smallest)[1] + 2
    return {"scale_range": (lowest, 254), "carry": carry_past(fmt.max), "exponent": exponent}
