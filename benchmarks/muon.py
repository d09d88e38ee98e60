"""Muon: what each way to store its momentum does to training, and its time beside other libraries'.

    python benchmarks/muon.py [--steps 400] [--transformer] [--json benchmarks/results/NAME.json]

The network and the figures of `quality.py`, four seeds, every kernel under Muon at a rate of 1e-2 on a
cosine, biases under AdamW at the same. Weights are float32 but where the row says so; *dist* and *proj* are
relative to the first row. `--transformer` trains the demo's character transformer as `transformer.py` does,
its matrices under Muon at 3e-3 and the rest under AdamW at 3e-4, and compares validation losses. Times are
of a step on matrices of 512 x 512, all libraries in turn in one run; HeavyBall is left out where it is not
installed.
"""

import argparse
import dataclasses
import importlib.metadata
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import quality
import torch
from tqdm import tqdm

import halfstep_jax as hs
import halfstep_torch
import report

LR, SEEDS, RUNS, MATRICES = 1e-2, 4, 15, 4


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        name: for the tables.
        options: of `halfstep_jax.muon`; None is `optax.contrib.muon`.
        weights: dtype of the weights.
        order: which shuffling of the batches.
    """

    name: str
    options: dict[str, Any] | None
    weights: str = "float32"
    order: int = 0


def _scaled(dtype: str, block_size: int = 128, **options: str) -> dict[str, Any]:
    return {"mu_dtype": hs.scaled(dtype, block_size, 0, **options)}


F32 = {"mu_dtype": "float32"}
FP16, INT8 = "scaled float16, 128", "int8, 32, fine"
ROWS = (
    Row("float32", F32),
    Row("float32, another batch order", F32, order=1),
    Row(INT8, _scaled("int8", 32, scale="fine")),
    Row("optax.contrib.muon, float32", None),
    Row("float32, bias_correction", {**F32, "bias_correction": True}),
    Row("float32, products in bfloat16", {**F32, "ns_dtype": "bfloat16"}),
    Row(FP16, _scaled("float16")),
    Row("bfloat16", {"mu_dtype": "bfloat16"}),
    Row("int8, 128", _scaled("int8")),
    Row("float8_e4m3fn, 128", _scaled("float8_e4m3fn")),
    Row(f"{FP16}; bfloat16 weights, stochastic", _scaled("float16"), "bfloat16"),
    Row(f"{FP16}; bfloat16 weights, nearest", _scaled("float16") | {"param_storage": "nearest"}, "bfloat16"),
)
ON_TRANSFORMER = ("float32", "float32, another batch order", FP16, INT8)


def transform(row: Row, learning_rate: Any, adam_rate: Any = None) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a row; AdamW has Muon's rate unless its rate is given."""
    if row.options is None:
        plain = optax.contrib.muon(learning_rate, eps=1e-7, adam_learning_rate=adam_rate)
        return optax.with_extra_args_support(plain)
    return hs.muon(learning_rate, adam_learning_rate=adam_rate, matrices=_kernels, **row.options)


def _kernels(name: str, x: Any) -> bool | None:
    """Let Muon step every kernel of the small network: its first and last are matrices too."""
    return True if name.endswith("kernel") and x.ndim == 2 and "layer" in name.split("/")[0] else None


