"""What a GPU does with our steps: their bits, and their time beside that of its memory and of peers.

    make gpu                                     # on a machine with a GPU
    python benchmarks/gpu.py --device cpu --small    # the same, small, on a CPU

First the bits, by `tests/gpu`: the golden vectors in both packages on the device, its roots and quotients,
and training in both packages, on the device and on the CPU. That needs pytest, and with pytest-xdist it takes
several processes. Then the time: each step against a plain copy of the default's bytes. It also prints the
seconds that the first step takes, whether later steps compile anew, and the memory at its peak. Exits with 1
if a bit differs.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# Where the devices are is known to the tests.
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
from backends.devices import jax_device, why_absent

ROOT = pathlib.Path(__file__).parents[1]
_RATE, _DECAY = 1e-3, 0.1


def settings(hs: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the steps: the name of an optimizer and its options; `hs` is either package."""
    fp8 = {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")}
    tables = {"mu_dtype": hs.codebook("dynamic8"), "nu_dtype": hs.codebook("udynamic8")}
    short_tables = {"mu_dtype": hs.codebook("dynamic4"), "nu_dtype": hs.codebook("udynamic4")}
    return {
        "AdamW, bfloat16 (default)": ("AdamW", {}),
        "AdamW, one_pass": ("AdamW", dict(hs.recipes.one_pass)),
        "AdamW, eight_bit": ("AdamW", dict(hs.recipes.eight_bit)),
        "AdamW, fp8": ("AdamW", fp8),
        "AdamW, split16": ("AdamW", {"param_storage": "split16"}),
        "AdamW, 8-bit codebooks": ("AdamW", tables),
        "AdamW, 4-bit codebooks": ("AdamW", short_tables),
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

    def bits(self) -> dict[str, np.ndarray]:
        """Return weights and state, as patterns."""
        arrays = jax.tree_util.tree_leaves_with_path(self.state)
        named = {jax.tree_util.keystr(path): x for path, x in arrays} | self.params
        return {name: _patterns(np.asarray(x)) for name, x in named.items()}

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

    def bits(self) -> dict[str, np.ndarray]:
        """Return weights and state, as patterns."""
        named = dict(self._named)
        named |= {f"{key}/{w}": x for w, p in self._named for key, x in self._optimizer.state[p].items()}
        widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return {
            name: _patterns(x.detach().cpu().contiguous().view(widths[x.element_size()]).numpy())
            for name, x in named.items()
        }

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


def _patterns(array: np.ndarray) -> np.ndarray:
    return array.view(f"uint{8 * array.itemsize}")


def bits(device: str, small: bool) -> dict[str, Any]:
    """Run the tests of the device; return what pytest said, its last line first, and whether all passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", device]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(1 if small else min(8, max(1, (os.cpu_count() or 1) // 2)))]
    command += ["--one-in", "100", "-k", "golden or default"] if small else []
    done = subprocess.run([*command, "tests/gpu"], cwd=ROOT, text=True, stdout=-1, stderr=-2, check=False)
    last = (done.stdout.strip().splitlines() or ["pytest said nothing"])[-1]
    return {"said": last, "passed": done.returncode == 0 and "passed" in last, "output": done.stdout}


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
        "optax.adamw": lambda: JaxSteps(tx, weights, jax_device(device)),
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
        steps[f"JAX: {name}"] = lambda name=name: jax_steps(name, weights, jax_device(device))
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


def _print(rows: list[dict[str, Any]]) -> None:
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
    if reason := why_absent(device):
        print(f"gpu.py: {reason} Or use --device cpu --small.")
        return 2
    found = bits(device, small)
    print(found["said"] if found["passed"] else found["output"], flush=True)
    names = list(settings(halfstep_jax))[: 1 if small else None]
    # A thousand million parameters either way.
    layouts = {"1 array": (1, (31250, 32000)), "300 arrays": (300, (1824, 1824))}
    layouts = {"2 arrays": (2, (64, 512))} if small else layouts
    rounds, record = 1 if small else 10, {"machine": platform.platform(), "device": device, "bits": found}
    for layout, (leaves, shape) in layouts.items():
        rows = record[layout] = times(device, names, leaves, shape, rounds)
        print(f"\n{layout}")
        _print(rows)
    if arguments.json:
        record["versions"] = {"jax": jax.__version__, "torch": torch.__version__}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(not found["passed"])


if __name__ == "__main__":
    sys.exit(main())
