"""Train one small model in Flax and in PyTorch and count the bits that differ; `make twin` runs this.

First on the same recorded gradients, under eight recipes: no bit of a weight may differ. Then each framework
on its own gradients: how far apart the losses end, beside what another seed does. The torch weights are the
Flax ones, transposed, through `halfstep_torch.bridge`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import flax.linen as linen
import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import optax
import torch
from sklearn.datasets import load_digits
from tqdm import tqdm

import halfstep_jax
import halfstep_torch
from halfstep_torch.bridge import SourceView, name_map

FEATURES, HIDDEN, CLASSES, BATCH, RATE = 64, 128, 10, 64, 3e-3
SEEDS = (0, 1, 2)


def recipes(package: Any) -> dict[str, dict[str, Any]]:
    """Return the eight recipes: the six by name, and two with scaled fp8 and with tables."""
    names = ("full_precision", "near_float32", "sixteen_bit", "eight_bit", "one_pass", "four_bit")
    fp8 = {"mu_dtype": package.scaled("float8_e4m3fn"), "nu_dtype": package.scaled("ufloat8_e5m3")}
    tables = {"mu_dtype": package.codebook("dynamic8"), "nu_dtype": package.codebook("udynamic8")}
    return {name: dict(getattr(package.recipes, name)) for name in names} | {
        "fp8, compensated": fp8 | {"param_storage": "compensated"},
        "tables, master": tables | {"param_storage": "master"},
    }


class Model(linen.Module):
    """Two layers, computing in bfloat16."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of digits."""
        x = linen.relu(linen.Dense(HIDDEN, name="hidden", param_dtype=jnp.bfloat16)(x))
        return linen.Dense(CLASSES, name="head", param_dtype=jnp.bfloat16)(x).astype(jnp.float32)


def torch_model() -> torch.nn.Module:
    """Return the same in PyTorch."""
    model = torch.nn.Sequential()
    model.add_module("hidden", torch.nn.Linear(FEATURES, HIDDEN))
    model.add_module("relu", torch.nn.ReLU())
    model.add_module("head", torch.nn.Linear(HIDDEN, CLASSES))
    return model.to(torch.bfloat16)


class Data(NamedTuple):
    """The digits, in bfloat16's numbers, and the batches of a seed."""

    x: np.ndarray
    y: np.ndarray
    batches: np.ndarray


def data(seed: int, steps: int) -> Data:
    """Return digits and the indices of each batch."""
    digits = load_digits()
    rng = np.random.default_rng(seed)
    batches = rng.integers(0, len(digits.target), (steps, BATCH))
    return Data((digits.data / 16).astype(np.float32), digits.target, batches)


def loss_of(params: Any, x: Any, y: Any) -> jax.Array:
    """Return the mean cross-entropy of a batch."""
    logits = Model().apply({"params": params}, jnp.asarray(x, jnp.bfloat16))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def first_params(seed: int) -> Any:
    """Return the first weights of a seed, in bfloat16."""
    return Model().init(jax.random.key(seed), jnp.zeros((1, FEATURES), jnp.bfloat16))["params"]