def train(row: Row, steps: int, x: jax.Array, y: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Train all seeds of a row on digits; return the weights and the training losses."""
    tx = transform(row, optax.cosine_decay_schedule(LR, steps))

    def run(seed: jax.Array):
        params = quality.initial(seed, row.weights)
        state, order = tx.init(params), jax.random.key(1000 * row.order + seed + 1)

        def step(carry, t):
            params, state = carry
            rows = jax.random.randint(jax.random.fold_in(order, t), (quality.BATCH,), 0, x.shape[0])
            updates, state = tx.update(jax.grad(quality.loss)(params, x[rows], y[rows]), state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, state), jnp.arange(steps))
        return params, quality.loss(params, x, y)

    params, losses = jax.jit(jax.vmap(run))(jnp.arange(SEEDS))
    return quality.flat(jax.tree.map(lambda w: w.astype(jnp.float32), params)), np.asarray(losses)


def on_digits(steps: int) -> list[dict[str, Any]]:
    """Train every row and compare it with the first."""
    x, y = quality.data()
    start = quality.flat(jax.vmap(lambda seed: quality.initial(seed, "float32"))(jnp.arange(SEEDS)))
    results, reference = [], None
    for row in tqdm(ROWS, unit="row"):
        end, losses = train(row, steps, x, y)
        reference = end if reference is None else reference
        moved = reference - start
        length = np.linalg.norm(moved, axis=1)
        dist = np.linalg.norm(end - reference, axis=1) / length
        figures = {"dist": dist, "proj": ((end - start) * moved).sum(1) / length**2, "loss": losses}
        results.append({"name": row.name} | {name: float(values.mean()) for name, values in figures.items()})
        results[-1]["spread"] = float(dist.std())
        tqdm.write(str(results[-1]), file=sys.stderr)
    return results


def on_transformer(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Train some rows on the character transformer; return losses on validation text over float32's."""
    import transformer

    transformer.SEEDS = seeds
    setting, text = transformer.demo.Recipe(steps=steps), transformer.load_text()
    results, truth = [], None
    for row in (row for row in ROWS if row.name in ON_TRANSFORMER):
        transformer.transform = lambda _, __, row=row: transform(row, 3e-3, 3e-4)
        plain = transformer.Row(row.name, None, transformer.OTHER_ORDER * row.order)
        trained = transformer.train(plain, setting, text)
        truth = trained if truth is None else truth
        results.append({"name": row.name, **transformer.compare(trained, truth)})
        tqdm.write(str(results[-1]), file=sys.stderr)
    return results


def times(size: int = 512) -> dict[str, float]:
    """Return the milliseconds of a step of each library, interleaved: medians."""
    steps = {**_torch_steps(size), **_jax_steps(size)}
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


def _torch_steps(size: int) -> dict[str, Callable[[], Any]]:
    makers = {
        "halfstep_torch.Muon": lambda named: halfstep_torch.Muon(named, compile=False),
        "halfstep_torch.Muon, ns_dtype=bfloat16": lambda named: halfstep_torch.Muon(
            named, compile=False, ns_dtype="bfloat16"
        ),
        f"torch.optim.Muon {torch.__version__}": lambda named: torch.optim.Muon([p for _, p in named]),
    }
    try:
        import heavyball

        makers[f"heavyball.Muon {importlib.metadata.version('heavyball')}"] = lambda named: heavyball.Muon(
            [p for _, p in named], compile_step=False
        )
    except ImportError:
        print("HeavyBall is not installed: left out", file=sys.stderr)
    steps = {}
    for name, make in makers.items():
        gen = torch.Generator().manual_seed(0)
        named = [(f"w{i}", torch.nn.Parameter(torch.zeros(size, size).bfloat16())) for i in range(MATRICES)]
        grads = [torch.randn(size, size, generator=gen).bfloat16() for _ in named]
        steps[f"{name}, bfloat16 weights"] = _with_gradients(make(named), [p for _, p in named], grads)
    return steps


def _with_gradients(optimizer: torch.optim.Optimizer, params: list, grads: list) -> Callable[[], Any]:
    """Return a step that sets the gradients first: HeavyBall drops them as it steps."""

    def step() -> None:
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()

    return step


def _jax_steps(size: int) -> dict[str, Callable[[], Any]]:
    steps = {}
    for name, tx in (
        ("halfstep_jax.muon", hs.muon(1e-3)),
        (f"optax.contrib.muon {optax.__version__}", optax.contrib.muon(1e-3)),
    ):
        params = {f"w{i}": jnp.zeros((size, size), jnp.bfloat16) for i in range(MATRICES)}
        keys = jax.random.split(jax.random.key(0), MATRICES)
        g = {f"w{i}": jax.random.normal(key, (size, size), jnp.bfloat16) for i, key in enumerate(keys)}
        state, update = tx.init(params), jax.jit(tx.update)
        step = lambda update=update, g=g, s=state, p=params: jax.block_until_ready(update(g, s, p))  # noqa: E731
        steps[f"{name}, bfloat16 weights"] = step
    return steps


def claims(digits: list[dict], transformed: list[dict]) -> dict[str, bool]:
    """Return what the tables must show, by sentence."""
    row = {row["name"]: row for row in digits}
    noise = row["float32, another batch order"]["dist"]
    held = {
        "scaled float16: dist <= 0.03 and |proj - 1| <= 0.002": row[FP16]["dist"] <= 0.03
        and abs(row[FP16]["proj"] - 1) <= 0.002,
        "int8 in 32, fine: dist <= 0.40 and proj >= 0.91": row[INT8]["dist"] <= 0.40
        and row[INT8]["proj"] >= 0.91,
        "int8 in 128 and float8: further than another batch order": noise
        < min(row["int8, 128"]["dist"], row["float8_e4m3fn, 128"]["dist"]),
        "optax.contrib.muon in float32: dist <= 0.03": row["optax.contrib.muon, float32"]["dist"] <= 0.03,
    }
    for figures in transformed:
        if figures["name"] in (FP16, INT8):
            held[f"transformer, {figures['name']}: |loss - float32| <= 0.003"] = abs(figures["loss"]) <= 0.003
    return held


def main() -> int:
    """Print the tables, and whether they show what they must."""
    parser = argparse.ArgumentParser(description="Train with every storage of Muon's momentum; time a step.")
    parser.add_argument("--steps", type=int, default=400, help="of training, by default 400")
    parser.add_argument("--transformer", action="store_true", help="train the transformer too")
    parser.add_argument("--seeds", type=int, default=1, help="of the transformer, by default 1")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    arguments = parser.parse_args()
    digits = on_digits(arguments.steps)
    report.print_table(
        "<momentum | training loss | dist | proj",
        ((r["name"], f"{r['loss']:.5f}", f"{r['dist']:.4f}", f"{r['proj']:.4f}") for r in digits),
    )
    transformed = on_transformer(arguments.steps, arguments.seeds) if arguments.transformer else []
    if transformed:
        report.print_table(
            "<momentum | bytes of state | loss over float32 | dist | proj",
            (
                (r["name"], f"{r['state']:.2f}", f"{r['loss']:+.4f}", f"{r['dist']:.4f}", f"{r['proj']:.4f}")
                for r in transformed
            ),
        )
    taken = times()
    report.print_table("<step of four matrices | ms", ((name, f"{ms:.1f}") for name, ms in taken.items()))
    figures = {"digits": digits, "transformer": transformed, "milliseconds": taken}
    return report.finish(claims(digits, transformed), figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
