"""What a moment's dtype may be: a plain one, one with block scales, or codes of a table.

Contract: F1, F4 to F11.
"""

from typing import Any

import torch

from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.storage.codes import CODEBOOK_CODES, PLAIN_CODES, SCALED_CODES
from halfstep_torch.storage.formats import Format

_LISTED_TABLES = '"dynamic8", "udynamic8", "dynamic4", "udynamic4" or "ulinear4"'
DType = str | torch.dtype | Format | None
"""What `mu_dtype` and its like take."""


def scaled(
    dtype: Any,
    block_size: int | str | None = 128,
    min_size: int = 4096,
    min_ndim: int = 2,
    *,
    scale: str = "power_of_two",
) -> Format:
    """Return the format of codes of `dtype` with one power-of-two scale per block.

    A block's scale is the smallest power of two under which its largest finite magnitude fits, kept as one
    byte; dividing by it is exact, so values are rounded once, to the codes. Blocks lie along the fewest
    trailing axes whose product reaches `block_size`; the last one of a run may be short.

    State of 8 bits saves memory, not time: encoding costs more than it saves in bytes moved.

    Args:
        dtype: of the codes: "float16", "float8_e4m3fn", "float8_e5m2", "int8", a torch dtype of these,
            "float8_e3m4" (in uint8: 4 bits of mantissa, 10 binades, for the `mu` of blocks whose values lie
            close together) or, for a second moment alone, "ufloat8_e5m3" (the best `nu` in one byte) or
            "ufloat8_e4m4".
        block_size: elements of a block, "row" (one block per last-axis row) or None (a single block).
        min_size: arrays of fewer elements are kept in float32.
        min_ndim: so are arrays of fewer axes.
        scale: "power_of_two", or, for int8, "fine": a byte with three significant bits, so that a block fills
            its codes to four fifths at least, in place of a half.

    Returns:
        A format, for `mu_dtype` and `nu_dtype`.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if there is no such format, or a size is out of range.

    Example:
        >>> scaled("float8_e4m3fn").scale_shape((64, 256))
        (64, 2)

    Source: ours. Contract F4 to F7.
    """
    name = dtype_name(dtype)
    if name not in SCALED_CODES:
        raise ValueError(
            f'scaled: dtype={name} has no scaled format. Use "float16", "float8_e4m3fn", "float8_e5m2", '
            '"float8_e3m4", "int8", "ufloat8_e5m3" or "ufloat8_e4m4".'
        )
    if scale != "power_of_two" and (scale, name) != ("fine", "int8"):
        raise ValueError(
            f'scaled: scale={scale!r} is not for dtype={name}. Use "power_of_two", or "fine" for int8.'
        )
    return with_blocks("scaled", name, block_size, min_size, min_ndim, scale)


def codebook(
    table: str, block_size: int | str | None = 128, min_size: int = 4096, min_ndim: int = 2
) -> Format:
    """Return the format of codes of a table, of 8 or 4 bits, with one power-of-two scale per block.

    The tables are those of bitsandbytes and of the 4-bit AdamW of Li et al.: sorted numbers T_0 < T_1 < ...,
    at most 1. With s the smallest integer for which the block's largest magnitude fits the table with either
    sign (up to 2^s; in a signed table, which ends short of -1, to 0.993 2^s, of "dynamic4" 0.8875 2^s),
    y = x / 2^s is rounded to a neighbour in the table, T_j below it or the one above, and stored as that
    number's code, s in one byte. It rounds up if

        h (T_(j+1) - T_j) < y - T_j      h from the random word, evenly spread over (0, 1); to nearest, 1/2

    so that the mean is y, to within 2^-22 of a gap. It rounds once, there; scaling rounds nothing. Blocks are
    those of `scaled`. 8-bit tables follow float32 as well as 8-bit floats do; 4 bits are not enough,
    least of all with nearest rounding.

    | table | bits | numbers |
    |---|--:|---|
    | "dynamic8" | 8 | 0, 1 and +-(0.1 to 1) in seven decades: 2^i evenly spaced numbers in decade i |
    | "udynamic8" | 8 | 0, 1 and 2^(i + 1) numbers in each of seven decades, for second moments alone |
    | "dynamic4" | 4 | 0, 1 and +-2^i numbers in each of three decades |
    | "udynamic4" | 4 | 0, 1 and 2^(i + 1) numbers in each of three decades, for second moments alone |
    | "ulinear4" | 4 | 1/16, 2/16, ..., 1, for second moments alone: the usual choice, as it has no zero |

    4-bit codes are packed two per byte along the run; an odd run is padded: the state
    array has the shape (leading axes, bytes of a run); of an 8-bit format that of the parameter.

    Args:
        table: one of the above.
        block_size: elements of a block, even for codes of 4 bits; "row" (one block per last-axis row) or None
            (a single block).
        min_size: arrays of fewer elements are kept in float32.
        min_ndim: so are arrays of fewer axes.

    Returns:
        A format, for `mu_dtype` and `nu_dtype`.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if there is no such table, or a size is out of range.

    Example:
        >>> codebook("dynamic4").code_shape((64, 256)), codebook("dynamic4").scale_shape((64, 256))
        ((64, 128), (64, 2))

    Source: dynamic maps, T. Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016,
    and T. Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022, section 2.2; 4 bits and
    "ulinear4", B. Li, J. Chen, J. Zhu, "Memory efficient optimizers with 4-bit states", NeurIPS 2023
    (arXiv:2309.01507). Scales of one byte, stochastic rounding and the order of codes are ours. Contract F8
    to F11.
    """
    use = f"Use {_LISTED_TABLES}."
    if not isinstance(table, str):
        raise TypeError(f"codebook: table={table!r} is not the name of a table. {use}")
    if table not in CODEBOOK_CODES:
        raise ValueError(f"codebook: table={table!r} is not a table. {use}")
    return with_blocks("codebook", table, block_size, min_size, min_ndim)


