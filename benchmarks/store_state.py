"""What low-bit state does to training by Optax's own transforms, each against its own float32 state.

    python benchmarks/store_state.py [--steps 400] [--json benchmarks/results/NAME.json]

The network, data and measures of benchmarks/quality.py, float32 weights, two seeds. Each transform is
trained with its state as it is, with `store_state(..., "bfloat16")`, and with `store_state` in
float8_e4m3fn in blocks of 128. It is trained once more with another order of the batches, which shows how
much of dist is noise. Bytes are optimizer state per parameter, counted from the arrays.

Muon is the exception. It makes all directions of its momentum equally long, also directions that are mostly
rounding errors. In 8 bits its run goes another way.
"""

import dataclasses
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from quality import BATCH, data, flat, initial, loss
from tqdm import tqdm

import halfstep_jax as hs
import report

SEEDS = 2
# Copies of weights in a state: in 8 bits they are worth nothing, and stay in float32.
COPIES = ("z", "params0")


@dataclasses.dataclass(frozen=True)
class Row:
    """One transform.

    Attributes:
        name: for the table.
        make: from a learning rate or schedule to the transform.
        rate: its largest learning rate; a cosine takes it to 0.
        scheduled: whether it takes a schedule.
    """

    name: str
    make: Callable
    rate: float
    scheduled: bool = True


ROWS = (
    Row("adam", optax.adam, 1e-3),
    Row("adamw", optax.adamw, 1e-3),
    Row("amsgrad", optax.amsgrad, 1e-3),
    Row("adabelief", optax.adabelief, 1e-3),
    Row("adamax", optax.adamax, 2e-3),
    Row("lion", optax.lion, 3e-4),
    Row("nadam", optax.nadam, 1e-3),
    Row("novograd", optax.novograd, 1e-2),
    Row("radam", optax.radam, 3e-3),
    Row("rmsprop", optax.rmsprop, 1e-3),
    Row("yogi", optax.yogi, 3e-3),
    Row("sgd, momentum 0.9", lambda rate: optax.sgd(rate, 0.9), 0.1),
    Row("lamb", optax.lamb, 1e-2),
    Row("muon", optax.contrib.muon, 1e-2),
    Row("prodigy", lambda rate: optax.contrib.prodigy(rate), 1.0),
    Row("schedule_free (adamw)", optax.contrib.schedule_free_adamw, 3e-3, scheduled=False),
)

STATES: dict[str, object] = {
    "float32": None,
    "bfloat16": "bfloat16",
    "fp8": hs.scaled("float8_e4m3fn", 128, min_size=0),
}


def transform(row: Row, state: object, steps: int) -> optax.GradientTransformationExtraArgs:
    """Return the transform of a row with its state kept in a format, or as it is."""
    rate = optax.cosine_decay_schedule(row.rate, steps) if row.scheduled else row.rate
    inner = optax.with_extra_args_support(row.make(rate))
    if state is None:
        return inner
    return hs.store_state(inner, state, select=lambda name, array: not set(name.split("/")) & set(COPIES))


def train(row: Row, state: object, steps: int, x: jax.Array, y: jax.Array, orders: int = 1):
    """Train all seeds, with so many orders of the batches.

    Returns:
        Weights (orders, seeds, parameters), training losses of the first order, bytes of state per parameter.
    """
    tx = transform(row, state, steps)

    def run(order, seed):
        params = initial(seed, "float32")
        opt_state = tx.init(params)
        if state is not None:
            words = jnp.stack([jnp.uint32(0), seed.astype(jnp.uint32)])
            opt_state = optax.tree.set(opt_state, seed=words)
        batches = jax.random.key(1000 * order + seed + 1)

        def step(carry, t):
            params, opt_state = carry
            rows = jax.random.randint(jax.random.fold_in(batches, t), (BATCH,), 0, x.shape[0])
            updates, opt_state = tx.update(jax.grad(loss)(params, x[rows], y[rows]), opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        (params, opt_state), _ = jax.lax.scan(step, (params, opt_state), jnp.arange(steps))
        return params, loss(params, x, y), opt_state

    of_all = jnp.arange(orders).repeat(SEEDS), jnp.tile(jnp.arange(SEEDS), orders)
    params, losses, opt_state = jax.jit(jax.vmap(run))(*of_all)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(opt_state))
    return flat(params).reshape(orders, SEEDS, -1), np.asarray(losses)[:SEEDS], stored / count


def compare(reference: np.ndarray, path: np.ndarray, start: np.ndarray) -> dict[str, float]:
    """Return dist and proj of a path, the mean over seeds."""
    moved = reference - start
    length = np.linalg.norm(moved, axis=1)
    dist = np.linalg.norm(path - reference, axis=1) / length
    proj = ((path - start) * moved).sum(1) / length**2
    return {"dist": float(dist.mean()), "proj": float(proj.mean())}


def run_all(steps: int, rows: tuple[Row, ...] = ROWS) -> list[dict]:
    """Train every transform with every state."""
    x, y = data()
    start = flat(jax.vmap(lambda seed: initial(seed, "float32"))(jnp.arange(SEEDS)))
    results, reference = [], np.zeros_like(start)
    for row in tqdm(rows, unit="transform"):
        result: dict = {"name": row.name}
        for name, state in STATES.items():
            paths, losses, stored = train(row, state, steps, x, y, orders=2 if state is None else 1)
            if state is None:
                reference, other = paths
                result["another order"] = compare(reference, other, start)
            of_path = compare(reference, paths[0], start)
            result[name] = {"bytes": stored, "loss": float(losses.mean()), **of_path}
        results.append(result)
    return results


def claims(results: list[dict]) -> dict[str, bool]:
    """Return what the table must show, by sentence."""
    return {
        "bfloat16 state: dist below another order of the batches, for every transform": all(
            row["bfloat16"]["dist"] < row["another order"]["dist"] for row in results
        ),
        "fp8 state: dist below another order of the batches, for every transform but muon": all(
            row["fp8"]["dist"] < row["another order"]["dist"] for row in results if row["name"] != "muon"
        ),
        "fp8 state: |proj - 1| < 0.015, for every transform but muon": all(
            abs(row["fp8"]["proj"] - 1) < 0.015 for row in results if row["name"] != "muon"
        ),
    }


def main() -> int:
    """Print the table, and whether it shows what it must."""
    arguments = report.arguments("Train digits by Optax's transforms with low-bit state.", steps=400)
    results = run_all(arguments.steps)
    report.print_table(
        "<transform | bytes: float32, bf16, fp8 | bf16: dist, proj | fp8: dist, proj | dist, another order",
        map(cells, results),
    )
    return report.finish(claims(results), results, arguments.json)


def cells(row: dict) -> tuple[str, ...]:
    """Return the cells of a transform."""
    stored = ", ".join(f"{row[name]['bytes']:.2f}" for name in STATES)
    figures = (f"{row[name]['dist']:.4f}, {row[name]['proj']:.4f}" for name in ("bfloat16", "fp8"))
    return row["name"], stored, *figures, f"{row['another order']['dist']:.3f}"


if __name__ == "__main__":
    sys.exit(main())
