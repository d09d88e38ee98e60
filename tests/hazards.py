"""Short expressions whose rounding a compiler may change: each framework is held against NumPy on them."""

import types

import numpy as np

COUNT = 20_000
# Numbers of the step: two ordinary ones, and one that is 0.
C, D, ZERO = np.float32(0.3), np.float32(0.7), np.float32(0)
NUMPY = types.SimpleNamespace(sqrt=np.sqrt, abs=np.abs, where=np.where, maximum=np.maximum, sign=np.sign)
CHANGED, KEPT = True, False

HAZARDS = {
    "x y + z": (CHANGED, lambda x, y, z, c, d, zero, op: x * y + z),
    "x y - y z": (CHANGED, lambda x, y, z, c, d, zero, op: x * y - y * z),
    "-(x y) + z": (CHANGED, lambda x, y, z, c, d, zero, op: -(x * y) + z),
    "x c + y c": (CHANGED, lambda x, y, z, c, d, zero, op: x * c + y * c),
    "(x c) d": (CHANGED, lambda x, y, z, c, d, zero, op: (x * c) * d),
    "(x c)(y d)": (KEPT, lambda x, y, z, c, d, zero, op: (x * c) * (y * d)),
    "-(x c) d": (KEPT, lambda x, y, z, c, d, zero, op: -(x * c) * d),
    "(x + c) + d": (CHANGED, lambda x, y, z, c, d, zero, op: (x + c) + d),
    "x zero + zero": (CHANGED, lambda x, y, z, c, d, zero, op: x * zero + zero),
    "x + zero": (CHANGED, lambda x, y, z, c, d, zero, op: x + zero),
    "zero - x": (KEPT, lambda x, y, z, c, d, zero, op: zero - x),
    "x / d": (CHANGED, lambda x, y, z, c, d, zero, op: x / d),
    "(x c) / d": (CHANGED, lambda x, y, z, c, d, zero, op: (x * c) / d),
    "c / (d x)": (KEPT, lambda x, y, z, c, d, zero, op: c / (d * x)),
    "(x / y) / z": (CHANGED, lambda x, y, z, c, d, zero, op: (x / y) / z),
    "x / (y / z)": (CHANGED, lambda x, y, z, c, d, zero, op: x / (y / z)),
    "(x / y) z": (KEPT, lambda x, y, z, c, d, zero, op: (x / y) * z),
    "(x / y) y": (KEPT, lambda x, y, z, c, d, zero, op: (x / y) * y),
    "x / x": (KEPT, lambda x, y, z, c, d, zero, op: x / x),
    "x / (d + d x)": (CHANGED, lambda x, y, z, c, d, zero, op: x / (d + d * z)),
    "x / sqrt(z)": (CHANGED, lambda x, y, z, c, d, zero, op: x / op.sqrt(z)),
    "x / (sqrt(z) + zero)": (CHANGED, lambda x, y, z, c, d, zero, op: x / (op.sqrt(z) + zero)),
    "1 / sqrt(z)": (CHANGED, lambda x, y, z, c, d, zero, op: 1.0 / op.sqrt(z)),
    "sqrt(z) sqrt(z)": (KEPT, lambda x, y, z, c, d, zero, op: op.sqrt(z) * op.sqrt(z)),
    "sqrt(x x)": (KEPT, lambda x, y, z, c, d, zero, op: op.sqrt(x * x)),
    "|x y| + z": (KEPT, lambda x, y, z, c, d, zero, op: op.abs(x * y) + z),
    "where(x y) + z": (KEPT, lambda x, y, z, c, d, zero, op: op.where(x > 0, x * y, y) + z),
    "maximum(x y, z) + x": (KEPT, lambda x, y, z, c, d, zero, op: op.maximum(x * y, z) + x),
}


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, y and z > 0, over six decades, zeros of both signs among x."""
    rng = np.random.default_rng(1)
    x, y, z = (
        (rng.standard_normal(COUNT) * 10.0 ** rng.integers(-3, 3, COUNT)).astype(np.float32) for _ in range(3)
    )
    x[:4] = 0.0, -0.0, 0.0, -0.0
    return x, y, np.abs(z) + np.float32(1e-3)


def differing(actual, expected) -> int:
    return int((np.asarray(actual).view(np.int32) != expected.view(np.int32)).sum())