def jitted_step(tx: Any) -> Any:
    """Return one step of a transform on given gradients."""

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def recorded_gradients(steps: int) -> list[Any]:
    """Return the gradients along a run of optax.adamw."""
    d, params, tx = data(0, steps), first_params(0), optax.adamw(RATE)
    gradient, step, state, record = jax.jit(jax.grad(loss_of)), jitted_step(tx), tx.init(params), []
    for batch in d.batches:
        record.append(gradient(params, d.x[batch], d.y[batch]))
        params, state = step(params, state, record[-1])
    return record


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """Return the leaves of a tree by name, as patterns."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(k.key for k in path): np.asarray(x).view(np.int16) for path, x in paths}


def torch_twin(params: Any, options: dict[str, Any]) -> tuple[torch.nn.Module, SourceView, Any]:
    """Return the torch model with the weights of a Flax one, and its optimizer."""
    model = torch_model()
    view = SourceView(model, name_map(params, model))
    with torch.no_grad():
        for name, bits in leaves(params).items():
            view.get_parameter(name).copy_(torch.from_numpy(bits.copy()).view(torch.bfloat16))
    make = halfstep_torch.AdamW
    return model, view, view.optimizer(make, lr=RATE, weight_decay=0.1, seed=1, compile=False, **options)


def differing_bits(name: str, record: list[Any]) -> tuple[int, int]:
    """Return how many bits of the weights differ after a run on recorded gradients, and of how many."""
    params = first_params(0)
    tx = halfstep_jax.adamw(RATE, weight_decay=0.1, seed=1, **recipes(halfstep_jax)[name])
    model, view, optimizer = torch_twin(params, recipes(halfstep_torch)[name])
    mapping, sources = name_map(params, model), dict(model.named_parameters())
    step, state = jitted_step(tx), tx.init(params)
    for grads in record:
        for leaf, bits in leaves(grads).items():
            source = sources[mapping[leaf].parameters[0]]
            source.grad = torch.zeros_like(source)
            mapping[leaf].view(source.grad).copy_(torch.from_numpy(bits.copy()).view(torch.bfloat16))
        optimizer.step()
        params, state = step(params, state, grads)
    count = total = 0
    for leaf, bits in leaves(params).items():
        theirs = view.get_parameter(leaf).detach().contiguous().view(torch.int16).numpy()
        count += int(np.bitwise_count((bits ^ theirs).view(np.uint16)).sum())
        total += 16 * bits.size
    return count, total


def own_gradients(seed: int, steps: int, every: int = 20) -> dict[str, list[float]]:
    """Return the losses on all digits of both frameworks, each on its own gradients."""
    d, params = data(seed, steps), first_params(seed)
    tx = halfstep_jax.adamw(RATE, weight_decay=0.1, seed=1)
    model, view, optimizer = torch_twin(params, {})
    gradient, evaluate, step = jax.jit(jax.grad(loss_of)), jax.jit(loss_of), jitted_step(tx)
    state, losses = tx.init(params), {"Flax": [], "PyTorch": []}
    x, y = torch.from_numpy(d.x).bfloat16(), torch.from_numpy(d.y)
    for t, batch in enumerate(d.batches):
        if t % every == 0 or t == steps - 1:
            theirs = {name: p.detach() for name, p in view.named_parameters()}
            tree = jax.tree_util.tree_map_with_path(
                lambda path, p, theirs=theirs: _as_jax(theirs["/".join(k.key for k in path)]), params
            )
            losses["Flax"].append(float(evaluate(params, d.x, d.y)))
            losses["PyTorch"].append(float(evaluate(tree, d.x, d.y)))
        params, state = step(params, state, gradient(params, d.x[batch], d.y[batch]))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]).float(), y[batch]).backward()
        optimizer.step()
    return losses


def _as_jax(tensor: torch.Tensor) -> jax.Array:
    bits = tensor.contiguous().view(torch.int16).numpy().copy()
    return jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)


def draw(runs: dict[int, dict[str, list[float]]], path: Path) -> None:
    """Draw the losses of both frameworks for every seed."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for color, (seed, losses) in zip(("#0072b2", "#d55e00", "#009e73"), runs.items(), strict=False):
        steps = [20 * i for i in range(len(losses["Flax"]))]
        axes.plot(steps, losses["Flax"], color=color, linewidth=4, alpha=0.4, label=f"seed {seed}, Flax")
        axes.plot(steps, losses["PyTorch"], color=color, linewidth=1.2, label=f"seed {seed}, PyTorch")
    axes.set(
        xlabel="step",
        ylabel="loss",
        yscale="log",
        title="Own gradients: the framework matters less than the seed",
    )
    axes.legend(fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run both parts; return 1 if a bit differs, or frameworks end further apart than seeds."""
    parser = argparse.ArgumentParser(description="Count the bits that differ between Flax and PyTorch.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--recipe", action="append", choices=list(recipes(halfstep_jax)), help="all by default"
    )
    parser.add_argument("--out", type=Path, default=Path("out/twin.png"))
    options = parser.parse_args(argv)
    record, failed = recorded_gradients(options.steps), False
    print(f"{options.steps} steps on the same gradients\n\n| recipe | differing bits | of |\n|---|--:|--:|")
    for name in options.recipe or recipes(halfstep_jax):
        count, total = differing_bits(name, record)
        print(f"| {name} | {count} | {total:,} |", flush=True)
        failed |= count > 0
    runs = {
        seed: own_gradients(seed, options.steps) for seed in tqdm(SEEDS, desc="own gradients", disable=None)
    }
    apart = max(abs(losses["Flax"][-1] - losses["PyTorch"][-1]) for losses in runs.values())
    ends = [losses["Flax"][-1] for losses in runs.values()]
    spread = max(ends) - min(ends)
    print(f"\nOwn gradients: losses end at {min(ends):.4f} to {max(ends):.4f}, seeds {spread:.4f} apart;")
    print(f"for one seed Flax and PyTorch end at most {apart:.4f} apart.")
    draw(runs, options.out)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
