"""LAMB with its state in 32, 16 and 8 bits, and LAMB16 as published: losses, momentum, and long runs.

    python benchmarks/lamb.py [--steps 600] [--json benchmarks/results/NAME.json]

First, the network of `training.py` on digits, LAMB from a learning rate of 1e-2 (cosine), eight seeds: bytes
of state per parameter, and the training loss, as mean and standard deviation over seeds.

Then one layer, of 400,000 and of 1e7 elements, gets gradients of standard deviation 0.1 for 30 steps. The
stored first moment is compared with the average in float32: its length, and its projection on the average.
The last figure is the cosine between the Adam update of the stored moments and the true Adam update.

LAMB16 as published keeps m / s in float8_e4m3fn, clipped to 15, and v / s in float8_e5m2, both rounded to
nearest. Here s = sqrt(sum(min(x^2, 10))) / n + 1e-6 for n elements: the norm over n. So the elements of m / s
are about sqrt(n), and in layers above 15^2 elements all but the smallest are clipped.

Last, a constant rate, at which LAMB's steps grow with the weights; a schedule that ends at 0 hides it. The
network learns 1,400 of the digits; accuracy is on the other 397, a mean over the last tenth of the epochs up
to each column and over four seeds. *Growth* is the norm of all weights at the end over that at the start.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm
from training import BATCH, DECAY, Task, data, initial, logits, loss, with_seed

import halfstep_jax as hs
import report
from halfstep_jax.storage.formats import Format
from halfstep_jax.storage.state_dtypes import as_format

LR, POWER, BOUND = 1e-2, 0.382, 10.0
LAYERS, LAYER_STEPS, SIZE_OF_GRADIENTS = (400_000, 10_000_000), 30, 0.1
B1, B2, EPS = (np.float32(x) for x in (0.9, 0.999, 1e-6))
SEEDS, TRAINING, RATES, EPOCHS = 4, 1400, (0.01, 0.03, 0.1), (3, 10, 30, 100)


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


def _scaled(dtype: str) -> Format:
    return hs.scaled(dtype, block_size=128, min_size=0)


def _lamb(
    alias: Callable, decay: float = DECAY, **options: Any
) -> Callable[..., optax.GradientTransformation]:
    # Without a bound on the weights' norm, as Optax's row is.
    return lambda rate: alias(rate, weight_decay=decay, **{"max_norm": None, **options})


FULL = {"mu_dtype": "float32", "nu_dtype": "float32"}
BF16 = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}
FP8 = {"mu_dtype": _scaled("float8_e4m3fn"), "nu_dtype": _scaled("ufloat8_e5m3")}
LAMB16, WITH_POWER = "lamb16, trust_power None", f"lamb16, trust_power {POWER}"
PLAIN, TEMPERED = "lamb, float32 state", f"{WITH_POWER}, float32 state"
PUBLISHED, NARROW = "LAMB16 as published", ", bf16 weights"
MAKE: dict[str, Callable[..., optax.GradientTransformation]] = {
    "optax.lamb, float32 state": lambda schedule: optax.lamb(schedule, weight_decay=DECAY),
    PLAIN: _lamb(hs.lamb, **FULL),
    "lamb, bf16 state": _lamb(hs.lamb, **BF16),
    "lamb, fp8 state in all layers": _lamb(hs.lamb, **FP8),
    LAMB16: _lamb(hs.lamb16, trust_power=None),
    f"{LAMB16}{NARROW}": _lamb(hs.lamb16, trust_power=None),
    TEMPERED: _lamb(hs.lamb16, trust_power=POWER, **FULL),
    WITH_POWER: _lamb(hs.lamb16, trust_power=POWER),
    f"{WITH_POWER}{NARROW}": _lamb(hs.lamb16, trust_power=POWER),
    PUBLISHED: lambda schedule: published_lamb16(schedule, DECAY),
}
"""By name: what makes a transform of a schedule."""
AGAINST = {
    "lamb, bf16 state": PLAIN,
    "lamb, fp8 state in all layers": PLAIN,
    LAMB16: PLAIN,
    WITH_POWER: TEMPERED,
}
"""Settings whose loss must be that of a setting in float32, within its spread."""


def train(name: str, steps: int) -> dict[str, Any]:
    """Train all seeds of a setting; return its figures."""
    task = Task(steps, seeds=8)
    weights = "bfloat16" if NARROW in name else "float32"
    ends = task.train(MAKE[name](task.rate(LR)), lambda params, _: params, weights, 0)
    losses = ends.losses.astype(np.float64)
    figures = {"bytes": ends.state, "loss": losses.mean(), "spread": losses.std(ddof=1)}
    return {"name": name, **figures, "losses": losses.tolist()}


NU = _scaled("ufloat8_e5m3")
FORMATS: dict[str, tuple[Format, Format]] = {
    "bfloat16": (as_format("lamb", "mu_dtype", "bfloat16"), as_format("lamb", "nu_dtype", "bfloat16")),
    "float16": (as_format("lamb", "mu_dtype", "float16"), NU),
    "scaled float16": (_scaled("float16"), NU),
    "scaled float8_e4m3fn (lamb16)": (_scaled("float8_e4m3fn"), NU),
    "scaled int8": (_scaled("int8"), NU),
}


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


LASTING: dict[str, Callable[[float], optax.GradientTransformation]] = {
    f"{name}, {bound}": _lamb(alias, 0.0, max_norm=max_norm, **options)
    for name, alias, options in (
        ("lamb", hs.lamb, FULL),
        ("trust_power 0.382", hs.lamb16, {"trust_power": POWER, **FULL}),
        ("lamb16, trust_power None", hs.lamb16, {"trust_power": None}),
        ("lamb16, trust_power 0.382", hs.lamb16, {"trust_power": POWER}),
    )
    for bound, max_norm in (("no bound", None), ("max_norm 10", BOUND))
}
"""By name: what makes a transform of a constant rate."""


def accuracies(tx: optax.GradientTransformation) -> tuple[np.ndarray, np.ndarray]:
    """Train all seeds; return test accuracy after each epoch, (seeds, epochs), and growth, (seeds,)."""
    x, y = data()
    order = np.random.default_rng(0).permutation(len(y))
    training, test = order[:TRAINING], order[TRAINING:]
    steps = -(-TRAINING // BATCH)

    def run(seed):
        start = initial(seed, "float32")
        state = with_seed(tx.init(start), seed)

        def step(carry, t):
            params, state = carry
            key = jax.random.fold_in(jax.random.key(seed + 1), t)
            rows = jnp.asarray(training)[jax.random.randint(key, (BATCH,), 0, TRAINING)]
            updates, state = tx.update(jax.grad(loss)(params, x[rows], y[rows]), state, params)
            return (optax.apply_updates(params, updates), state), None

        def epoch(carry, i):
            carry, _ = jax.lax.scan(step, carry, i * steps + jnp.arange(steps))
            return carry, (logits(carry[0], x[test]).argmax(1) == y[test]).mean()

        (params, _), right = jax.lax.scan(epoch, (start, state), jnp.arange(EPOCHS[-1]))
        return right, optax.tree.norm(params) / optax.tree.norm(start)

    right, growth = jax.jit(jax.vmap(run))(jnp.arange(SEEDS))
    return np.asarray(right, np.float64), np.asarray(growth, np.float64)


def lasting() -> list[dict[str, Any]]:
    """Train at every constant rate."""
    results = []
    for rate, name in tqdm([(rate, name) for rate in RATES for name in LASTING], unit="row"):
        right, growth = accuracies(optax.with_extra_args_support(LASTING[name](rate)))
        result: dict[str, Any] = {"rate": rate, "name": name}
        result["growth"] = float(growth.mean()) if np.isfinite(growth).all() else None
        for epochs in EPOCHS:
            last = right[:, epochs - max(1, epochs // 10) : epochs].mean(axis=1)
            result[f"after {epochs}"] = float(last.mean())
            result[f"spread after {epochs}"] = float(last.std(ddof=1))
        results.append(result)
    return results


def claims(training: list[dict], layers: list[dict], lasted: list[dict]) -> dict[str, bool]:
    """Return what the tables must show, by sentence."""
    by = {row["name"]: row for row in training}
    reference = {"lamb in float32 is optax.lamb": (PLAIN, "optax.lamb, float32 state")}
    pairs = reference | {f"{name}: the loss of float32 state": (name, x) for name, x in AGAINST.items()}
    ours = [row for row in layers if row["format"] != PUBLISHED]
    published = {row["elements"]: row["length"] for row in layers if row["format"] == PUBLISHED}
    after = {(row["name"], row["rate"], n): row[f"after {n}"] for row in lasted for n in EPOCHS}
    slow, fast, fastest = RATES
    power, no_power = ([x for x in LASTING if ("0.382" in x) is with_it] for with_it in (True, False))
    held = [*power, *(name for name in no_power if "max_norm" in name)]
    unbound, bound = power[:2]
    return {
        **{
            f"{sentence}, within its spread": abs(by[name]["loss"] - by[other]["loss"]) <= by[other]["spread"]
            for sentence, (name, other) in pairs.items()
        },
        "lamb16 keeps under 2.5 bytes of state per parameter here": by[LAMB16]["bytes"] < 2.5,
        "every format keeps the momentum: projection within 1 %": all(
            abs(row["projection"] - 1) < 0.01 for row in ours
        ),
        "and its length within 1 %": all(abs(row["length"] - 1) < 0.01 for row in ours),
        "as published, under 3 % of 400,000 elements' momentum is kept, under 1 % of 1e7": (
            published[400_000] < 0.03 and published[10_000_000] < 0.01
        ),
        "LAMB without a bound ends at chance at 0.03, and at 0.01 loses accuracy from 30 to 100 epochs": all(
            after[name, fast, 100] < 0.2 and after[name, slow, 100] < after[name, slow, 30]
            for name in no_power
            if name not in held
        ),
        "with max_norm 10 or trust_power it keeps its accuracy, within 0.5 %": all(
            after[name, rate, 100] > after[name, rate, 30] - 5e-3 for name in held for rate in (slow, fast)
        ),
        "with trust_power it ends above 98.5 %, bounded or not within 0.3 %": all(
            min(after[name, r, 100] for name in power) > 0.985
            and abs(after[unbound, r, 100] - after[bound, r, 100]) < 3e-3
            for r in (slow, fast)
        ),
        "at 0.1 trust_power needs the bound: 0.5 % better": after[bound, fastest, 100]
        > after[unbound, fastest, 100] + 5e-3,
    }


def main() -> int:
    """Print the tables, and whether they show what they must."""
    arguments = report.arguments("LAMB with low-precision state, against LAMB16 as published.", steps=600)
    trained = [train(name, arguments.steps) for name in tqdm(MAKE, unit="row")]
    report.print_table(
        "<optimizer | bytes of state per parameter | training loss | spread",
        (
            (row["name"], f"{row['bytes']:.2f}", f"{row['loss']:.6f}", f"{row['spread']:.6f}")
            for row in trained
        ),
    )
    layers, keys = layer_figures(), ("length", "projection", "cosine")
    report.print_table(
        "elements | <first moment | length | projection | cosine of the update",
        ((f"{row['elements']:,}", row["format"], *(f"{row[key]:.4f}" for key in keys)) for row in layers),
    )
    lasted = lasting()
    report.print_table(
        f"<optimizer | rate | {' | '.join(f'after {n} epochs' for n in EPOCHS)} | growth",
        (
            (
                row["name"],
                f"{row['rate']:g}",
                *(f"{row[f'after {n}']:.2%} ± {row[f'spread after {n}']:.2%}" for n in EPOCHS),
                "not finite" if row["growth"] is None else f"{row['growth']:.1f}",
            )
            for row in lasted
        ),
    )
    figures = {"training": trained, "layers": layers, "epochs": lasted}
    return report.finish(claims(trained, layers, lasted), figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
