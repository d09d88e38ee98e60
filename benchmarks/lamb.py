"""LAMB with its state in 32, 16 and 8 bits, and LAMB16 as published: losses, and how much momentum is kept.

    python benchmarks/lamb.py [--steps 600] [--json benchmarks/results/NAME.json]

First, a 64-128-128-10 network on scikit-learn's bundled digits, LAMB from a learning rate of 1e-2 (cosine),
eight seeds: bytes of state per parameter, and the training loss, as mean and standard deviation over seeds.

Then one layer, of 400,000 and of 1e7 elements, gets gradients of standard deviation 0.1 for 30 steps. The
stored first moment is compared with the average in float32: its length, and its projection on the average.
The last figure is the cosine between the Adam update of the stored moments and the true Adam update.

LAMB16 as published keeps m / s in float8_e4m3fn, clipped to 15, and v / s in float8_e5m2, both rounded to
nearest. Here s = sqrt(sum(min(x^2, 10))) / n + 1e-6 for n elements: the norm over n. So the elements of m / s
are about sqrt(n), and in layers above 15^2 elements all but the smallest are clipped.

Last, a constant rate (`epochs.py`), at which LAMB's steps grow with the weights.
"""

import dataclasses
import functools
import sys
from typing import Any, NamedTuple

import epochs
import jax
import jax.numpy as jnp
import numpy as np
import optax
from quality import data, initial, loss
from tqdm import tqdm

import halfstep_jax as hs
import report
from halfstep_jax.storage.formats import Format
from halfstep_jax.storage.state_dtypes import as_format

SEEDS, BATCH, LR, DECAY, POWER = 8, 128, 1e-2, 0.01, 0.382
LAYERS, LAYER_STEPS, SIZE_OF_GRADIENTS = (400_000, 10_000_000), 30, 0.1
B1, B2, EPS = (np.float32(x) for x in (0.9, 0.999, 1e-6))


class PublishedState(NamedTuple):
    """What LAMB16 as published keeps of each leaf: codes and the scale of either moment."""

    count: jax.Array
    mu: Any
    nu: Any
    mu_scale: Any
    nu_scale: Any


def published_scale(x: jax.Array) -> jax.Array:
    """Return the scale of LAMB16's codes: the norm, clipped, over the number of elements."""
    return jnp.sqrt(jnp.sum(jnp.clip(x * x, 0, 10))) / x.size + EPS


def published_moments(g, mu, nu, mu_scale, nu_scale):
    """Return the moments of a step in float32, and what is stored of them."""
    m = B1 * (mu.astype(jnp.float32) * mu_scale) + (np.float32(1) - B1) * g
    v = B2 * (nu.astype(jnp.float32) * nu_scale) + (np.float32(1) - B2) * (g * g)
    scales = published_scale(m), published_scale(v)
    codes = (
        jnp.clip(m / scales[0], -15, 15).astype(jnp.float8_e4m3fn),
        (jnp.clip(v, 0, 10) / scales[1]).astype(jnp.float8_e5m2),
    )
    return (m, v), (*codes, *scales)


