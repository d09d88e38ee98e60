"""A first moment in units of the root of the second one: its formats, and the bound that lets them be.

Contract: F12, F13, F18. Adam divides a first moment by the root of the second: in that unit it is bounded,
and so needs no scale.
"""

import ast
import math

import numpy as np

from halfstep.did_you_mean import did_you_mean
from halfstep.storage.blocks import BlockSize
from halfstep.storage.codes import FINE_CODES, FIXED_CODES
from halfstep.storage.formats import DType, Format
from halfstep.storage.state_dtypes import code_name, codebook, scaled, use_one_of, with_blocks

LARGEST_BOUND = 7.5
"""The largest number of codes without a scale."""
_LARGEST_SCALE = np.float32(1.5 * 2.0**13)  # of the byte 254


def relative(dtype: DType, block_size: BlockSize = None, min_size: int = 4096, min_ndim: int = 2) -> Format:
    """Return the format of a first moment in units of the root of the second one.

    With v the second moment as it is stored in the same step, the rounded and stored value is

        z = m / sqrt(v),   |z| <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)),   7.27 at b1 = 0.9, b2 = 0.999

    and a step continues with z sqrt(v). The update is proportional to z. So an error of z is an equal
    error of the update, whether gradients are large or small. Because of the bound 8 bits need no scale at
    all. Rounds once, z; the quotient, the root and the product are float32's.

    With "mulaw8" the unit is the power of two below sqrt(v), which takes no root and no quotient. It comes
    from the codes of nu_dtype="uroot4_e4m4"; without these "mulaw8" is refused.

    Args:
        dtype: without a block size "float8_e3m4" (in uint8) or "mulaw8". "mulaw8"
            has a sign and 128 magnitudes, floats of 7 bits less 1/16, as in the mu-law of telephones. With a
            block size "int8" or "int4". "int4" has two codes in a byte and a dither: one random number per
            block and step is added before rounding and subtracted after it. Numbers below 1/16 of a unit are
            stored as zero.
        block_size: None for no scales, also for small arrays; else as in `scaled`, elements of a block or
            "row". The scales have three significant bits.
        min_size: with scales, arrays of fewer elements are kept in float32.
        min_ndim: so are arrays of fewer axes.

    Returns:
        A `Format`, for `mu_dtype=` of rules with a second moment, such as AdamW and LAMB.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if there is no such format or block size. From a rule, if it has no second moment, or if
            without scales its rates have no bound below 7.5.

    Example:
        >>> relative("int4", 32).code_shape((64, 256))
        (64, 128)

    Source: ours (contract F12 to F15, F18); the bound is Cauchy's and Schwarz's inequality. Subtractive
    dither: L. Roberts, "Picture coding using pseudo-random noise", IRE Trans. Inf. Theory 8(2), 1962. Mu-law:
    ITU-T recommendation G.711.
    """
    names = FIXED_CODES if block_size is None else FINE_CODES
    name = code_name("relative", dtype, names)
    if name not in names:
        way_out = f'Use relative("{name}", 32).' if name in FINE_CODES else use_one_of(name, names)
        raise ValueError(f"relative: dtype={name} with block_size={block_size} is not a format. {way_out}")
    if block_size is None:
        return Format(name, relative=True)
    return with_blocks("relative", name, block_size, min_size, min_ndim, scale="fine", relative=True)


def from_description(description: dict) -> Format:
    """Return the format of a `Format.description` that is no plain name."""
    if "relative" in description:
        sizes = {key: value for key, value in description.items() if key != "relative"}
        return relative(description["relative"], **sizes)
    return codebook(**description) if "table" in description else scaled(**description)


def from_text(caller: str, argument: str, dtype: DType) -> DType:
    """Return the format that a text such as 'scaled("int8", 64)' prints; anything else as it is.

    Only a name and literals are read: nothing is called but `scaled`, `codebook` and `relative`.

    Example:
        >>> from_text("adamw", "mu_dtype", 'relative("int4", 32)').text
        'relative int4, blocks of 32, fine scales'
    """
    if not isinstance(dtype, str) or "(" not in dtype:
        return dtype
    makers = {"scaled": scaled, "codebook": codebook, "relative": relative}
    wrong = f"{caller}: {argument}={dtype!r} is not a format."
    way_out = "Use the text of a call with literals, such as 'scaled(\"int8\")'."
    try:
        call = ast.parse(dtype.strip(), mode="eval").body
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        name, args = call.func.id, [ast.literal_eval(x) for x in call.args]
        named = {str(x.arg): ast.literal_eval(x.value) for x in call.keywords}
    except (SyntaxError, AssertionError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"{wrong} {way_out}") from None
    if name not in makers:
        raise ValueError(f"{wrong} {did_you_mean(name, makers)}{way_out}")
    try:
        return makers[name](*args, **named)
    except TypeError as error:
        raise ValueError(f"{wrong} {error}") from None


def largest(fmt: Format) -> float:
    """Return the largest float32 number that a fine scale holds: larger numbers are past the largest scale.

    Example:
        >>> largest(relative("int8", 128))
        1560576.0
    """
    return _LARGEST[fmt.dtype]


def _largest_under(scale: np.float32, most: float) -> float:
    inverse = np.float32(1 / most)
    number = np.float32(scale / inverse)
    while number * inverse > scale:
        number = np.nextafter(number, np.float32(0))
    return float(number)


_LARGEST = {name: _largest_under(_LARGEST_SCALE, codes.numbers.max) for name, codes in FINE_CODES.items()}


def bound(b1: float, b2: float) -> float:
    """Return the largest |z| of averages of g and g g, by Cauchy and Schwarz; infinity if there is none.

    Example:
        >>> round(bound(0.9, 0.999), 2)
        7.27
    """
    if b1 * b1 >= b2:
        return math.inf
    return (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2))


def rates_within(b2: float) -> tuple[float, float] | None:
    """Return the least and the largest b1, in hundredths, that codes without a scale take; None if none.

    Example:
        >>> rates_within(0.999), rates_within(0.9999), rates_within(0.99999)
        ((0.9, 0.99), (0.99, 0.99), None)
    """
    fits = [n / 100 for n in range(100) if bound(n / 100, b2) <= LARGEST_BOUND]
    return (fits[0], fits[-1]) if fits else None
