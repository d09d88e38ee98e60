"""What each way to store weights and moments does to training, judged by the path and not by the last loss.

    python benchmarks/quality.py [--steps 1500] [--only TEXT ...] [--json benchmarks/results/NAME.json]

A 64-128-128-10 network on scikit-learn's bundled digits, AdamW, a cosine schedule from 1e-3, four seeds. For
each row: bytes of weights and state per parameter, counted from the arrays; the training loss;
*dist* = |w - w32| / |w32 - w0|; *proj*, the projection of the movement on float32's. A broken moment often
*lowers* the last loss: it takes longer steps. dist below what another order of the batches gives is noise;
proj off 1 by over 0.01 is bias. `--only one_pass eight_bit four_bit` has the rows in whose names one of
these texts stands; of what the tables must show, it checks what these rows can show.

A second table (`gradients.py`) shows what digits' gradients cannot: steady ones, tiny and huge ones, and ones
that stop.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping

import gradients
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import halfstep_jax as hs
import report

SEEDS, BATCH, LR, DECAY = 4, 128, 1e-3, 0.01
SIZES = (64, 128, 128, 10)


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        name: for the table.
        weights: dtype of the weights.
        options: of `halfstep_jax.adamw`; None is `optax.adamw` in float32.
        order: which shuffling of the batches.
    """

    name: str
    weights: str = "float32"
    options: dict | None = None
    order: int = 0


def _scaled(dtype: str) -> object:
    return hs.scaled(dtype, block_size=128, min_size=0)


def _codebook(table: str) -> object:
    return hs.codebook(table, block_size=128, min_size=0)


def _relative(dtype: str, block_size: int) -> object:
    return hs.relative(dtype, block_size, min_size=0)


def _moments(mu, nu, rounding: str = "stochastic", **others) -> dict:
    nearest = "nearest_unchecked"
    roundings = {"mu_rounding": rounding, "nu_rounding": rounding} if rounding == nearest else {}
    return {"mu_dtype": mu, "nu_dtype": nu, **roundings, **others}


BF16 = _moments("bfloat16", "bfloat16")
UNSIGNED = _moments("bfloat16", "ufloat16_e7m9")
F32 = _moments("float32", "float32")
FP8 = _moments(_scaled("float8_e4m3fn"), _scaled("ufloat8_e5m3"), mu_rounding="stochastic")
FP8_E4M3 = (_scaled("float8_e4m3fn"), _scaled("float8_e4m3fn"))
PLAIN = _moments(hs.relative("float8_e3m4"), "ufloat8_e6m2")
INT8 = _moments(_relative("int8", 128), _scaled("ufloat8_e5m3"))
INT4 = _moments(_relative("int4", 32), _scaled("ufloat8_e5m3"))
E5M3 = {"nu_dtype": _scaled("ufloat8_e5m3")}
MAPPED8 = (_codebook("dynamic8"), _codebook("udynamic8"))
EIGHT = hs.recipes.eight_bit | {"nu_dtype": _scaled("uroot8")}
FOUR = hs.recipes.four_bit | {"mu_dtype": _relative("int4", 32), "nu_dtype": _scaled("uroot8")}
NEAREST = "nearest_unchecked"

