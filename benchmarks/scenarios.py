"""How far weights end from float32's under 23 kinds of made-up gradients: ours, bitsandbytes, torchao.

    make peers     # once: an environment that has the other libraries too
    .venv-peers/bin/python benchmarks/scenarios.py [--only NAME ...] [--json benchmarks/results/NAME.json]

Without these libraries it shows ours alone. One array of 32 x 128 for each scenario, float32 weights that
start at 0, Adam for 3,000 steps at 1e-3, one seed. A gradient is its size times 1 plus normal noise, the
sizes of elements lognormal (sigma 1) around 0.01, except as `SCENARIOS` says. Printed is |w - w32| / |w32|,
and in brackets the projection of w on w32 where that is off 1 by over 0.015; then how far weights walk once
their gradients have stopped ("idle": root mean square and mean, in learning rates). Differences under 10 %
are noise. Entries of `STORED` have bfloat16 weights, and means over three seeds of the random words; the
record has the standard deviation of the first figure too.
"""

import argparse
import importlib
import importlib.metadata
import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import halfstep_jax as hs

STEPS, LR, SHAPE = 3000, 1e-3, (32, 128)
SEEDS = 3
OURS = ("one_pass", "eight_bit", "four_bit")
STORED: dict[str, dict[str, str]] = {
    f"bfloat16 weights, {recipe}, {storage}": {"recipe": recipe, "param_storage": storage}
    for recipe in ("sixteen_bit", "eight_bit")
    for storage in ("stochastic", "feedback")
}
"""By name: how weights in bfloat16 are stored, for some recipes."""
PEERS = {
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit"),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit"),
    "torchao AdamW4bit": ("torchao.optim", "AdamW4bit"),
    "torchao AdamWFp8": ("torchao.optim", "AdamWFp8"),
}

_ROW = jnp.arange(SHAPE[0])[:, None]
_ELEMENT = jnp.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
_KEY = jax.random.key(11)
_SIZES = jnp.exp(jax.random.normal(jax.random.fold_in(_KEY, 2**31), SHAPE))


def _noisy(t: jax.Array) -> jax.Array:
    return 0.01 * _SIZES * (1 + _normal(t))


def _normal(t: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(_KEY, t), SHAPE)


def _heavy(t: jax.Array) -> jax.Array:
    tails = jax.random.t(jax.random.fold_in(_KEY, t + 10**6), 2.0, SHAPE)
    return 0.01 * _SIZES * (1 + tails)


def _touched(t: jax.Array, every: int, of: jax.Array) -> jax.Array:
    """Return gradients of the elements whose turn it is, one step in `every`."""
    return jnp.where((t + of) % every == 0, _noisy(t), 0)


SCENARIOS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "healthy": _noisy,
    "healthy, sizes alike": lambda t: 0.01 * (1 + _normal(t)),
    "spike 1e4x": lambda t: _noisy(t) * jnp.where(t == 1000, 1e4, 1),
    "spike 100x": lambda t: _noisy(t) * jnp.where(t == 1000, 100, 1),
    "zero 500 to 2,500": lambda t: jnp.where((t < 500) | (t >= 2500), _noisy(t), 0),
    "zero until 2,000": lambda t: jnp.where(t < 2000, 0, _noisy(t)),
    "alternating sign": lambda t: 0.01 * _SIZES * jnp.where(t % 2 == 0, 1, -1),
    "1e-6": lambda t: _noisy(t) * 1e-4,
    "1e-7": lambda t: _noisy(t) * 1e-5,
    "1e-8": lambda t: _noisy(t) * 1e-6,
    "1e-12": lambda t: _noisy(t) * 1e-10,
    "100": lambda t: 100 * jnp.sign(_SIZES) * (1 + 0.3 * _normal(t)),
    "1e4": lambda t: 1e4 * jnp.sign(_SIZES) * (1 + 0.3 * _normal(t)),
    "rows 1 step in 100": lambda t: _touched(t, 100, _ROW * 37),
    "rows 1 step in 1,000": lambda t: _touched(t, 1000, _ROW * 37),
    "elements 1 step in 300": lambda t: _touched(t, 300, _ELEMENT * 7),
    "shrinks 1,000x": lambda t: _noisy(t) * 10 ** (-3 * t / STEPS),
    "grows 1,000x": lambda t: _noisy(t) * 10 ** (3 * t / STEPS - 3),
    "heavy tails": _heavy,
    "lognormal, sigma 3": lambda t: 0.01 * _SIZES**3 * (1 + _normal(t)),
    "steady": lambda t: 0.01 * _SIZES,
    "10, one element 300x": lambda t: _noisy(t) * 1000 * jnp.where(_ELEMENT == 5, 300, 1),
    "row reborn": lambda t: jnp.where((_ROW % 2 == 0) | (t >= 2000), _noisy(t), 0),
}
"""By name: the gradients of a step."""


@jax.jit
def gradients(t: jax.Array) -> jax.Array:
    """Return the gradients of all scenarios, then those of "idle": noise that stops for odd columns."""
    stopped = (jnp.arange(SHAPE[1]) % 2 == 1) & (t >= 200)
    idle = jnp.where(stopped, 0, 0.01 * _normal(t))
    return jnp.stack([*(make(t) for make in SCENARIOS.values()), idle]).astype(jnp.float32)


