"""Short expressions whose rounding XLA may change: on numbers of a step they have NumPy's bits (A1 to A3).

Written on bare arrays, XLA changes those marked CHANGED. The mark is tested too, so that it tells when a new
XLA changes others, or no longer these.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.numbers import Origin
from halfstep_jax.numbers.op import JaxOp
from halfstep_jax.xla.exact import opaque_zero
from hazards import HAZARDS, NUMPY, ZERO, C, D, differing, operands

BARE = types.SimpleNamespace(sqrt=jnp.sqrt, abs=jnp.abs, where=jnp.where, maximum=jnp.maximum, sign=jnp.sign)

KEPT_FROM = {"(x c) d": (0, 12), "(x + c) + d": (0, 12)}
"""The jax from which XLA keeps what it changed before."""
VERSION = tuple(map(int, jax.__version__.split(".")[:2]))


@pytest.fixture(scope="module", name="operands")
def all_operands():
    return operands()


def on_numbers(function):
    """Return the function of arrays that computes an expression on numbers that protect themselves."""

    def computed(x, y, z):
        op = JaxOp("hazard", opaque_zero())
        numbers = (op.wrap(c, Origin.NUMBER) for c in (C, D, ZERO))
        return op.bare(function(*map(op.wrap, (x, y, z)), *numbers, op))

    return computed


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 0 / 0
@pytest.mark.parametrize("name", HAZARDS)
def test_numbers_of_a_step_have_the_bits_of_numpy(name, operands):
    changed, function = HAZARDS[name]
    changed &= VERSION < KEPT_FROM.get(name, (VERSION[0] + 1,))
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