ROWS = (
    Row("float32, float32 (optax.adamw)"),
    Row("float32, another batch order", order=1),
    Row("float32, float32", options=F32),
    Row("float32; mu bf16, nu scaled fp16", options=_moments("bfloat16", _scaled("float16"))),
    Row("float32; bf16", options=BF16),
    Row("float32; mu bf16, nu ufloat16_e7m9", options=UNSIGNED),
    Row("float32; bf16 nearest", options=_moments("bfloat16", "bfloat16", NEAREST)),
    Row("float32; one_pass: mulaw8, uroot4_e4m4", options=dict(hs.recipes.one_pass)),
    Row("float32; eight_bit: relative e3m4 with feedback, uroot8", options=EIGHT),
    Row("float32; four_bit: relative int4 with feedback, uroot8", options=FOUR),
    Row("float32; mu relative e3m4, nu ufloat8_e6m2", options=PLAIN),
    Row("float32; mu relative e3m4, nu uroot8", options=EIGHT | {"mu_rounding": "stochastic"}),
    Row("float32; mu relative e3m4, nu ufloat8_e5m3", options=PLAIN | E5M3),
    Row("float32; mu relative int8, nu ufloat8_e5m3", options=INT8),
    Row("float32; mu relative int4, nu ufloat8_e5m3", options=INT4),
    Row("float32; fp8: mu e4m3fn, nu ufloat8_e5m3", options=FP8),
    Row("float32; fp8: mu e4m3fn, nu e4m3fn", options=_moments(*FP8_E4M3, mu_rounding="stochastic")),
    Row("float32; fp8 e4m3fn nearest", options=_moments(*FP8_E4M3, NEAREST)),
    Row("float32; int8 mu, nu ufloat8_e5m3", options=_moments(_scaled("int8"), _scaled("ufloat8_e5m3"))),
    Row("float32; 8-bit tables: dynamic8, udynamic8", options=_moments(*MAPPED8)),
    Row("float32; 8-bit tables, nearest", options=_moments(*MAPPED8, NEAREST)),
    Row("bf16 split16; float32", "bfloat16", {**F32, "param_storage": "split16"}),
    Row("bf16 split8; float32", "bfloat16", {**F32, "param_storage": "split8"}),
    Row("bf16 split8; bf16", "bfloat16", {**BF16, "param_storage": "split8"}),
    Row("bf16 split8; mu bf16, nu ufloat16_e7m9", "bfloat16", {**UNSIGNED, "param_storage": "split8"}),
    Row("bf16 compensated; float32", "bfloat16", {**F32, "param_storage": "compensated"}),
    Row("bf16 compensated; bf16", "bfloat16", {**BF16, "param_storage": "compensated"}),
    Row("bf16 stochastic; float32", "bfloat16", F32),
    Row("bf16 stochastic; bf16", "bfloat16", BF16),
    Row("bf16 stochastic; mu bf16, nu ufloat16_e7m9", "bfloat16", UNSIGNED),
    Row("bf16 stochastic; one_pass", "bfloat16", dict(hs.recipes.one_pass)),
    Row("bf16 stochastic; eight_bit", "bfloat16", EIGHT),
    Row("bf16 stochastic; four_bit", "bfloat16", FOUR),
    Row("bf16 stochastic; relative e3m4, ufloat8_e5m3", "bfloat16", PLAIN | E5M3),
    Row("bf16 stochastic; relative int8, ufloat8_e5m3", "bfloat16", INT8),
    Row("bf16 stochastic; relative int4, ufloat8_e5m3", "bfloat16", INT4),
    Row("bf16 stochastic; fp8", "bfloat16", FP8),
    Row("bf16 nearest; float32", "bfloat16", {**F32, "param_storage": "nearest"}),
    Row(
        "bf16 nearest; bf16 nearest",
        "bfloat16",
        _moments("bfloat16", "bfloat16", NEAREST, param_storage="nearest"),
    ),
)


def data() -> tuple[jax.Array, jax.Array]:
    """Return images scaled to [0, 1] and labels."""
    digits = load_digits()
    return jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)


def initial(seed: jax.Array, dtype: str):
    """Return weights that bfloat16 represents, so that all rows start at the same point."""
    keys = jax.random.split(jax.random.key(seed), len(SIZES) - 1)
    layers = {}
    for i, (key, n_in, n_out) in enumerate(zip(keys, SIZES[:-1], SIZES[1:], strict=True)):
        kernel = jax.random.normal(key, (n_in, n_out)) * np.float32(n_in**-0.5)
        layers[f"layer{i}"] = {"kernel": kernel, "bias": jnp.zeros(n_out)}
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(dtype), layers)


def logits(params, x: jax.Array) -> jax.Array:
    """Return what the network makes of images; arithmetic in float32, whatever the weights are stored in."""
    for i in range(len(SIZES) - 1):
        layer = params[f"layer{i}"]
        x = x @ layer["kernel"].astype(jnp.float32) + layer["bias"].astype(jnp.float32)
        # Smooth: at relu's kinks paths part, and the table would measure chaos (dist 0.09 for bf16).
        x = jax.nn.gelu(x) if i < len(SIZES) - 2 else x
    return x


