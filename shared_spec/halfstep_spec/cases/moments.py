"""Bias correction: short and long counts, rates from 0 to nearly 1."""

import numpy as np

from halfstep_spec.numbers.moments import bias_correction
from halfstep_spec.vectors import Array, Case

NOTES = {"Long": "a count with many bits, where the order of the products shows"}

_RATES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.999999)
_COUNTS = (1, 2, 3, 7, 10, 100, 255, 1000, 1023, 65535, 99999, 1999999, 2**31 - 1)


def cases() -> list[Case]:
    """Return the cases of moments.json."""
    return [_case(b) for b in _RATES]


def _case(b: float) -> Case:
    values = np.array([bias_correction(b, t) for t in _COUNTS], np.float32)
    inputs = {"b": Array.of(np.float32(b)), "count": Array.of(np.array(_COUNTS, np.int32))}
    outputs = {"correction": Array.of(values, compare="bits")}
    return Case("bias_correction", f"1 - b^t at b = {b}", {}, inputs, outputs, ("Long",), ("M2", "A2"))
