"""Rounding: every border of every format, then values from our own words."""

import numpy as np

from halfstep_spec.cases.inputs import patterns, reals
from halfstep_spec.numbers.float_formats import FLOAT_FORMATS, FloatFormat
from halfstep_spec.numbers.rounding import decode, round_to
from halfstep_spec.vectors import Array, Case

NOTES = {
    "Tie": "half-way between two neighbours",
    "Subnormal": "below the smallest normal number of the target",
    "Overflow": "past the largest finite value, or near it",
    "Infinity": "an infinite input",
    "NaN": "NaN inputs: 7fffffff becomes -0 by a carry, 7f800001 infinity by a mask, where nobody looks",
    "Zero": "zeros of both signs",
    "Representable": "values of the target: they never move",
    "Words": "words that just do and just do not round up, all ones, and all zeros",
    "HalfUnit": "fractions finer than 16 random bits: they count as the nearest of 16 bits, a half upwards",
    "Saturate": "the rule for states: finite stops at the largest finite value, infinity becomes NaN",
    "Sample": "patterns from our own random words",
}

_NARROW = [fmt for fmt in FLOAT_FORMATS.values() if fmt.bits < 32]
_SPECIALS = {
    "Zero": (0x00000000, 0x80000000),
    "Infinity": (0x7F800000, 0xFF800000),
    "NaN": (0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FBFFFFF, 0x7F80FFFF),
}
_CLAUSES = {"NaN": ("R4", "R7"), "Overflow": ("R7",), "Representable": ("R1",)}
"""By flag: the clauses that such a case tests beside the rounding itself."""
_WORDS = (0x00000000, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x12345678)


def round_nearest_cases() -> list[Case]:
    """Return the cases of round_nearest.json."""
    result = []
    for fmt in _NARROW:
        for saturate in (False, True):
            for flag, x in _border_inputs(fmt).items():
                result.append(_case(fmt.name, flag, x, None, saturate))
    for saturate in (False, True):
        result.append(
            _case("float32", "Infinity", _floats(_SPECIALS["Infinity"] + _SPECIALS["Zero"]), None, saturate)
        )
    return result


def round_stochastic_cases() -> list[Case]:
    """Return the cases of round_stochastic.json."""
    result = []
    for fmt in _NARROW:
        for saturate in (False, True):
            for flag, x in _border_inputs(fmt).items():
                if flag == "Sample":
                    result.append(_case(fmt.name, flag, x, patterns(f"{fmt.name} words", x.size), saturate))
                else:
                    every = np.repeat(x, len(_WORDS))
                    result.append(
                        _case(fmt.name, flag, every, np.tile(np.array(_WORDS, np.uint32), x.size), saturate)
                    )
        result.append(_threshold_case(fmt))
        result += _half_unit_cases(fmt)
    return result


def _border_inputs(fmt: FloatFormat) -> dict[str, np.ndarray]:
    """Return float32 inputs by flag."""
    smallest_normal = 1 << fmt.mantissa_bits
    codes = np.array(
        [1, 2, smallest_normal - 1, smallest_normal, smallest_normal + 1, fmt.max_code - 1, fmt.max_code]
    )
    middle = ((fmt.bias << fmt.mantissa_bits) + np.arange(4)).astype(np.int64)
    unsigned = fmt.code_dtype
    values = decode(np.concatenate([codes, middle]).astype(unsigned), fmt.name)
    grid = decode(np.arange(0, 6).astype(unsigned), fmt.name)
    near_top = decode(np.array([fmt.max_code - 1, fmt.max_code], unsigned), fmt.name)
    half = (near_top[1] - near_top[0]) / np.float32(2)
    top = near_top[1]
    past = np.array([top, np.nextafter(top + half, np.float32(0)), top + half, 3.4028235e38], np.float32)
    above = np.nextafter(top + half, np.float32(np.inf))
    inputs = {
        "Representable": values,
        "Tie": _ties(fmt, middle, unsigned),
        "Subnormal": _between(grid),
        "Overflow": np.append(past, above),
    }
    inputs = {flag: np.concatenate([x, -x]) for flag, x in inputs.items()}
    inputs |= {flag: _floats(bits) for flag, bits in _SPECIALS.items()}
    low = max(-(fmt.bias + fmt.mantissa_bits + 3), -120)
    inputs["Sample"] = reals(f"{fmt.name} sample", 64, (low, min(fmt.bias + 1, 127)))
    return inputs


def _ties(fmt: FloatFormat, codes: np.ndarray, unsigned) -> np.ndarray:
    """Values half-way between neighbours, and one float32 step to either side of them."""
    low = decode(codes.astype(unsigned), fmt.name)
    high = decode((codes + 1).astype(unsigned), fmt.name)
    tie = low + (high - low) / np.float32(2)
    return np.concatenate([tie, np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(np.inf))])


def _between(grid: np.ndarray) -> np.ndarray:
    """Values at 1/4, 1/2 and 3/4 of the gaps of an ascending grid, and float32's own subnormal numbers."""
    steps = np.array([0.25, 0.5, 0.75], np.float64)
    exact = (grid[:-1, None] + np.diff(grid.astype(np.float64))[:, None] * steps).ravel()
    return np.concatenate(
        [exact.astype(np.float32), _floats((0x00000001, 0x00000123, 0x007FFFFF, 0x00800000))]
    )


def _floats(bits) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def _threshold_case(fmt: FloatFormat) -> Case:
    """One value a quarter above a neighbour, under the last word that stays and the first that goes."""
    base = decode(np.array([fmt.bias << fmt.mantissa_bits], fmt.code_dtype), fmt.name)
    quarter = np.float32(2.0 ** -(fmt.mantissa_bits + 2))
    x = np.repeat(base + base * quarter, 2)
    words = np.array([0xBFFFFFFF, 0xC0000000], np.uint32)
    return _case(fmt.name, "Words", np.concatenate([x, -x]), np.tile(words, 2), False)


def _half_unit_cases(fmt: FloatFormat) -> list[Case]:
    """Values 2^-17 of a gap above and below a neighbour, and 2^-18 off that, under words that decide.

    At one and at the smallest number, where float32 holds such values.
    """
    result = []
    words = np.array([0x00000000, 0x0000FFFF, 0xFFFEFFFF, 0xFFFF0000], np.uint32)
    for code in (fmt.bias << fmt.mantissa_bits, 1):
        low, high = decode(np.array([code, code + 1], fmt.code_dtype), fmt.name).astype(np.float64)
        x = low + (high - low) * np.array([1, 2, 3, 2**18 - 3, 2**18 - 2, 2**18 - 1]) * 2.0**-18
        if (x.astype(np.float32) == x).all():
            every = np.repeat(np.concatenate([x, -x]).astype(np.float32), words.size)
            result.append(_case(fmt.name, "HalfUnit", every, np.tile(words, 2 * x.size), False))
    return result


def _case(dtype: str, flag: str, x: np.ndarray, words: np.ndarray | None, saturate: bool) -> Case:
    codes = round_to(x, dtype, words, saturate=saturate)
    inputs = {"x": Array.of(x)} | ({} if words is None else {"words": Array.of(words)})
    flags = (flag, "Saturate") if saturate else (flag,)
    clauses = (
        "R6" if saturate else "R5",
        "R2" if words is None else "R3",
        *_CLAUSES.get(flag, ()),
    )
    comment = f"{NOTES[flag]}; {dtype}"
    outputs = {"y": Array.of(codes, dtype, "bits")}
    return Case("round_to", comment, {"dtype": dtype, "saturate": saturate}, inputs, outputs, flags, clauses)