def published_lamb16(learning_rate, weight_decay: float, power: float = POWER):
    """Return LAMB16 as published, for float32 weights: our own code, from its formulas."""

    def init(params):
        zeros = {n: jax.tree.map(lambda p, d=d: jnp.zeros(p.shape, d), params) for n, d in dtypes.items()}
        scales = {n: jax.tree.map(lambda p: jnp.zeros([]), params) for n in ("mu_scale", "nu_scale")}
        return PublishedState(jnp.zeros([], jnp.int32), **zeros, **scales)

    def update(updates, state, params):
        rate = learning_rate(state.count)

        def leaf(g, p, *stored):
            (m, v), stored = published_moments(g, *stored)
            u = m / (jnp.sqrt(v) + EPS) + weight_decay * p
            lengths = [jnp.sqrt(jnp.sum(jnp.clip(x * x, EPS, 1))) / x.size for x in (p, u)]
            ratio = jnp.clip((lengths[0] / lengths[1] / rate * 1e-3) ** power, 0, 2)
            return -rate * ratio * u, *stored

        rows = jax.tree.map(leaf, updates, params, *state[1:])
        columns = [jax.tree.map(lambda _, row, i=i: row[i], updates, rows) for i in range(5)]
        return columns[0], PublishedState(state.count + 1, *columns[1:])

    dtypes = {"mu": jnp.float8_e4m3fn, "nu": jnp.float8_e5m2}
    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        name: for the table.
        make: from a schedule to the transform.
        against: name of the setting in float32 that it is compared with.
        weights: dtype of the weights.
    """

    name: str
    make: Any
    against: str = ""
    weights: str = "float32"


def _lamb(alias=hs.lamb, **options):
    # Without a bound on the weights' norm, as Optax's row is.
    return lambda schedule: alias(schedule, weight_decay=DECAY, max_norm=None, **options)


def _scaled(dtype: str) -> Format:
    return hs.scaled(dtype, block_size=128, min_size=0)


FULL = {"mu_dtype": "float32", "nu_dtype": "float32"}
BF16 = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}
FP8 = {"mu_dtype": _scaled("float8_e4m3fn"), "nu_dtype": _scaled("ufloat8_e5m3")}
LAMB16 = "lamb16, trust_power None"
PLAIN, TEMPERED = "lamb, float32 state", f"lamb16, trust_power {POWER}, float32 state"

ROWS = (
    Row("optax.lamb, float32 state", lambda schedule: optax.lamb(schedule, weight_decay=DECAY)),
    Row(PLAIN, _lamb(**FULL)),
    Row("lamb, bf16 state", _lamb(**BF16), PLAIN),
    Row("lamb, fp8 state in all layers", _lamb(**FP8), PLAIN),
    Row(LAMB16, _lamb(hs.lamb16, trust_power=None), PLAIN),
    Row(f"{LAMB16}, bf16 weights", _lamb(hs.lamb16, trust_power=None), weights="bfloat16"),
    Row(TEMPERED, _lamb(hs.lamb16, trust_power=POWER, **FULL)),
    Row(f"lamb16, trust_power {POWER}", _lamb(hs.lamb16, trust_power=POWER), TEMPERED),
    Row(
        f"lamb16, trust_power {POWER}, bf16 weights", _lamb(hs.lamb16, trust_power=POWER), weights="bfloat16"
    ),
    Row("LAMB16 as published", lambda schedule: published_lamb16(schedule, DECAY)),
)


def train(row: Row, steps: int, x: jax.Array, y: jax.Array) -> dict:
    """Train all seeds of a row; return its figures."""
    tx = optax.with_extra_args_support(row.make(optax.cosine_decay_schedule(LR, steps)))

    def run(seed):
        params = initial(seed, row.weights)
        state = tx.init(params)
        if optax.tree.get_all_with_path(state, "seed"):
            state = optax.tree.set(state, seed=jnp.stack([jnp.uint32(0), seed.astype(jnp.uint32)]))
        order = jax.random.key(seed + 1)

        def step(carry, t):
            params, state = carry
            rows = jax.random.randint(jax.random.fold_in(order, t), (BATCH,), 0, x.shape[0])
            updates, state = tx.update(jax.grad(loss)(params, x[rows], y[rows]), state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, state), _ = jax.lax.scan(step, (params, state), jnp.arange(steps))
        return loss(params, x, y), params, state

    losses, params, state = jax.jit(jax.vmap(run))(jnp.arange(SEEDS))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    losses = np.asarray(losses, np.float64)
    return {
        "name": row.name,
        "bytes": stored / count,
        "loss": losses.mean(),
        "spread": losses.std(ddof=1),
        "losses": losses.tolist(),
    }


NU = _scaled("ufloat8_e5m3")
FORMATS: dict[str, tuple[Format, Format]] = {
    "bfloat16": (as_format("lamb", "mu_dtype", "bfloat16"), as_format("lamb", "nu_dtype", "bfloat16")),
    "float16": (as_format("lamb", "mu_dtype", "float16"), NU),
    "scaled float16": (_scaled("float16"), NU),
    "scaled float8_e4m3fn (lamb16)": (_scaled("float8_e4m3fn"), NU),
    "scaled int8": (_scaled("int8"), NU),
}
PUBLISHED = "LAMB16 as published"


@functools.partial(jax.jit, static_argnums=0)
def averages(n: int):
    """Return both moments after the last step: in float32, and as every format keeps them."""
    shape = (n // 1000, 1000)
    zero, key = jnp.zeros(shape), jax.random.key(3)

    def step(kept, t):
        g = jax.random.normal(jax.random.fold_in(key, t), shape) * np.float32(SIZE_OF_GRADIENTS)
        new = {}
        for i, (name, (mu, nu)) in enumerate(FORMATS.items()):
            m, v = ema(mu.decode(kept[name][0]), g, B1), ema(nu.decode(kept[name][1]), g * g, B2)
            words = hs.random_words(i, t + 1, name, hs.Role.MU, shape) if mu.freezes(B1) else None
            nu_words = hs.random_words(i, t + 1, name, hs.Role.NU, shape)
            new[name] = mu.encode(m, words), nu.encode(v, nu_words, keep_nonzero="always")
        new[PUBLISHED] = published_moments(g, *kept[PUBLISHED])[1]
        new["float32"] = ema(kept["float32"][0], g, B1), ema(kept["float32"][1], g * g, B2)
        return new, None

    start: dict[str, Any] = {
        name: tuple(fmt.zeros_like(zero) for fmt in pair) for name, pair in FORMATS.items()
    }
    codes = zero.astype(jnp.float8_e4m3fn), zero.astype(jnp.float8_e5m2)
    start |= {"float32": (zero, zero), PUBLISHED: (*codes, jnp.zeros([]), jnp.zeros([]))}
    kept, _ = jax.lax.scan(step, start, jnp.arange(LAYER_STEPS))
    m, v = kept["float32"]
    rows = {}
    for name in (*FORMATS, PUBLISHED):
        if name == PUBLISHED:
            mu, nu, mu_scale, nu_scale = kept[name]
            stored = mu.astype(jnp.float32) * mu_scale, nu.astype(jnp.float32) * nu_scale
        else:
            pairs = zip(FORMATS[name], kept[name], strict=True)
            stored = tuple(fmt.decode(array) for fmt, array in pairs)
        rows[name] = compared(*stored, m, v)
    return rows


def ema(average: jax.Array, value: jax.Array, b: np.float32) -> jax.Array:
    """Return the next average."""
    return b * average + (np.float32(1) - b) * value


def compared(mu, nu, m, v) -> dict[str, jax.Array]:
    """Return figures of stored moments against true ones."""
    u, true = mu / (jnp.sqrt(nu) + EPS), m / (jnp.sqrt(v) + EPS)
    u = jnp.where(jnp.isfinite(u), u, 0)
    length = jnp.sqrt(jnp.sum(m * m))
    return {
        "length": jnp.sqrt(jnp.sum(mu * mu)) / length,
        "projection": jnp.sum(mu * m) / length**2,
        "cosine": jnp.sum(u * true) / jnp.sqrt(jnp.sum(u * u) * jnp.sum(true * true)),
    }


def layer_figures() -> list[dict]:
    """Return a row of figures for every layer and format."""
    rows = []
    for n in LAYERS:
        figures = averages(n)
        for name in (*FORMATS, PUBLISHED):
            values = {key: float(x) for key, x in figures[name].items()}
            rows.append({"elements": n, "format": name} | values)
    return rows


def claims(training: list[dict], layers: list[dict]) -> dict[str, bool]:
    """Return what the tables must show, by sentence."""
    by = {row["name"]: row for row in training}
    within = {
        row.name: abs(by[row.name]["loss"] - by[row.against]["loss"]) <= by[row.against]["spread"]
        for row in ROWS
        if row.against
    }
    reference = by["optax.lamb, float32 state"]
    ours = [row for row in layers if row["format"] != PUBLISHED]
    published = {row["elements"]: row for row in layers if row["format"] == PUBLISHED}
    sentences = {f"{name}: the loss of float32 state, within its spread": x for name, x in within.items()}
    return sentences | {
        "lamb in float32 is optax.lamb, within its spread": abs(by[PLAIN]["loss"] - reference["loss"])
        <= reference["spread"],
        "lamb16 keeps under 2.5 bytes of state per parameter here": by[LAMB16]["bytes"] < 2.5,
        "every format keeps the momentum: projection within 1 %": all(
            abs(row["projection"] - 1) < 0.01 for row in ours
        ),
        "and its length within 1 %": all(abs(row["length"] - 1) < 0.01 for row in ours),
        "as published, under 3 % of 400,000 elements' momentum is kept": published[400_000]["length"] < 0.03,
        "as published, under 1 % of 1e7 elements' momentum is kept": published[10_000_000]["length"] < 0.01,
    }


def main() -> int:
    """Print the tables, and whether they show what they must."""
    arguments = report.arguments("LAMB with low-precision state, against LAMB16 as published.", steps=600)
    x, y = data()
    training = [train(row, arguments.steps, x, y) for row in tqdm(ROWS, unit="row")]
    layers = layer_figures()
    report.print_table(
        "<optimizer | bytes of state per parameter | training loss | spread",
        (
            (row["name"], f"{row['bytes']:.2f}", f"{row['loss']:.6f}", f"{row['spread']:.6f}")
            for row in training
        ),
    )
    keys = ("length", "projection", "cosine")
    report.print_table(
        "elements | <first moment | length | projection | cosine of the update",
        ((f"{row['elements']:,}", row["format"], *(f"{row[key]:.4f}" for key in keys)) for row in layers),
    )
    lasting = epochs.run_all()
    head = " | ".join(f"after {n} epochs" for n in epochs.EPOCHS)
    report.print_table(f"<optimizer | rate | {head} | growth", map(epochs.cells, lasting))
    figures = {"training": training, "layers": layers, "epochs": lasting}
    return report.finish(claims(training, layers) | epochs.claims(lasting), figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
