"""Weights of 8 bits without a copy: how far they lead from float32, with and without their errors fed back.

    python benchmarks/low_weights.py [--steps 1500] [--json benchmarks/results/NAME.json]

AdamW in float32 whose matrices are stored after every step in rows, a scale each, as `scaled` stores moments.
Rounded stochastically alone, small updates arrive in the mean, with the noise of 8 bits. *Fed back*: what
rounding leaves out of the weights, e = w - stored(w), goes into the momentum, from which later steps add it.
Rows "int8, fed back" are `adamw(..., param_storage="int8")` of the library (contract A20), where errors are
divided by the rates that come. Rows "by ECO" divide by the rate of their own step:

    m <- m + (1 - 1 / b1) c1 (sqrt(v / c2) + eps) e / lr

with c1 and c2 the bias corrections: Algorithm 3 of M. Nikdan et al., "ECO: Quantized Training without
Full-Precision Master Weights", arXiv:2601.22101. A rate that rises again then blows up what was fed back; and
a bound on it ("at most 4 roots") is a bias, as stochastic errors are small one way and large the other way.

Digits as in `quality.py`, at two rates, and at the first one falling to 0 and starting again, twice; each
beside float32 at that rate. And the character transformer of `transformer.py` for 400 steps, at three seeds.
"""

import dataclasses
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import quality
import transformer
from tqdm import tqdm

import halfstep_jax as hs
import report
from halfstep.rules.adamw_in_codes import AdamWInCodes