def loss(params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def transform(row: Row, steps: int) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a row."""
    schedule = optax.cosine_decay_schedule(LR, steps)
    if row.options is None:
        return optax.with_extra_args_support(optax.adamw(schedule, weight_decay=DECAY))
    return hs.adamw(schedule, weight_decay=DECAY, **row.options)


def train(row: Row, steps: int, x: jax.Array, y: jax.Array):
    """Train all seeds of a row; return float32 weights, training losses and bytes per parameter."""
    return train_by(transform(row, steps), row.weights, row.order, steps, x, y, hs.float32_params)


def train_by(
    tx: optax.GradientTransformationExtraArgs,
    weights: str,
    shuffling: int,
    steps: int,
    x: jax.Array,
    y: jax.Array,
    known: Callable,
):
    """Train all seeds by a transform, weights of a dtype; `known` returns those that are judged."""

    def run(seed):
        params = initial(seed, weights)
        state = tx.init(params)
        if optax.tree.get_all_with_path(state, "seed"):
            words = jnp.stack([jnp.uint32(0), seed.astype(jnp.uint32)])
            state = optax.tree.set(state, seed=words)
        order = jax.random.key(1000 * shuffling + seed + 1)

        def step(carry, t):
            params, state = carry
            rows = jax.random.randint(jax.random.fold_in(order, t), (BATCH,), 0, x.shape[0])
            updates, state = tx.update(jax.grad(loss)(params, x[rows], y[rows]), state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, state), _ = jax.lax.scan(step, (params, state), jnp.arange(steps))
        full = known(params, state)
        return full, loss(full, x, y), params, state

    full, losses, params, state = jax.jit(jax.vmap(run))(jnp.arange(SEEDS))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
    return flat(full), np.asarray(losses), stored / count


def flat(tree) -> np.ndarray:
    """Return all weights of every seed: (seeds, parameters), float64."""
    leaves = [np.asarray(leaf, np.float64).reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves, axis=1)


def run_all(rows: list[Row], steps: int) -> list[dict]:
    """Train rows and compare them with the first."""
    x, y = data()
    start = flat(jax.vmap(lambda s: initial(s, "float32"))(jnp.arange(SEEDS)))
    results, reference = [], None
    for row in tqdm(rows, unit="row"):
        full, losses, stored = train(row, steps, x, y)
        reference = full if reference is None else reference
        named = {"name": row.name, "bytes": stored, "loss": float(losses.mean())}
        results.append(named | compare(full, reference, start))
    return results


def compare(full: np.ndarray, reference: np.ndarray, start: np.ndarray) -> dict[str, float]:
    """Return dist, its spread over seeds, and proj of weights of every seed, relative to those of float32."""
    moved = reference - start
    length = np.linalg.norm(moved, axis=1)
    dist = np.linalg.norm(full - reference, axis=1) / length
    proj = ((full - start) * moved).sum(1) / length**2
    return {"dist": float(dist.mean()), "spread": float(dist.std()), "proj": float(proj.mean())}


FP8_ROW = "float32; fp8: mu e4m3fn, nu ufloat8_e5m3"
ONE_PASS = "float32; one_pass: mulaw8, uroot4_e4m4"
E3M4_ROW, INT8_ROW, INT4_ROW = (
    f"float32; mu relative {mu}, nu ufloat8_e5m3" for mu in ("e3m4", "int8", "int4")
)
TABLES8 = "float32; 8-bit tables: dynamic8, udynamic8"
NOISE = "float32, another batch order"

Figures = Mapping[str, float]
CLAIMS: dict[str, Callable[[Figures, Figures], bool]] = {
    "scaled fp16 nu: dist < 0.005": lambda dist, proj: dist["float32; mu bf16, nu scaled fp16"] < 0.005,
    "bf16 moments: dist < 0.015": lambda dist, proj: dist["float32; bf16"] < 0.015,
    "nearest bf16 moments: dist > 0.015 and proj < 0.99": lambda dist, proj: (
        dist["float32; bf16 nearest"] > 0.015 and proj["float32; bf16 nearest"] < 0.99
    ),
    "fp8 moments: dist < 0.12 and |proj - 1| < 0.01": lambda dist, proj: (
        dist[FP8_ROW] < 0.12 and abs(proj[FP8_ROW] - 1) < 0.01
    ),
    "one pass: dist < 0.088": lambda dist, proj: dist[ONE_PASS] < 0.088,
    "one pass: |proj - 1| < 0.0007": lambda dist, proj: abs(proj[ONE_PASS] - 1) < 0.0007,
    "eight_bit: dist < 0.036": lambda dist, proj: (
        dist["float32; eight_bit: relative e3m4 with feedback, uroot8"] < 0.036
    ),
    "four_bit: dist < 0.05": lambda dist, proj: (
        dist["float32; four_bit: relative int4 with feedback, uroot8"] < 0.05
    ),
    "relative int8, e5m3: nearer than fp8": lambda dist, proj: dist[INT8_ROW] < dist[FP8_ROW],
    "relative 8 bits: |proj - 1| < 0.0005": lambda dist, proj: (
        max(abs(proj[name] - 1) for name in (E3M4_ROW, INT8_ROW)) < 0.0005
    ),
    "relative int4, e5m3: below another batch order": lambda dist, proj: dist[INT4_ROW] < dist[NOISE],
    "8-bit tables: dist < 0.06 and |proj - 1| < 0.01": lambda dist, proj: (
        dist[TABLES8] < 0.06 and abs(proj[TABLES8] - 1) < 0.01
    ),
    "nearest fp8 moments: |proj - 1| > 0.015": lambda dist, proj: (
        abs(proj["float32; fp8 e4m3fn nearest"] - 1) > 0.015
    ),
    "compensated and split weights: dist < 0.02": lambda dist, proj: (
        max(dist[f"bf16 {rule}; float32"] for rule in ("compensated", "split8", "split16")) < 0.02
    ),
    "split8 weights and bf16 moments: dist < 0.015": lambda dist, proj: dist["bf16 split8; bf16"] < 0.015,
    "stochastic weights: dist below another batch order": lambda dist, proj: (
        dist["bf16 stochastic; float32"] < dist[NOISE]
    ),
    "nearest weights: dist > 0.3 and proj < 0.9": lambda dist, proj: (
        dist["bf16 nearest; float32"] > 0.3 and proj["bf16 nearest; float32"] < 0.9
    ),
}
"""By sentence: whether the table shows it, from the figures of every row."""


def claims(results: list[dict]) -> dict[str, bool]:
    """Return what the table must show, by sentence; a sentence about a row that was left out is left out."""
    dist, proj = ({row["name"]: row[key] for row in results} for key in ("dist", "proj"))
    held = {}
    for sentence, shows in CLAIMS.items():
        with contextlib.suppress(KeyError):
            held[sentence] = shows(dist, proj)
    return held


def cells(row: dict) -> tuple[str, str, str]:
    """Return the training loss, dist and proj of a result, as tables show them."""
    return f"{row['loss']:.5f}", f"{row['dist']:.4f} ± {row['spread']:.4f}", f"{row['proj']:.4f}"


def main() -> int:
    """Print the table, and whether it shows what it must."""
    arguments = report.arguments(
        "Train digits with every storage; compare paths with float32.", 1500, rows=True
    )
    results = run_all(report.chosen(ROWS, arguments.only), arguments.steps)
    report.print_table(
        "<weights; moments | bytes per parameter | training loss | dist | proj",
        (
            (
                row["name"],
                f"{row['bytes']:.2f}",
                *cells(row),
            )
            for row in results
        ),
    )
    moved = gradients.run_all(report.chosen(gradients.ROWS, arguments.only))
    report.print_table(
        f"<movement along float32's | {' | '.join(gradients.COLUMNS)}", map(gradients.cells, moved)
    )
    held = claims(results) | gradients.claims(moved)
    return report.finish(held, {"digits": results, "gradients": moved}, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
