"""The dtypes of moments: a plain one, one with block scales, or codes of a table.

Contract: F1, F4 to F11.
"""

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from halfstep.did_you_mean import did_you_mean, listed
from halfstep.hyperparameters import Scalar
from halfstep.storage.blocks import BlockSize
from halfstep.storage.codes import CODEBOOK_CODES, CODES, PLAIN_CODES, SCALED_CODES
from halfstep.storage.formats import DType, Format

SCALED_DTYPES = tuple(SCALED_CODES)
TABLE_NAMES = tuple(CODEBOOK_CODES)


def scaled(
    dtype: DType,
    block_size: BlockSize = 128,
    min_size: int = 4096,
    min_ndim: int = 2,
    *,
    scale: str = "power_of_two",
) -> Format:
    """Return the format of codes of `dtype` with one power-of-two scale per block, in one byte.

    Let s be the smallest integer for which the block's largest magnitude, divided by 2^s, is a number of
    `dtype`. x is stored as s and the codes of x / 2^s, rounded once. Scaling rounds nothing. 8-bit codes with
    blocks of 128 take 1.008 bytes per element. They save memory, not time: block maxima take a separate pass
    over the array.

    Blocks lie along the fewest trailing axes with a product of at least `block_size`; the last block of a run
    may be short. So sharding along leading axes keeps blocks whole.

    Args:
        dtype: "float16", "float8_e4m3fn" or "int8". Second moments alone also have "ufloat8_e5m3", a float
            of 8 bits without a sign, and "uroot8", the 8-bit choice for `nu`. "uroot8" holds eighth powers of
            evenly spaced numbers, with steps of 3 % at the top, over 43 binades.
        block_size: elements of a block; "row" for one block per last-axis row (inaccurate where a row spans
            many binades), None for a single block.
        min_size: arrays of fewer elements are kept in float32.
        min_ndim: so are arrays of fewer axes.
        scale: "power_of_two", or, for int8, "fine": a byte with three significant bits. Then a block uses at
            least four fifths of its codes, where it may use only half under a power of two.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if there is no such format, block size or scale.

    Example:
        >>> scaled("float8_e4m3fn").scale_shape((64, 256))
        (64, 2)

    Source: block-wise scales, T. Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022,
    section 2.1; powers of two, one byte and the unsigned formats are ours (contract F4 to F6, F16).
    """
    name = code_name("scaled", dtype, SCALED_DTYPES)
    if name not in SCALED_DTYPES:
        raise ValueError(f"scaled: dtype={name} has no scaled format. {use_one_of(name, SCALED_DTYPES)}")
    if scale != "power_of_two" and (scale, name) != ("fine", "int8"):
        raise ValueError(
            f'scaled: scale={scale!r} is not for dtype={name}. Use "power_of_two", or "fine" for int8.'
        )
    return with_blocks("scaled", name, block_size, min_size, min_ndim, scale=scale)


def codebook(table: str, block_size: BlockSize = 128, min_size: int = 4096, min_ndim: int = 2) -> Format:
    """Return the format of codes of a table, of 8 bits, with one power-of-two scale per block.

    The tables come from bitsandbytes: sorted numbers T_0 < T_1 < ..., the last of them 1. Let s be the
    smallest integer for which the block's largest magnitude fits the table with either sign. That is up to
    2^s, or 0.993 2^s for "dynamic8", which ends short of -1.
    y = x / 2^s is rounded to a neighbour in the table and stored as that number's code, with s in one byte.
    It rounds up from T_j if

        h (T_(j+1) - T_j) < y - T_j      h from the random word, evenly spread over (0, 1); to nearest, 1/2

    so that the mean is y, to within 2^-22 of a gap. It rounds once, there; scaling rounds nothing. Blocks are
    as in `scaled`. Tables follow float32 as well as 8-bit floats do.

    | table | numbers |
    |---|---|
    | "dynamic8" | 0, 1 and +-(0.1 to 1) in seven decades: 2^i evenly spaced numbers in decade i |
    | "udynamic8" | 0, 1 and 2^(i + 1) numbers in each of seven decades, for second moments alone |

    Args:
        table: one of the above.
        block_size: elements of a block; "row" for one block per last-axis row, None for a single block.
        min_size: arrays of fewer elements are kept in float32.
        min_ndim: so are arrays of fewer axes.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if there is no such table or block size.

    Example:
        >>> codebook("dynamic8").code_shape((64, 256)), codebook("dynamic8").scale_shape((64, 256))
        ((64, 256), (64, 2))

    Source: dynamic maps, T. Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016,
    and T. Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022, section 2.2.
    Scales of one byte, stochastic rounding and the order of codes are ours (contract F8 to F10).
    """
    if not isinstance(table, str):
        raise TypeError(f"codebook: table={table!r} is not the name of a table. Use {listed(TABLE_NAMES)}.")
    if table not in TABLE_NAMES:
        raise ValueError(f"codebook: table={table!r} is not a table. {use_one_of(table, TABLE_NAMES)}")
    return with_blocks("codebook", table, block_size, min_size, min_ndim)


