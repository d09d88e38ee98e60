"""What the contract asks of a device's arithmetic: roots, quotients, no fused products, subnormal numbers.

Contract: A2, A3, A8, C3, C4.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from backends.devices import jax_device
from halfstep_jax.numbers import roots
from halfstep_jax.xla.exact import add_product, opaque_zero
from halfstep_torch.numbers import exact

_CHUNK = 1 << 21


def numbers(rng: np.random.Generator, lowest: int, highest: int) -> np.ndarray:
    """Return float32 numbers of either sign with exponent fields in a range; a third near a power of two."""
    edges = np.concatenate([np.arange(64), np.arange(2**23 - 64, 2**23)])
    mantissa = np.where(rng.random(_CHUNK) < 1 / 3, rng.choice(edges, _CHUNK), rng.integers(0, 2**23, _CHUNK))
    field, sign = rng.integers(lowest, highest, _CHUNK), rng.integers(0, 2, _CHUNK)
    return (sign << 31 | field << 23 | mantissa).astype(np.uint32).view(np.float32)


def in_jax(function, device):
    """Return a function of NumPy arrays that JAX runs, jitted, on a device."""
    return lambda *x: np.asarray(jax.jit(function)(*jax.device_put(x, jax_device(device))))


def in_torch(function, device):
    """Return a function of NumPy arrays that torch runs on a device."""

    def run(*arrays):
        return function(*(torch.from_numpy(x).to(device) for x in arrays)).cpu().numpy()

    return run


def runs(jax_function, torch_function, device):
    """Return the same function as both frameworks run it."""
    return {
        "JAX": in_jax(jax_function, device),
        "torch": in_torch(torch_function, device),
    }


def differing(x: np.ndarray, y: np.ndarray) -> int:
    """Return how many numbers differ in a bit."""
    return int(np.count_nonzero(x.view(np.uint32) != y.view(np.uint32)))


@pytest.fixture
def chunks(device):
    """Return how many chunks are worth their time: a device takes 10^8 numbers in no time."""
    return 2 if device == "cpu" else -(-(10**8) // _CHUNK)


def test_every_mantissa_has_its_right_root(device):
    step = runs(roots.sqrt, exact.sqrt, device)
    # Both parities of the exponent are all that a root depends on.
    for first in range(127 << 23, 129 << 23, _CHUNK << (3 if device == "cpu" else 0)):
        x = np.arange(first, first + _CHUNK, dtype=np.uint32).view(np.float32)
        assert {name: differing(f(x), np.sqrt(x)) for name, f in step.items()} == dict.fromkeys(step, 0)


def test_quotients_are_right(device, chunks):
    step = runs(roots.divide, lambda x, y: x / y, device)
    rng = np.random.default_rng(0)
    for _ in range(chunks):
        x, y = numbers(rng, 70, 180), numbers(rng, 70, 180)
        assert {name: differing(f(x, y), x / y) for name, f in step.items()} == dict.fromkeys(step, 0)


def test_a_device_is_no_further_off_than_the_correction_assumes(device, chunks):
    """C3: its own roots by one number, its own quotients by two units; and the same of the same twice."""
    root, quotient = in_jax(jax.lax.sqrt, device), in_jax(jax.lax.div, device)
    for first in range(127 << 23, 129 << 23, _CHUNK):
        x = np.arange(first, first + _CHUNK, dtype=np.uint32).view(np.float32)
        about = root(x)
        assert np.abs(about.view(np.int32) - np.sqrt(x).view(np.int32)).max() <= 1
        assert differing(about, root(x)) == 0
    rng = np.random.default_rng(0)
    for _ in range(chunks):
        x, y = numbers(rng, 70, 180), numbers(rng, 70, 180)
        about, right = quotient(x, y), x / y
        units = (about.astype(np.float64) - right) / np.spacing(np.abs(right))
        assert np.abs(units).max() <= 2
        assert differing(about, quotient(x, y)) == 0


def test_no_product_is_fused_with_a_sum(device):
    def by_jax(c, a, b):
        return add_product(c, a, b, opaque_zero())

    step = runs(by_jax, lambda c, a, b: c + a * b, device)
    rng = np.random.default_rng(1)
    a, b = numbers(rng, 120, 130), numbers(rng, 120, 130)
    c = -(a * b) + np.float32(2.0**-20)  # of a fused product all would be left that its rounding took
    fused = (c.astype(np.float64) + a.astype(np.float64) * b).astype(np.float32)
    assert differing(fused, c + a * b) > _CHUNK // 4
    assert {name: differing(f(c, a, b), c + a * b) for name, f in step.items()} == dict.fromkeys(step, 0)


def test_subnormal_numbers_are_kept_where_the_contract_says(device):
    def halved(x):
        return x * np.float32(0.5)

    step = runs(lambda x: halved(x) + jnp.float32(0), halved, device)
    x = np.arange(1 << 23, (1 << 23) + _CHUNK, 2, dtype=np.uint32).view(np.float32)
    expected = dict.fromkeys(step, 0)
    if device == "cpu":  # XLA takes them for zero there
        expected["JAX"] = x.size
    assert {name: differing(f(x), halved(x)) for name, f in step.items()} == expected
