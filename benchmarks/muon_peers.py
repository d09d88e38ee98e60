"""Muon of several libraries: what bfloat16 weights cost a run, whether small updates arrive, time of a step.

    python benchmarks/muon_peers.py [--steps 400] [--json benchmarks/results/NAME.json]

Digits with bfloat16 weights, beside a run of the same library with float32 weights, as each has a rule of its
own; what bfloat16 weights at 2^-10 move in 50 steps at a rate of 1e-6; times of a step on matrices of 512 x
512, all libraries in turn in one run. HeavyBall is left out where it is not installed. The record is that of
`quality.py muon`: what stands there is kept.
"""

import argparse
import functools
import importlib.metadata
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import torch
import training
from torch.nn import functional

import halfstep_jax as hs
import halfstep_torch
import report

RUNS, MATRICES, SIZE, SEEDS, RATE = 15, 4, 512, 4, 1e-2
SMALL_LR, SMALL_STEPS, SMALL_START = 1e-6, 50, 2.0**-10
Named = list[tuple[str, torch.nn.Parameter]]
OURS, TORCH = "halfstep_torch.Muon", f"torch.optim.Muon {torch.__version__}"


def _params(named: Named) -> list[torch.nn.Parameter]:
    return [p for _, p in named]


def in_torch() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Return what makes the optimizer of each library, from named matrices, lr and weight_decay."""
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        OURS: functools.partial(halfstep_torch.Muon, compile=False),
        TORCH: lambda named, **options: torch.optim.Muon(_params(named), **options),
    }
    try:
        import heavyball
    except ImportError:
        print("HeavyBall is not installed: left out", file=sys.stderr)
        return makers
    name = f"heavyball.Muon {importlib.metadata.version('heavyball')}"
    return makers | {name: lambda named, **o: heavyball.Muon(_params(named), compile_step=False, **o)}


IN_JAX = {
    "halfstep_jax.muon": hs.muon,
    f"optax.contrib.muon {optax.__version__}": optax.contrib.muon,
}


def on_digits(steps: int) -> list[dict[str, Any]]:
    """Train digits in torch as `quality.py muon` does in JAX; return loss, dist and proj of each library."""
    x, y = (torch.from_numpy(np.array(array)) for array in training.data())
    starts = [jax.tree.map(np.array, training.initial(seed, "float32")) for seed in range(SEEDS)]
    results, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # of matrices as small as these more threads only wait
    for name, make in in_torch().items():
        ends, losses = {}, {}
        for dtype in (torch.float32, torch.bfloat16):
            trained = [_train(make, start, k, dtype, steps, x, y) for k, start in enumerate(starts)]
            ends[dtype], losses[dtype] = (np.stack(figures) for figures in zip(*trained, strict=True))
        start = np.stack([_flat(_weights(start, torch.float32)) for start in starts])
        wide, narrow = (training.Ends(start, ends[dtype], losses[dtype], 0, 0) for dtype in ends)
        results.append({"name": name} | narrow.beside(wide))
    torch.set_num_threads(threads)
    return results


def _train(make: Callable, start: Any, seed: int, dtype: torch.dtype, steps: int, x, y):
    """Return weights and the loss of a run: matrices by Muon, biases in float32 by AdamW."""
    named = _weights(start, dtype)
    matrices = [(name, p) for name, p in named if p.ndim == 2]
    rest = torch.optim.AdamW([p for _, p in named if p.ndim == 1], lr=RATE, weight_decay=0.0)
    optimizers = [make(matrices, lr=RATE, weight_decay=0.0), rest]
    order = jax.random.key(seed + 1)
    draw = jax.vmap(lambda t: jax.random.randint(jax.random.fold_in(order, t), (training.BATCH,), 0, len(x)))
    batches = torch.from_numpy(np.array(draw(jnp.arange(steps)))).long()
    for step, batch in enumerate(batches):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 + np.cos(np.pi * step / steps)) / 2
        _loss(named, x[batch], y[batch]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return _flat(named), float(_loss(named, x, y))


def _weights(start: Any, dtype: torch.dtype) -> Named:
    """Return the network's weights in torch's orientation: outputs by inputs."""
    named = []
    for layer, arrays in start.items():
        kernel = torch.from_numpy(arrays["kernel"].T.copy()).to(dtype)
        named += [(f"{layer}.weight", kernel), (f"{layer}.bias", torch.from_numpy(arrays["bias"].copy()))]
    return [(name, torch.nn.Parameter(x)) for name, x in named]


def _loss(named: Named, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    params = _params(named)
    for i in range(0, len(params), 2):
        x = functional.linear(x, params[i].float(), params[i + 1])
        x = functional.gelu(x, approximate="tanh") if i < len(params) - 2 else x
    return functional.cross_entropy(x, y.long())


def _flat(named: Iterable[tuple[str, torch.Tensor]]) -> np.ndarray:
    return np.concatenate([p.detach().double().numpy().ravel() for _, p in named])


def small_updates() -> dict[str, float]:
    """Return of each library what bfloat16 weights move at a low rate, over what float32 weights do."""
    shares = {}
    g = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name, make in in_torch().items():
        shares[name] = _share(functools.partial(_moved_in_torch, make, g), torch.bfloat16, torch.float32)
    for name, make in IN_JAX.items():
        gradient = jnp.asarray(g.float().numpy())
        shares[name] = _share(functools.partial(_moved_in_jax, make, gradient), jnp.bfloat16, jnp.float32)
    return shares


def _share(moved: Callable[[Any], np.ndarray], narrow: Any, wide: Any) -> float:
    truth = moved(wide)
    return float((moved(narrow) * truth).sum() / (truth * truth).sum())


def _moved_in_torch(make: Callable, g: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    p = torch.nn.Parameter(torch.full_like(g, SMALL_START, dtype=dtype))
    optimizer = make([("w", p)], lr=SMALL_LR, weight_decay=0.0)
    for _ in range(SMALL_STEPS):
        p.grad = g.to(dtype, copy=True)
        optimizer.step()
    return p.detach().double().numpy() - SMALL_START


def _moved_in_jax(make: Callable, g: jax.Array, dtype: Any) -> np.ndarray:
    tx, params = make(SMALL_LR), {"w": jnp.full(g.shape, SMALL_START, dtype)}

    def step(carry, _):
        params, state = carry
        updates, state = tx.update({"w": g.astype(dtype)}, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, None, SMALL_STEPS))(
        (params, tx.init(params))
    )
    return np.asarray(params["w"], np.float64) - SMALL_START


def times() -> dict[str, float]:
    """Return the milliseconds of a step of each library, interleaved: medians."""
    steps = {**_torch_steps(), **_jax_steps()}
    for step in steps.values():
        step()
        step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(RUNS):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            taken[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in taken.items()}


def _torch_steps() -> dict[str, Callable[[], Any]]:
    makers = in_torch()
    makers[f"{OURS}, ns_dtype=bfloat16"] = functools.partial(makers[OURS], ns_dtype="bfloat16")
    steps = {}
    for name, make in makers.items():
        gen = torch.Generator().manual_seed(0)
        named = [(f"w{i}", torch.nn.Parameter(torch.zeros(SIZE, SIZE).bfloat16())) for i in range(MATRICES)]
        grads = [torch.randn(SIZE, SIZE, generator=gen).bfloat16() for _ in named]
        optimizer = make(named, lr=1e-3, weight_decay=0.0)
        steps[f"{name}, bfloat16 weights"] = _with_gradients(optimizer, _params(named), grads)
    return steps


def _with_gradients(optimizer: torch.optim.Optimizer, params: list, grads: list) -> Callable[[], Any]:
    """Return a step that sets the gradients first: HeavyBall drops them as it steps."""

    def step() -> None:
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()

    return step


def _jax_steps() -> dict[str, Callable[[], Any]]:
    steps = {}
    for name, make in IN_JAX.items():
        tx, params = make(1e-3), {f"w{i}": jnp.zeros((SIZE, SIZE), jnp.bfloat16) for i in range(MATRICES)}
        keys = jax.random.split(jax.random.key(0), MATRICES)
        g = {f"w{i}": jax.random.normal(key, (SIZE, SIZE), jnp.bfloat16) for i, key in enumerate(keys)}
        state, update = tx.init(params), jax.jit(tx.update)
        step = lambda update=update, g=g, s=state, p=params: jax.block_until_ready(update(g, s, p))  # noqa: E731
        steps[f"{name}, bfloat16 weights"] = step
    return steps


def main() -> int:
    """Print the tables, and whether they show what they must."""
    parser = argparse.ArgumentParser(description="Muon of several libraries, with bfloat16 weights.")
    parser.add_argument("--steps", type=int, default=400, help="of training, by default 400")
    parser.add_argument("--json", type=pathlib.Path, help="the record, read and written")
    arguments = parser.parse_args()
    trained, moved, taken = on_digits(arguments.steps), small_updates(), times()
    report.print_table(
        "<bfloat16 weights, in torch | training loss | dist | proj",
        ((r["name"], f"{r['loss']:.5f}", f"{r['dist']:.4f}", f"{r['proj']:.4f}") for r in trained),
    )
    report.print_table(
        "<bfloat16 weights, rate 1e-6 | movement over float32's", ((x, f"{y:.3f}") for x, y in moved.items())
    )
    report.print_table("<step of four matrices | ms", ((name, f"{ms:.1f}") for name, ms in taken.items()))
    dist = {row["name"]: row["dist"] for row in trained}
    held = {
        "bfloat16 weights: halfstep has under half of the dist of torch.optim.Muon": dist[OURS]
        < dist[TORCH] / 2,
        "at a rate of 1e-6 ours move 0.98 to 1.02 of what float32's do": all(
            abs(share - 1) <= 0.02 for name, share in moved.items() if name.startswith("halfstep")
        ),
        "at a rate of 1e-6 those of torch.optim.Muon stay where they are": moved[TORCH] == 0,
    }
    record = arguments.json
    before = json.loads(record.read_text()) if record and record.exists() else {}
    figures = {"libraries": trained, "small updates": moved, "milliseconds": taken}
    return report.finish(held, before | figures, record)


if __name__ == "__main__":
    sys.exit(main())