def as_format(caller: str, argument: str, dtype: DType) -> Format:
    """Return the `Format` of a plain state dtype; a `Format` is returned as it is."""
    if isinstance(dtype, Format):
        return dtype
    hint = 'Use "bfloat16", "float16" or "float32"; of 8 bits scaled("float8_e4m3fn"), or a recipe.'
    second = argument.startswith("nu")
    if second:
        hint = 'Use "bfloat16" or "float32"; of 8 bits scaled("ufloat8_e5m3"), or a recipe.'
    try:
        name = dtype_name(dtype)
    except TypeError:
        raise TypeError(f"{caller}: {argument}={dtype!r} is not a state dtype. {hint}") from None
    if name in PLAIN_CODES:
        return Format(name)
    if name in CODEBOOK_CODES:
        raise ValueError(f'{caller}: {argument}={name} is a table. Use codebook("{name}").')
    if name in SCALED_CODES:
        way_out = "ufloat8_e5m3" if second and name.startswith(("float8", "int")) else name
        raise ValueError(
            f"{caller}: {argument}={name} cannot hold a moment without a block scale. "
            f'Use scaled("{way_out}").'
        )
    known = () if name in np.sctypeDict else (*PLAIN_CODES, *SCALED_CODES, *CODEBOOK_CODES)
    signed = ("float8", "int") if second else ()
    meant = did_you_mean(name, [x for x in known if not x.startswith(signed)])
    given = repr(dtype) if isinstance(dtype, str) else name
    raise ValueError(f"{caller}: {argument}={given} is not a state dtype. {meant}{hint}")


def default_format(dtype: str) -> Format:
    """Return the format of a moment where none is asked for, by the dtype of the weights (contract F1)."""
    return Format("bfloat16" if dtype == "bfloat16" else "float32")


def dtype_name(dtype: DType) -> str:
    """Return the name of a dtype, of whatever framework; a name as it is."""
    if isinstance(dtype, str):
        return dtype
    framework, _, name = str(dtype).rpartition(".")
    if framework == "torch":
        return name
    try:
        return np.dtype(getattr(dtype, "dtype", dtype)).name
    except (
        ValueError,
        SyntaxError,
    ) as error:  # NumPy parses texts that may be a list of fields: b"0\0", b",,"
        raise TypeError(f"{dtype!r} is not a dtype") from error


def code_name(caller: str, dtype: DType, names: Iterable[str]) -> str:
    """Return the name of a dtype of codes; other values raise an error that lists the `names`."""
    try:
        return dtype_name(dtype)
    except TypeError:
        raise TypeError(f"{caller}: dtype={dtype!r} is not a dtype. Use {listed(names)}.") from None


def with_blocks(
    caller: str, name: str, block_size: Scalar, min_size: Scalar, min_ndim: Scalar, **changes: Any
) -> Format:  # fields of Format
    """Return a format with scales; refuse sizes that are none, and odd blocks of codes of 4 bits."""
    if block_size is not None and block_size != "row":
        whole = isinstance(block_size, int) and not isinstance(block_size, bool)
        if not whole or block_size < 1:
            error = ValueError if whole or isinstance(block_size, str) else TypeError
            raise error(
                f"{caller}: block_size={block_size!r} is not a block size. "
                'Use a positive integer, "row" or None.'
            )
    sizes = (_size(caller, "min_size", min_size), _size(caller, "min_ndim", min_ndim))
    fmt = Format(name, True, block_size, *sizes, **changes)
    if fmt.packed and isinstance(block_size, int) and block_size % 2:
        raise ValueError(
            f"{caller}: block_size={block_size} is odd, and codes of {name!r} are two to a byte. "
            'Use an even block_size, "row" or None.'
        )
    return fmt


def _size(caller: str, name: str, value: Scalar) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = None
    if size is None or isinstance(value, bool):
        raise TypeError(f"{caller}: {name}={value!r} is not an integer. Use an integer >= 0.")
    if size < 0:
        raise ValueError(f"{caller}: {name}={size} is negative. Use an integer >= 0.")
    return size


def use_one_of(name: str, names: Iterable[str]) -> str:
    """Return the nearest name to one that is neither a dtype nor a format, then all names.

    Example:
        >>> use_one_of("unit8", ["int8", "uroot8"]), use_one_of("int4", ["int8", "uroot8"])
        ('Did you mean "int8"? Use "int8" or "uroot8".', 'Use "int8" or "uroot8".')
    """
    is_known = hasattr(np, name) or any(name in codes for codes in CODES.values())
    return f"{'' if is_known else did_you_mean(name, names)}Use {listed(names)}."