def with_blocks(
    caller: str,
    name: str,
    block_size: Any,
    min_size: Any,
    min_ndim: Any,
    scale: str = "power_of_two",
    relative: bool = False,
) -> Format:
    """Return a format with scales; raise TypeError or ValueError for sizes that are none."""
    if block_size is not None and block_size != "row":
        problem = f"{caller}: block_size={block_size!r} is not a block size. "
        hint = 'Use a positive integer, "row" or None.'
        if isinstance(block_size, bool) or not isinstance(block_size, (int, str)):
            raise TypeError(problem + hint)
        if isinstance(block_size, str) or block_size < 1:
            raise ValueError(problem + hint)
    for argument, value in (("min_size", min_size), ("min_ndim", min_ndim)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{caller}: {argument}={value!r} is not an integer. Use an integer >= 0.")
        if value < 0:
            raise ValueError(f"{caller}: {argument}={value} is negative. Use an integer >= 0.")
    fmt = Format(name, True, block_size, min_size, min_ndim, scale=scale, relative=relative)
    if fmt.codes.packed and isinstance(block_size, int) and block_size % 2:
        raise ValueError(
            f"{caller}: block_size={block_size} is odd, and codes of {name!r} stand two to a byte. "
            'Use an even block_size, "row" or None.'
        )
    return fmt


def as_format(caller: str, argument: str, dtype: Any, *, signed: bool = False) -> Format | None:
    """Return the `Format` that an argument asks for, or None.

    Args:
        caller: whose argument it is, for the message.
        argument: which one.
        dtype: a `Format`, "bfloat16", torch.bfloat16, ..., a `Format.description`, or None.
        signed: whether what is stored has a sign.

    Raises:
        ValueError: if no moment can be stored so.
    """
    if dtype is None:
        return None
    fmt = _described(dtype) if isinstance(dtype, dict) else dtype
    name = fmt.name if isinstance(fmt, Format) else dtype_name(fmt)
    use = 'Use "bfloat16", "float16" or "float32".'
    if not isinstance(fmt, Format) and name not in PLAIN_CODES:
        if name in CODEBOOK_CODES:
            raise ValueError(f'{caller}: {argument}={name} is a table. Use codebook("{name}").')
        if name.startswith(("float8", "ufloat8")):
            raise ValueError(f"{caller}: {argument}={name} cannot hold a moment without a block scale. {use}")
        raise ValueError(f"{caller}: {argument}={name} is not a state dtype. {use}")
    fmt = fmt if isinstance(fmt, Format) else Format(name)
    if signed and not fmt.codes.signed:
        raise ValueError(
            f"{caller}: {argument}={name} has no sign. "
            f"Use it for nu, and a signed format for {argument.removesuffix('_dtype')}."
        )
    return fmt


def _described(description: dict[str, Any]) -> Format:
    """Return the format that a `Format.description` says."""
    if "relative" in description:
        return Format(**_relative(description))
    return codebook(**description) if "table" in description else scaled(**description)


def default_format(param_dtype: torch.dtype) -> Format:
    """Return the format where none is asked for: bfloat16 for bfloat16 params, else float32 (contract F1)."""
    return Format("bfloat16" if param_dtype == torch.bfloat16 else "float32")


def _relative(description: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a relative format."""
    own = {"name": description["relative"], "relative": True}
    if description["block_size"] is None:
        return own
    sizes = {name: description[name] for name in ("block_size", "min_size", "min_ndim")}
    return own | sizes | {"scaled": True, "scale": "fine"}
