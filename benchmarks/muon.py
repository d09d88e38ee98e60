"""Muon: what each way to store its momentum does to training, and its time beside other libraries'.

    python benchmarks/muon.py [--steps 400] [--transformer] [--json benchmarks/results/NAME.json]

The network and the figures are those of `quality.py`, with four seeds. Every kernel is under Muon at a rate
of 1e-2 on a cosine, and biases are under AdamW at the same rate. Weights are float32 unless the row names
another dtype; *dist* and *proj* are relative to the first row. `--transformer` trains the demo's character
transformer as `transformer.py` does, and compares validation losses. Its matrices are under Muon at 3e-3, and
the rest is under AdamW at 3e-4. The other tables (`muon_peers.py`) are of several libraries: digits with
bfloat16 weights, beside float32 weights of the same library; what bfloat16 weights at 2^-10 move in 50 steps
at a rate of 1e-6; times of a step on matrices of 512 x 512, all libraries in turn in one run.
"""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import muon_peers
import numpy as np
import optax
import optax.contrib
import quality
from tqdm import tqdm

import halfstep_jax as hs
import report

LR, SEEDS = 1e-2, 4


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
    Row("optax.contrib.muon; bfloat16 weights", None, "bfloat16"),
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
        named = {"name": row.name, "loss": float(losses.mean())}
        results.append(named | quality.compare(end, reference, start))
        tqdm.write(str(results[-1]), file=sys.stderr)
    return results


def on_transformer(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Train some rows on the character transformer; return losses on validation text over float32's."""
    import transformer

    transformer.SEEDS = seeds
    setting, text = transformer.demo.Recipe(steps=steps), transformer.load_text()
    results, truth = [], None
    for row in (row for row in ROWS if row.name in ON_TRANSFORMER):
        order = transformer.OTHER_ORDER * row.order
        trained = transformer.train(transform(row, 3e-3, 3e-4), order, setting, text)
        truth = trained if truth is None else truth
        results.append({"name": row.name, **transformer.compare(trained, truth)})
        tqdm.write(str(results[-1]), file=sys.stderr)
    return results


def claims(
    digits: list[dict], transformed: list[dict], peers: list[dict], moved: dict[str, float]
) -> dict[str, bool]:
    """Return what the tables must show, by sentence."""
    row = {row["name"]: row for row in digits}
    of_library = {row["name"]: row for row in peers}
    noise = row["float32, another batch order"]["dist"]
    held = {
        "scaled float16: dist <= 0.03 and |proj - 1| <= 0.002": row[FP16]["dist"] <= 0.03
        and abs(row[FP16]["proj"] - 1) <= 0.002,
        "int8 in 32, fine: dist <= 0.40 and proj >= 0.91": row[INT8]["dist"] <= 0.40
        and row[INT8]["proj"] >= 0.91,
        "int8 in 128 and float8: further than another batch order": noise
        < min(row["int8, 128"]["dist"], row["float8_e4m3fn, 128"]["dist"]),
        "optax.contrib.muon in float32: dist <= 0.03": row["optax.contrib.muon, float32"]["dist"] <= 0.03,
        "bfloat16 weights: halfstep_torch has under half of the dist of torch.optim.Muon": (
            of_library[muon_peers.OURS]["dist"] < of_library[muon_peers.TORCH]["dist"] / 2
        ),
        "at a rate of 1e-6 halfstep's bfloat16 weights move 0.98 to 1.02 of what float32's do": all(
            abs(share - 1) <= 0.02 for name, share in moved.items() if name.startswith("halfstep")
        ),
        "at a rate of 1e-6 those of torch.optim.Muon stay where they are": moved[muon_peers.TORCH] == 0,
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
    parser.add_argument("--seeds", type=int, default=3, help="of the transformer, by default 3")
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
    peers = muon_peers.on_digits(LR, arguments.steps, SEEDS)
    report.print_table(
        "<bfloat16 weights, in torch | training loss | dist | proj",
        ((r["name"], f"{r['loss']:.5f}", f"{r['dist']:.4f}", f"{r['proj']:.4f}") for r in peers),
    )
    moved = muon_peers.small_updates()
    report.print_table(
        "<bfloat16 weights, rate 1e-6 | movement over float32's", ((x, f"{y:.3f}") for x, y in moved.items())
    )
    taken = muon_peers.times()
    report.print_table("<step of four matrices | ms", ((name, f"{ms:.1f}") for name, ms in taken.items()))
    figures = {"digits": digits, "transformer": transformed, "libraries": peers}
    figures |= {"small updates": moved, "milliseconds": taken}
    return report.finish(claims(digits, transformed, peers, moved), figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
