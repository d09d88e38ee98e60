"""Floats with a sign. Contract: F3, F5."""

from halfstep.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep.storage.base_codes import Codes, scales_of


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
        return cls(fmt.name, fmt, half_gap(fmt), **scales_of(fmt))


class FixedCodes(Codes):
    """Floats of 8 bits, kept as patterns, under the scale of a block with the maximum 7.5: none is stored."""

    @classmethod
    def of(cls, fmt: FloatFormat) -> "FixedCodes":
        """Return the codes of a format."""
        return cls("uint8", fmt, half_gap(fmt), for_second_moments=False)


def half_gap(fmt: FloatFormat) -> float:
    """Return half of the largest relative gap between normal numbers."""
    return 2.0 ** -(fmt.mantissa_bits + 1)
