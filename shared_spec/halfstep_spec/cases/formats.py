"""State formats: every way to store an array, on blocks chosen for their extremes."""

import numpy as np

from halfstep_spec.cases.inputs import patterns, reals
from halfstep_spec.storage.codes import CODEBOOK_CODES, PLAIN_CODES, SCALED_CODES
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.state_dtypes import scaled
from halfstep_spec.vectors import Array, Case

NOTES = {
    "Sample": "values over several binades, two blocks a row, the second one short",
    "Layout": "other cuts into blocks",
    "Extremes": "blocks of zeros, of equal values, of more binades than codes have, of the largest floats",
    "NotFinite": "NaN and infinities in some blocks and not in others",
    "Positive": "a second moment: what is not zero is not stored as zero",
    "Zeros": "a second moment with zeros of both signs, either of which is stored as zero",
}

_ROWS, _RUN, _BLOCK = 8, 12, 8


def cases() -> list[Case]:
    """Return the cases of formats.json."""
    result = []
    formats = [scaled(name, _BLOCK, min_size=0, min_ndim=0) for name in SCALED_CODES]
    formats += [Format(name) for name, codes in PLAIN_CODES.items() if not codes.signed]
    for fmt in formats:
        for flag, x in format_inputs(fmt.codes.signed).items():
            for rounding in ("nearest", "stochastic"):
                result.append(encode_case(fmt, flag, x, rounding, NOTES))
    zeros = np.array([[0.0, -0.0, 1e-3, -0.0, 2.0, 0.0, -0.0, 1e-40], [-0.0] * 8], np.float32)
    for fmt in (fmt for fmt in formats if not fmt.codes.signed):
        for rounding in ("nearest", "stochastic"):
            result.append(encode_case(fmt, "Zeros", zeros, rounding, NOTES))
    layouts = [
        ("row", (4, 6)),
        (None, (4, 6)),
        (16, (4, 2, 3, 3)),
        (5, (3, 7)),
        (128, (2, 6)),
        (4, (9,)),
        (8, (0, 8)),
    ]
    for block_size, shape in layouts:
        x = reals(f"layout {shape}", int(np.prod(shape)), (-6, 2)).reshape(shape)
        fmt = scaled("float8_e4m3fn", block_size, 0, 0)
        result.append(encode_case(fmt, "Layout", x, "stochastic", NOTES))
    return result


def format_inputs(signed: bool) -> dict[str, np.ndarray]:
    """Return arrays of 8 rows of 12, by flag, for codes with a sign or without."""
    size = _ROWS * _RUN
    sample = reals("format sample", size, (-9, 1)).reshape(_ROWS, _RUN)
    extremes = reals("format extremes", size, (-60, 0) if signed else (-60, 10)).reshape(_ROWS, _RUN)
    extremes[0], extremes[1], extremes[2] = 0, 0.3, np.float32(-3.4028235e38)
    extremes[3, 0] = 0
    extremes[4] = np.float32(2.0**-120) * np.arange(1, _RUN + 1, dtype=np.float32)
    bad = sample.copy()
    bad[0, 3], bad[1, 9], bad[2, :] = np.nan, np.inf, np.nan
    bad[3, 0], bad[4, 11] = -np.inf, np.nan
    wide = reals("format wide", size, (-50, 0)).reshape(_ROWS, _RUN)
    return {"Sample": sample, "Extremes": extremes, "NotFinite": bad, "Positive": wide}


def encode_case(
    fmt: Format, flag: str, x: np.ndarray, rounding: str, notes: dict[str, str], second: bool | None = None
) -> Case:
    """Return a case of encoding `x`, as a second moment where there is no sign, and decoding it again.

    The flag "Positive" makes it a second moment too; `second` says whether it is, after all.
    """
    second = not fmt.codes.signed or flag == "Positive" if second is None else second
    x, keep_nonzero = (np.where(x < 0, -x, x), "always") if second else (x, "never")
    words = None
    if rounding == "stochastic":
        words = patterns(f"{flag} words", x.size).reshape(x.shape)
        words = fmt.of_first_elements(words) if fmt.codes.dithered else words
    stored = fmt.encode(x, words, keep_nonzero=keep_nonzero)
    inputs = {"x": Array.of(x)} | ({} if words is None else {"words": Array.of(words)})
    outputs = {
        "codes": Array.of(stored.codes, fmt.codes.dtype, "bits"),
        "values": Array.of(fmt.decode(stored, words), compare="bits"),
    }
    if stored.scale is not None:
        outputs["scale"] = Array.of(stored.scale, compare="bits")
    arguments = {"dtype": fmt.dtype, "scaled": fmt.scaled, "block_size": fmt.block_size}
    arguments["keep_nonzero"] = keep_nonzero
    arguments |= {"relative": True} if fmt.relative else {}
    arguments |= {"scale": fmt.scale} if fmt.scale == "fine" else {}
    comment = f"{fmt.dtype}, blocks of {fmt.block_size}, {rounding}: {notes[flag]}"
    return Case("encode", comment, arguments, inputs, outputs, (flag,), _clauses(fmt))


def _clauses(fmt: Format) -> tuple[str, ...]:
    """Return the clauses of a format: of its codes, and F7 where these can be NaN."""
    if fmt.power_unit:
        return ("F18",)
    if fmt.has_inverse_root:
        return "F17", "F7"
    if fmt.relative and not fmt.scaled:
        return "F13", "F7"
    if fmt.scale == "fine":
        return "F14", "F15", "F7"
    if fmt.dtype in CODEBOOK_CODES:
        return "F8", "F9", "F10", "F11", "F7"
    if not fmt.scaled:
        return ("F21", "F7") if fmt.dtype == "ufloat16_e7m9" else ("F6", "F7")
    return ("F4", "F5", "F16", "F7") if fmt.dtype == "uroot8" else ("F4", "F5", "F7")
