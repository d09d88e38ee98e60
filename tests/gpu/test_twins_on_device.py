"""Training on a device gives the bits that it gives on a CPU, in both packages."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from backends.devices import jax_device

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
SHAPE = 256, 384
# Without LAMB: its norms are sums in an order of the device's own.
SETTINGS = (
    *("AdamW, bfloat16 (default)", "AdamW, one_pass", "AdamW, eight_bit", "AdamW, fp8", "AdamW, split16"),
    *("AdamW, 8-bit codebooks", "AdamW, 4-bit codebooks", "Lion"),
)


@pytest.fixture
def gpu(monkeypatch):
    """Return the steps of the benchmark."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "gpu_steps", raising=False)
    import gpu_steps

    yield gpu_steps
    sys.modules.pop("gpu_steps", None)


def gradients(step: int) -> np.ndarray:
    """Return gradients over twenty binades, of which one in eight is zero."""
    rng = np.random.default_rng((1, step))
    values = rng.normal(0, 1, SHAPE) * np.exp2(rng.integers(-20, 0, SHAPE)) * (rng.random(SHAPE) < 7 / 8)
    return values.astype(np.float32)


def differing(run, right) -> dict[str, int]:
    """Return, of each array that has bits of another run's, how many elements differ."""
    counts = {name: int((bits != right[name]).sum()) for name, bits in run.items()}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("name", SETTINGS)
def test_training_gives_the_bits_of_the_cpu(name, device, gpu):
    weights = [np.random.default_rng(0).normal(0, 0.05, SHAPE).astype(np.float32)]
    on_cpu = {
        "JAX": gpu.jax_steps(name, weights, jax.local_devices(backend="cpu")[0]),
        "torch": gpu.torch_steps(name, weights, "cpu", False),
    }
    on_device = {
        "JAX": gpu.jax_steps(name, weights, jax_device(device)),
        "torch, eager": gpu.torch_steps(name, weights, device, False),
        "torch, compiled": gpu.torch_steps(name, weights, device, True),
    }
    for step in range(20 if device == "cpu" else 1000):
        given = [gradients(step)]
        for run in (*on_cpu.values(), *on_device.values()):
            run.give(given)
            run.step()
    right = {framework: run.bits() for framework, run in on_cpu.items()}
    found = {run: differing(steps.bits(), right[run.split(",")[0]]) for run, steps in on_device.items()}
    assert found == {run: {} for run in on_device}
    assert differing({"w0": right["JAX"]["w0"]}, right["torch"]) == {}
    moved = right["JAX"]["w0"] != np.asarray(weights[0], jax.numpy.bfloat16).view(np.uint16)
    assert moved.mean() > 0.5, "the test saw nothing"
