"""What a GPU does with our steps: their bits, and their time beside that of its memory and of peers.

    make gpu                                     # on a machine with a GPU
    python benchmarks/gpu.py --device cpu --small    # the same, small, on a CPU

First the bits: the golden vectors in both packages on the device, and training in both packages, on the
device and on the CPU, from the same weights with the same gradients: not one bit may differ. Then the time:
each step against a plain copy of the default's bytes, the seconds that the first step takes, whether later
ones compile anew, and the memory at its peak. Exits with 1 if a bit differs.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# The runner of the golden vectors is that of the tests.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
# Both frameworks share the device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import halfstep_jax
import halfstep_torch
from backends import on_jax, on_torch
from compare import assert_same
from halfstep_spec import SPEC_VERSION
from halfstep_spec.vectors import load

_RATE, _DECAY = 1e-3, 0.1
_SHAPE = (256, 384)


def settings(hs: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the steps: the name of an optimizer and its options; `hs` is either package."""
    fp8 = {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")}
    tables = {"mu_dtype": hs.codebook("dynamic8"), "nu_dtype": hs.codebook("udynamic8")}
    return {
        "AdamW, bfloat16 (default)": ("AdamW", {}),
        "AdamW, one_pass": ("AdamW", dict(hs.recipes.one_pass)),
        "AdamW, fp8": ("AdamW", fp8),
        "AdamW, split16": ("AdamW", {"param_storage": "split16"}),
        "AdamW, 8-bit codebooks": ("AdamW", tables),
        "Lion": ("Lion", {}),
        "LAMB": ("Lamb", {}),
    }


class JaxSteps:
    """Steps of an alias of `halfstep_jax`, or of another Optax transform, on one device."""

    def __init__(self, tx: Any, weights: list[np.ndarray], device: Any) -> None:
        self._device = device
        self.params = self._tree(weights)
        self.state = jax.device_put(jax.jit(tx.init)(self.params), device)

        def step(params, state, gradients):
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def _tree(self, arrays: list[np.ndarray]) -> dict[str, jax.Array]:
        tree = {f"w{i}": jnp.asarray(x, jnp.bfloat16) for i, x in enumerate(arrays)}
        return jax.device_put(tree, self._device)

    def give(self, gradients: list[np.ndarray]) -> None:
        """Take gradients for the steps to come."""
        self._gradients = self._tree(gradients)

    def step(self) -> None:
        """Take a step."""
        self.params, self.state = self._step(self.params, self.state, self._gradients)

    def wait(self) -> None:
        """Return when all steps are done."""
        jax.block_until_ready((self.params, self.state))

    def bits(self) -> list[np.ndarray]:
        """Return the weights, as patterns."""
        return [np.asarray(x).view(np.uint16) for x in self.params.values()]

    @property
    def compilations(self) -> int:
        """How many programs the step has."""
        return self._step._cache_size()


class TorchSteps:
    """Steps of an optimizer of torch's kind on one device."""

    def __init__(self, make: Callable[..., Any], weights: list[np.ndarray], device: str) -> None:
        self._device = device
        self._named = [(f"w{i}", torch.nn.Parameter(x)) for i, x in enumerate(self._tensors(weights))]
        self._optimizer = make(self._named)

    def _tensors(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        return [torch.from_numpy(x).to(self._device, torch.bfloat16) for x in arrays]

    def give(self, gradients: list[np.ndarray]) -> None:
        """Take gradients for the steps to come."""
        for (_, p), g in zip(self._named, self._tensors(gradients), strict=True):
            p.grad = g

    def step(self) -> None:
        """Take a step."""
        self._optimizer.step()

    def wait(self) -> None:
        """Return when all steps are done."""
        if self._device != "cpu":
            torch.accelerator.synchronize()

    def bits(self) -> list[np.ndarray]:
        """Return the weights, as patterns."""
        return [p.detach().cpu().view(torch.int16).numpy().view(np.uint16) for _, p in self._named]

    @property
    def compilations(self) -> int:
        """How many graphs Dynamo has made in this process."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def jax_steps(name: str, weights: list[np.ndarray], device: Any) -> JaxSteps:
    """Return the steps of a setting in JAX."""
    alias, options = settings(halfstep_jax)[name]
    tx = getattr(halfstep_jax, alias.lower())(_RATE, weight_decay=_DECAY, **options)
    return JaxSteps(tx, weights, device)


def torch_steps(name: str, weights: list[np.ndarray], device: str, compiled: bool) -> TorchSteps:
    """Return the steps of a setting in torch."""
    alias, options = settings(halfstep_torch)[name]
    make = getattr(halfstep_torch, alias)
    return TorchSteps(
        lambda named: make(named, lr=_RATE, weight_decay=_DECAY, compile=compiled, **options), weights, device
    )


def vectors(device: str, every: int) -> dict[str, Any]:
    """Run golden vectors on a device in both packages; return how many were run, and which differ."""
    cases = [case for name in load(SPEC_VERSION).values() for case in name][::every]
    found: dict[str, Any] = {}
    for package, backend in (("jax", on_jax.JaxBackend("jit")), ("torch", on_torch.TorchBackend("eager"))):
        differing = []
        with _on(device):
            for case in cases:
                try:
                    actual = backend.run(case)
                    for output, expected in case.outputs.items():
                        assert_same(actual[output], expected, case.key)
                except Exception as error:  # whatever a device cannot do is to be seen, not to end the run
                    differing.append(f"{case.key}: {type(error).__name__}: {str(error)[:200]}")
        found[package] = {"cases": len(cases), "differing": differing}
    return found


@contextlib.contextmanager
def _on(device: str) -> Iterator[None]:
    """Let the runner's arrays be on a device."""
    to_torch, from_torch = on_torch.to_torch, on_torch.from_torch
    on_torch.to_torch = lambda array: to_torch(array).to(device)
    on_torch.from_torch = lambda values, label="": from_torch(values.cpu(), label)
    try:
        with jax.default_device(_jax_device(device)), torch.device(device):
            yield
    finally:
        on_torch.to_torch, on_torch.from_torch = to_torch, from_torch


def twins(device: str, names: Sequence[str], steps: int, shape: tuple[int, int]) -> dict[str, dict[str, int]]:
    """Train in both packages, on the device and on the CPU; return how many weights differ from there."""
    found = {}
    for name in names:
        if name == "LAMB":  # its norms are sums in an order of the device's own
            continue
        weights = [np.random.default_rng(0).normal(0, 0.05, shape).astype(np.float32)]
        runs = {
            "JAX, CPU": jax_steps(name, weights, jax.local_devices(backend="cpu")[0]),
            "JAX": jax_steps(name, weights, _jax_device(device)),
            "torch, eager": torch_steps(name, weights, device, False),
            "torch, compiled": torch_steps(name, weights, device, True),
        }
        for k in range(steps):
            gradients = [np.random.default_rng((1, k)).normal(0, 1e-2, shape).astype(np.float32)]
            for run in runs.values():
                run.give(gradients)
                run.step()
        right, *others = (run.bits()[0] for run in runs.values())
        found[name] = {
            run: int((bits != right).sum()) for run, bits in zip(list(runs)[1:], others, strict=True)
        }
    return found


def peers(weights: list[np.ndarray], device: str) -> dict[str, Callable[[], Any]]:
    """Return steps of others, those that are installed."""

    def torch_peer(make: Callable[..., Any], **options: Any) -> Callable[[], TorchSteps]:
        return lambda: TorchSteps(
            lambda named: make([p for _, p in named], lr=_RATE, weight_decay=_DECAY, **options),
            weights,
            device,
        )

    tx = optax.adamw(_RATE, weight_decay=_DECAY)
    found: dict[str, Callable[[], Any]] = {
        "optax.adamw": lambda: JaxSteps(tx, weights, _jax_device(device)),
        "torch AdamW(fused)": torch_peer(torch.optim.AdamW, fused=True),
    }
    others = {"torchao.optim": ("AdamW8bit", "AdamWFp8"), "bitsandbytes.optim": ("AdamW8bit",)}
    others["flashoptim"] = ("FlashAdamW",)
    for module, names in others.items():
        with contextlib.suppress(ImportError):
            loaded = importlib.import_module(module)
            found |= {f"{module}.{name}": torch_peer(getattr(loaded, name)) for name in names}
    return found


def times(
    device: str, names: Sequence[str], leaves: int, shape: tuple[int, int], rounds: int
) -> list[dict[str, Any]]:
    """Time every step, and a copy of the same bytes as the default's; return a row for each."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(0, 0.05, shape).astype(np.float32)] * leaves
    gradients = [rng.normal(0, 1e-2, shape).astype(np.float32)] * leaves
    count = leaves * int(np.prod(shape))
    steps: dict[str, Callable[[], Any]] = {}
    for name in names:
        steps[f"JAX: {name}"] = lambda name=name: jax_steps(name, weights, _jax_device(device))
        steps[f"torch: {name}"] = lambda name=name: torch_steps(name, weights, device, True)
    rows = [{"step": "copy of 14 bytes", "ns": _copy(device, 7 * count, rounds) / count * 1e9}]
    for name, make in {**steps, **peers(weights, device)}.items():
        try:
            rows.append({"step": name, **_time(make(), gradients, rounds, count)})
        except Exception as error:  # a peer may not run here
            rows.append({"step": name, "error": f"{type(error).__name__}: {str(error)[:200]}"})
        gc.collect()
    return rows


def _time(steps: Any, gradients: list[np.ndarray], rounds: int, count: int) -> dict[str, Any]:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    steps.give(gradients)
    steps.step()
    steps.wait()
    first, compiled = time.perf_counter() - start, steps.compilations
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(5):
            steps.step()
        steps.wait()
        taken.append((time.perf_counter() - start) / 5)
    row = {"ns": min(taken) / count * 1e9, "first": first, "recompiled": steps.compilations - compiled}
    if torch.cuda.is_available() and isinstance(steps, TorchSteps):
        row["peak"] = torch.cuda.max_memory_allocated() / count
    return row


def _copy(device: str, size: int, rounds: int) -> float:
    """Return the seconds that it takes to copy some bytes, and so to move twice as many."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, taken = torch.zeros_like(source), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.accelerator.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _jax_device(device: str) -> Any:
    return jax.local_devices(backend="cpu" if device == "cpu" else None)[0]


def _print(bits: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    for package, result in bits["vectors"].items():
        print(f"{package}: {result['cases']} golden vectors, {len(result['differing'])} differ")
        print(*(f"    {line}" for line in result["differing"][:20]), sep="\n")
    for name, found in bits["twins"].items():
        print(f"{name:28s} weights that differ from JAX on a CPU:", found)
    copy = rows[0]["ns"]
    columns = f"{'ns per parameter':>17s}{'copy of 14 bytes':>18s}{'first step, s':>15s}{'recompiled':>12s}"
    print(f"\n{'step':34s}{columns}")
    for row in rows:
        if "error" in row:
            print(f"{row['step']:34s} {row['error']}")
            continue
        rest = f"{row['first']:15.1f}{row['recompiled']:12d}" if "first" in row else ""
        print(f"{row['step']:34s}{row['ns']:17.3f}{row['ns'] / copy:17.2f}x{rest}")


def main(argv: list[str] | None = None) -> int:
    """Print what was found; return 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help='of torch; "cpu" for both frameworks there')
    parser.add_argument("--small", action="store_true", help="few steps on small arrays")
    parser.add_argument("--json", type=pathlib.Path, help="where to write what was found")
    arguments = parser.parse_args(argv)
    device, small = arguments.device, arguments.small
    if device != "cpu" and "cpu" in (jax.default_backend(), torch.accelerator.current_accelerator() or "cpu"):
        print("gpu.py: JAX or torch sees no GPU. Install their builds for it, or use --device cpu --small.")
        return 2
    names = list(settings(halfstep_jax))[: 1 if small else None]
    bits = {
        "vectors": vectors(device, every=100 if small else 1),
        "twins": twins(device, names, *((3, (8, 384)) if small else (1000, _SHAPE))),
    }
    # A thousand million parameters either way.
    layouts = {"1 array": (1, (31250, 32000)), "300 arrays": (300, (1824, 1824))}
    layouts = {"2 arrays": (2, (64, 512))} if small else layouts
    rounds, record = 1 if small else 10, {"machine": platform.platform(), "device": device, "bits": bits}
    for layout, (leaves, shape) in layouts.items():
        rows = record[layout] = times(device, names, leaves, shape, rounds)
        print(f"\n{layout}")
        _print(bits, rows)
    if arguments.json:
        record["versions"] = {"jax": jax.__version__, "torch": torch.__version__}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    differ = any(result["differing"] for result in bits["vectors"].values())
    return int(differ or any(any(found.values()) for found in bits["twins"].values()))


if __name__ == "__main__":
    sys.exit(main())
