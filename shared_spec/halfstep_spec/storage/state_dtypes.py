"""The dtypes of moments: a plain one, one with block scales, or codes of a table.

Contract: F1, F4 to F11.
"""

from halfstep_spec.storage.codes import CODEBOOK_CODES, PLAIN_CODES, SCALED_CODES
from halfstep_spec.storage.formats import Format


def as_format(dtype: "str | Format") -> Format:
    """Return the `Format` of a plain state dtype; a `Format` is returned as it is."""
    if isinstance(dtype, Format):
        return dtype
    if dtype not in PLAIN_CODES:
        raise ValueError(
            f"as_format: dtype={dtype} cannot hold a state without a scale. Use one of "
            f"{', '.join(PLAIN_CODES)}, or scaled(...)."
        )
    return Format(dtype)


def scaled(
    dtype: str,
    block_size: int | str | None = 128,
    min_size: int = 4096,
    min_ndim: int = 2,
    scale: str = "power_of_two",
) -> Format:
    """Return the format of codes of `dtype` with one scale per block: a power of two, or a fine one."""
    if dtype not in SCALED_CODES:
        raise ValueError(f"scaled: dtype={dtype} is none of {', '.join(SCALED_CODES)}.")
    if scale != "power_of_two" and (scale, dtype) != ("fine", "int8"):
        raise ValueError(
            f'scaled: scale={scale!r} is not for dtype={dtype}. Use "power_of_two", or "fine" for int8.'
        )
    return Format(dtype, True, block_size, min_size, min_ndim, scale)


def codebook(
    table: str, block_size: int | str | None = 128, min_size: int = 4096, min_ndim: int = 2
) -> Format:
    """Return the format of codes of a table with one power-of-two scale per block."""
    if table not in CODEBOOK_CODES:
        raise ValueError(f"codebook: table={table!r} is none of {', '.join(CODEBOOK_CODES)}.")
    return Format(table, True, block_size, min_size, min_ndim)