B1, B2, EPS = 0.9, 0.999, 1e-8
TINY = 2.0**-100
TRANSFORMER_STEPS = 400


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        name: for the tables.
        weights: how matrices are stored: a dtype, a format, or None: in float32.
        feedback: whether errors go into the momentum: "ours", "ECO" or "".
        nearest: whether weights are rounded to nearest.
        bound: how many roots of v are fed back at most.
        mu: of "ours", how the momentum is stored.
        order: which shuffling of the batches.
    """

    name: str
    weights: Any = None
    feedback: str = ""
    nearest: bool = False
    bound: float = float("inf")
    mu: Any = "float32"
    order: int = 0


INT8, E4M3 = hs.scaled("int8", "row", 0, scale="fine"), hs.scaled("float8_e4m3fn", "row", 0)
REFERENCE, NOISE, BF16 = "float32", "float32, another batch order", "bfloat16, stochastic"
ROWS = (
    Row(REFERENCE),
    Row(NOISE, order=1),
    Row(BF16, "bfloat16"),
    Row("int8, stochastic", INT8),
    Row("int8, fed back", INT8, "ours"),
    Row("int8, fed back into bfloat16", INT8, "ours", mu="bfloat16"),
    Row("int8, fed back into relative int8", INT8, "ours", mu=hs.relative("int8", 128, 0, 0)),
    Row("int8, fed back by ECO", INT8, "ECO"),
    Row("int8, fed back by ECO, at most 4 roots", INT8, "ECO", bound=4.0),
    Row("int8, fed back by ECO, nearest", INT8, "ECO", nearest=True),
    Row("float8_e4m3fn, stochastic", E4M3),
    Row("float8_e4m3fn, fed back by ECO", E4M3, "ECO"),
)
RATES = (quality.LR, quality.LR / 100)
AT_EVERY_RATE = (REFERENCE, BF16, "int8, stochastic", "int8, fed back", "int8, fed back by ECO")
ON_TRANSFORMER = (
    REFERENCE,
    NOISE,
    BF16,
    "int8, stochastic",
    "int8, fed back",
    "float8_e4m3fn, fed back by ECO",
)
BOUNDED, RESTARTS = "int8, fed back by ECO, at most 4 roots", 3


class State(NamedTuple):
    """State of `adamw`."""

    count: jax.Array
    seed: jax.Array
    mu: Any
    nu: Any


def adamw(row: Row, schedule: optax.Schedule, decay: float) -> optax.GradientTransformationExtraArgs:
    """Return AdamW with matrices stored as a row says; its updates lead from what is stored to what is."""
    if row.feedback == "ours":
        options = {"param_dtype": row.weights, "mu_dtype": row.mu, "mu_rounding": "stochastic"}
        return hs.as_transform(AdamWInCodes(schedule, B1, B2, EPS, weight_decay=decay, **options))

    def init(params):
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return State(jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32), mu, nu)

    def update(updates, state, params=None, **extra_args):
        count = state.count + 1
        lr, t = schedule(state.count), count.astype(jnp.float32)
        c1, c2 = (1 - b**t for b in (B1, B2))

        def step(path, g, m, v, w):
            m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
            root = jnp.sqrt(v / c2) + EPS
            exact = w - lr * (m / c1 / root + decay * w)
            if w.ndim < 2 or row.weights is None:
                return exact - w, m, v
            words = hs.random_words(state.seed, count, jax.tree_util.keystr(path), 0, w.shape)
            stored = _stored(exact, row.weights, None if row.nearest else words)
            if row.feedback:
                z = (1 - 1 / B1) * (exact - stored) / jnp.maximum(lr, TINY)
                m = m + c1 * root * jnp.clip(z, -row.bound, row.bound)
            return stored - w, m, v

        made = jax.tree_util.tree_map_with_path(step, updates, state.mu, state.nu, params)
        u, mu, nu = jax.tree.transpose(jax.tree.structure(updates), jax.tree.structure((0, 0, 0)), made)
        return u, State(count, state.seed, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _stored(x: jax.Array, fmt: Any, words: jax.Array | None) -> jax.Array:
    """Return in float32 what is stored of x."""
    if isinstance(fmt, str):
        return hs.round_to(x, fmt, words).astype(jnp.float32)
    return fmt.round_trip(x, words)[1]


def on_digits(steps: int) -> list[dict[str, Any]]:
    """Train at every rate, and at one that restarts; compare each row with float32 at its rate."""
    x, y = quality.data()
    start = quality.flat(jax.vmap(lambda s: quality.initial(s, "float32"))(jnp.arange(quality.SEEDS)))
    once = {rate: optax.cosine_decay_schedule(rate, steps) for rate in RATES}
    part = steps // RESTARTS
    again = [optax.cosine_decay_schedule(RATES[0], part)] * RESTARTS
    schedules = {
        f"{RATES[0]:.0e}": (once[RATES[0]], ROWS),
        f"{RATES[1]:.0e}": (once[RATES[1]], _named(*AT_EVERY_RATE, BOUNDED)),
        "restarts": (optax.join_schedules(again, [part, 2 * part]), _named(*AT_EVERY_RATE)),
    }
    results = []
    for rate, (schedule, rows) in schedules.items():
        reference = None
        for row in tqdm(rows, unit="row"):
            tx = adamw(row, schedule, quality.DECAY)
            full, losses, _ = quality.train_by(tx, "float32", row.order, steps, x, y, lambda w, _: w)
            reference = full if reference is None else reference
            named = {"rate": rate, "name": row.name, "loss": float(losses.mean())}
            results.append(named | quality.compare(full, reference, start))
            tqdm.write(str(results[-1]), file=sys.stderr)
    return results


def _named(*names: str) -> list[Row]:
    return [row for row in ROWS if row.name in names]


def on_transformer(steps: int) -> list[dict[str, Any]]:
    """Train the character transformer at its own rate; compare each row with float32."""
    setting, text = transformer.demo.Recipe(steps=steps), transformer.load_text()
    results, truth = [], None
    for row in tqdm(_named(*ON_TRANSFORMER), unit="row"):
        rate = optax.constant_schedule(setting.learning_rate)
        tx, order = adamw(row, rate, setting.weight_decay), transformer.OTHER_ORDER * row.order
        trained = transformer.train(tx, order, setting, text)
        truth = trained if truth is None else truth
        results.append({"name": row.name, **transformer.compare(trained, truth)})
        tqdm.write(str(results[-1]), file=sys.stderr)
    return results


def claims(digits: list[dict], transformed: list[dict]) -> dict[str, bool]:
    """Return what the tables must show, by sentence."""
    dist = {(row["rate"], row["name"]): row["dist"] for row in digits}
    text = {row["name"]: row for row in transformed}
    first, low = (f"{rate:.0e}" for rate in RATES)
    ours, e4m3 = "int8, fed back", "float8_e4m3fn, fed back by ECO"
    return {
        "digits: int8 fed back has under half of the dist of int8, and less than bfloat16": (
            dist[first, ours] < min(dist[first, "int8, stochastic"] / 2, dist[first, BF16])
        ),
        "digits: momentum in bfloat16 or relative int8 holds the errors": max(
            dist[first, f"{ours} into {mu}"] for mu in ("bfloat16", "relative int8")
        )
        < dist[first, BF16],
        "digits: a rate that restarts changes nothing of it, and blows up what ECO feeds back": (
            dist["restarts", ours] < dist["restarts", BF16]
            and not dist["restarts", "int8, fed back by ECO"] < 1
        ),
        "digits: a bound on what ECO feeds back is a bias at a low rate": dist[low, BOUNDED] > 1,
        "transformer: int8 fed back has less dist than bfloat16": text[ours]["dist"] < text[BF16]["dist"],
        "transformer: float8_e4m3fn fed back has more dist than another order of the batches": (
            text[e4m3]["dist"] > text[NOISE]["dist"]
        ),
    }


def main() -> int:
    """Print the tables, and whether they show what they must."""
    arguments = report.arguments("Train with weights of 8 bits, without a copy.", 1500)
    digits = on_digits(arguments.steps)
    report.print_table(
        "rate | <weights | training loss | dist | proj",
        (
            (
                row["rate"],
                row["name"],
                *quality.cells(row),
            )
            for row in digits
        ),
    )
    transformed = on_transformer(TRANSFORMER_STEPS)
    report.print_table(
        "<weights | loss over float32 | dist | proj",
        ((name, *figures) for name, _, *figures in map(transformer.cells, transformed)),
    )
    figures = {"digits": digits, "transformer": transformed}
    return report.finish(claims(digits, transformed), figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
