"""Short expressions whose rounding XLA may change: on numbers of a step they have NumPy's bits (A1 to A3).

Written on bare arrays, XLA changes those marked CHANGED. The mark is tested too, so that it tells when a new
XLA changes others, or no longer these.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.numbers import Made
from halfstep_jax.numbers.op import JaxOp
from halfstep_jax.xla.exact import opaque_zero

COUNT = 20_000
# Numbers of the step: two ordinary ones, and one that is 0.
C, D, ZERO = np.float32(0.3), np.float32(0.7), np.float32(0)
NUMPY = types.SimpleNamespace(sqrt=np.sqrt, abs=np.abs, where=np.where, maximum=np.maximum, sign=np.sign)
BARE = types.SimpleNamespace(sqrt=jnp.sqrt, abs=jnp.abs, where=jnp.where, maximum=jnp.maximum, sign=jnp.sign)
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


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(1)
    x, y, z = (
        (rng.standard_normal(COUNT) * 10.0 ** rng.integers(-3, 3, COUNT)).astype(np.float32) for _ in range(3)
    )
    x[:4] = 0.0, -0.0, 0.0, -0.0
    return x, y, np.abs(z) + np.float32(1e-3)


def differing(actual, expected) -> int:
    return int((np.asarray(actual).view(np.int32) != expected.view(np.int32)).sum())


def on_numbers(function):
    """Return the function of arrays that computes an expression on numbers that protect themselves."""

    def computed(x, y, z):
        op = JaxOp("hazard", opaque_zero())
        numbers = (op.wrap(c, Made.NUMBER) for c in (C, D, ZERO))
        return op.bare(function(*map(op.wrap, (x, y, z)), *numbers, op))

    return computed


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 0 / 0
@pytest.mark.parametrize("name", HAZARDS)
def test_numbers_of_a_step_have_the_bits_of_numpy(name, operands):
    changed, function = HAZARDS[name]
    expected = function(*operands, C, D, ZERO, NUMPY)
    bare = jax.jit(lambda x, y, z: function(x, y, z, C, D, ZERO, BARE))
    assert differing(jax.jit(on_numbers(function))(*operands), expected) == 0
    assert differing(on_numbers(function)(*map(jnp.asarray, operands)), expected) == 0
    assert (differing(bare(*operands), expected) > 0) == changed


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["x / d", "(x c) d", "x y + z", "x / sqrt(z)"])
def test_a_single_number_has_them_too(name, operands):
    """XLA knows other rewrites for scalars than for arrays, and a leaf may be one."""
    _, function = HAZARDS[name]
    operands = [x[4:104] for x in operands]
    expected = function(*operands, C, D, ZERO, NUMPY)
    computed = jax.jit(on_numbers(function))
    assert differing(np.stack([computed(*row) for row in zip(*operands, strict=True)]), expected) == 0
