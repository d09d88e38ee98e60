"""The rounding error of a weight, and the weight to which it belongs. Contract: P4, P7."""

from halfstep.arrays import Array, Arrays
from halfstep.float_formats import FLOAT_FORMATS

_INFINITY = 0x7F800000


def compensation_of(xp: Arrays, c: Array, p: Array, dtype: str) -> Array:
    """Return the compensation c, or 0 where |c| is above half a unit in the last place of p.

    Rounding p never loses more: there p was set since, and c is the error of the weight before.

    Args:
        xp: of the framework.
        c: float32.
        p: the weights, float32 numbers of `dtype`.
        dtype: of the weights: "bfloat16" or "float16".
    """
    fmt = FLOAT_FORMATS[dtype]
    # 2^(M + 1) half units: the power of two of p, M the bits of its mantissa.
    power = xp.clip(xp.floats(xp.bits(p) & _INFINITY), low=2.0**fmt.min_exponent)
    return xp.where(abs(c) * 2.0 ** (fmt.mantissa_bits + 1) <= power, c, 0.0)


def compensation_of_step(xp: Arrays, c: Array, p: Array, u: Array, dtype: str) -> Array:
    """Return the compensation c that is added to u, or 0: as far as it is of the lesser of p and 2 (p + u).

    Where an update takes a weight to zero or near it, as links do that keep weights within bounds, c would
    carry it past zero.
    """
    return compensation_of(xp, c, xp.clip(abs(p), high=abs(p + u) * 2.0), dtype)