def of_transform(tx: optax.GradientTransformationExtraArgs, seeds: int = 0) -> np.ndarray:
    """Return the weights at the end, and those of "idle" when its gradients stop.

    With `seeds`, weights are bfloat16, and there is an axis of seeds in front.
    """
    dtype = jnp.bfloat16 if seeds else jnp.float32
    zeros = {str(i): jnp.zeros(SHAPE, dtype) for i in range(len(SCENARIOS) + 1)}

    def step(carry, t):
        weights, state, at_stop = carry
        at_stop = jnp.where(t == 200, weights[str(len(SCENARIOS))], at_stop)
        updates, state = tx.update(dict(zip(zeros, gradients(t), strict=True)), state, weights)
        return (optax.apply_updates(weights, updates), state, at_stop), None

    def run(state):
        start = (zeros, state, jnp.zeros(SHAPE, dtype))
        (weights, _, at_stop), _ = jax.lax.scan(step, start, jnp.arange(STEPS))
        return jnp.stack([*(weights[name] for name in zeros), at_stop]).astype(jnp.float32)

    state = tx.init(zeros)
    if not seeds:
        return np.asarray(jax.jit(run)(state))
    words = (optax.tree.set(state, seed=jnp.array([0, seed], jnp.uint32)) for seed in range(seeds))
    return np.stack(list(map(jax.jit(run), words)))


def of_torch(module: str, name: str) -> np.ndarray:
    """Return the same of an optimizer of another library."""
    weights = [torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(len(SCENARIOS) + 1)]
    optimizer = getattr(importlib.import_module(module), name)(weights, lr=LR, weight_decay=0.0)
    at_stop = None
    for t in range(STEPS):
        at_stop = weights[-1].detach().clone() if t == 200 else at_stop
        for p, g in zip(weights, torch.tensor(np.asarray(gradients(t))), strict=True):
            p.grad = g
        optimizer.step()
    return np.stack([x.detach().numpy() for x in (*weights, at_stop)])


def figures(ends: np.ndarray, truth: np.ndarray) -> dict[str, tuple[float, float]]:
    """Return (dist, proj) of every scenario, and (rms, mean) of the idle weights' walk."""
    rows = {}
    for name, w, due in zip(SCENARIOS, ends, truth, strict=False):
        w, due = w.astype(np.float64).ravel(), due.astype(np.float64).ravel()
        rows[name] = (np.linalg.norm(w - due) / np.linalg.norm(due), w @ due / (due @ due))
    walk = (ends[-2] - ends[-1])[:, 1::2].astype(np.float64) / LR
    return rows | {"idle": (np.sqrt((walk**2).mean()), walk.mean())}


def figures_of_seeds(ends: np.ndarray, truth: np.ndarray) -> dict[str, tuple[float, float, float]]:
    """Return the means of `figures` over seeds, and the standard deviation of the first."""
    of_seed = [figures(end, truth) for end in ends]
    rows = {name: np.array([row[name] for row in of_seed]) for name in of_seed[0]}
    return {name: (*map(float, row.mean(0)), float(row[:, 0].std())) for name, row in rows.items()}


def text(name: str, row: tuple[float, ...]) -> str:
    """Return a cell of the table."""
    first, second, *_ = row
    if name == "idle":
        return f"{first:.2f}, {second:+.2f}"
    return f"{first:.3f}" + (f" ({second:.2f})" if not abs(second - 1) <= 0.015 else "")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="these optimizers, by name")
    parser.add_argument(
        "--json", type=pathlib.Path, help="also write the figures here, to those that stand there"
    )
    arguments = parser.parse_args()
    truth = of_transform(optax.adam(LR))
    results = {"float32": figures(truth, truth)}
    for name in (*OURS, *PEERS, *STORED):
        if name not in (arguments.only or (*OURS, *PEERS, *STORED)):
            continue
        if name in STORED:
            ends = of_transform(hs.adam(LR, **STORED[name]), SEEDS)
            results[name] = figures_of_seeds(ends, truth)
            continue
        try:
            of_entry = hs.adam(LR, **getattr(hs.recipes, name)) if name in OURS else None
            ends = of_transform(of_entry) if of_entry else of_torch(*PEERS[name])
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        results[name] = figures(ends, truth)
    print("| scenario |", " | ".join(results), "|\n|---|" + "--:|" * len(results))
    for scenario in results["float32"]:
        print("|", scenario, "|", " | ".join(text(scenario, row[scenario]) for row in results.values()), "|")
    if arguments.json:
        versions = {module.__name__: module.__version__ for module in (jax, optax, torch)}
        for package in ("bitsandbytes", "torchao"):
            if any(name.startswith(package) for name in results):
                versions[package] = importlib.metadata.version(package)
        before = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        figures_of = {"versions": versions, "results": results}
        both = {key: before.get(key, {}) | new for key, new in figures_of.items()}
        arguments.json.write_text(json.dumps(both, indent=1) + "\n")


if __name__ == "__main__":
    main()
