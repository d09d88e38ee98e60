"""LAMB at a constant rate, for long enough that weights grow: test accuracy over epochs.

    python benchmarks/lamb.py

prints this table after its own. A step of LAMB's moves a leaf by its rate times the norm of its weights,
mostly at right angles to them: so weights grow, and steps with them. A schedule that ends at 0 hides this; a
constant rate shows it. The network is that of `quality.py`, on 1,400 of scikit-learn's bundled digits in
batches of 128; accuracy is on the other 397, a mean over the last tenth of the epochs up to each column and
over four seeds. *Growth* is the norm of all weights at the end over that at the start.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from quality import BATCH, data, initial, logits, loss
from tqdm import tqdm

import halfstep_jax as hs

SEEDS, TRAINING, RATES, EPOCHS, POWER, BOUND = 4, 1400, (0.01, 0.03, 0.1), (3, 10, 30, 100), 0.382, 10.0
FULL = {"mu_dtype": "float32", "nu_dtype": "float32"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        name: for the table.
        make: from a rate to the transform.
    """

    name: str
    make: Callable[[float], optax.GradientTransformation]


def _lamb(alias: Callable, **options) -> Callable[[float], optax.GradientTransformation]:
    return lambda rate: alias(rate, weight_decay=0.0, **options)


PLAIN, BOUNDED = "lamb, no bound", "lamb, max_norm 10"
TEMPERED, BOTH = "trust_power 0.382, no bound", "trust_power 0.382, max_norm 10"

ROWS = (
    Row(PLAIN, _lamb(hs.lamb, max_norm=None, **FULL)),
    Row(BOUNDED, _lamb(hs.lamb, max_norm=BOUND, **FULL)),
    Row(TEMPERED, _lamb(hs.lamb16, trust_power=POWER, max_norm=None, **FULL)),
    Row(BOTH, _lamb(hs.lamb16, trust_power=POWER, max_norm=BOUND, **FULL)),
    Row("lamb16, trust_power None, no bound", _lamb(hs.lamb16, trust_power=None, max_norm=None)),
    Row("lamb16, trust_power None, max_norm 10", _lamb(hs.lamb16, trust_power=None, max_norm=BOUND)),
    Row("lamb16, trust_power 0.382, no bound", _lamb(hs.lamb16, trust_power=POWER, max_norm=None)),
    Row("lamb16, trust_power 0.382, max_norm 10", _lamb(hs.lamb16, trust_power=POWER, max_norm=BOUND)),
)
NAMES = tuple(row.name for row in ROWS)
HOLDING = tuple(name for name in NAMES if "max_norm" in name or "0.382" in name)


def accuracies(tx: optax.GradientTransformation, x: jax.Array, y: jax.Array):
    """Train all seeds; return test accuracy after each epoch, (seeds, epochs), and growth, (seeds,)."""
    order = np.random.default_rng(0).permutation(len(y))
    training, test = order[:TRAINING], order[TRAINING:]
    steps = -(-TRAINING // BATCH)

    def run(seed):
        start = initial(seed, "float32")
        state = tx.init(start)
        words = jnp.stack([jnp.uint32(0), seed.astype(jnp.uint32)])
        state = optax.tree.set(state, seed=words)

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


def run_all() -> list[dict]:
    """Train every row at every rate."""
    x, y = data()
    results = []
    for rate, row in tqdm([(rate, row) for rate in RATES for row in ROWS], unit="row"):
        right, growth = accuracies(optax.with_extra_args_support(row.make(rate)), x, y)
        result = {"rate": rate, "name": row.name}
        result["growth"] = float(growth.mean()) if np.isfinite(growth).all() else None
        for epochs in EPOCHS:
            last = right[:, epochs - max(1, epochs // 10) : epochs].mean(axis=1)
            result[f"after {epochs}"] = float(last.mean())
            result[f"spread after {epochs}"] = float(last.std(ddof=1))
        results.append(result)
    return results


def cells(row: dict) -> tuple[str, ...]:
    """Return the cells of a row."""
    accuracy = (f"{row[f'after {n}']:.2%} ± {row[f'spread after {n}']:.2%}" for n in EPOCHS)
    growth = "not finite" if row["growth"] is None else f"{row['growth']:.1f}"
    return row["name"], f"{row['rate']:g}", *accuracy, growth


def claims(results: list[dict]) -> dict[str, bool]:
    """Return what the table must show, by sentence."""
    after = {(row["name"], row["rate"], n): row[f"after {n}"] for row in results for n in EPOCHS}
    plain, (slow, fast, fastest) = [name for name in NAMES if name not in HOLDING], RATES
    tempered = [name for name in HOLDING if "0.382" in name]
    return {
        "LAMB without a bound ends at chance at 0.03": all(after[name, fast, 100] < 0.2 for name in plain),
        "and at 0.01 loses accuracy from 30 to 100 epochs": all(
            after[name, slow, 100] < after[name, slow, 30] for name in plain
        ),
        "with max_norm 10 or trust_power it keeps its accuracy, within 0.5 %": all(
            after[name, rate, 100] > after[name, rate, 30] - 5e-3 for name in HOLDING for rate in (slow, fast)
        ),
        "with trust_power it ends above 98.5 %": all(
            after[name, r, 100] > 0.985 for name in tempered for r in (slow, fast)
        ),
        "whether bounded or not, within 0.3 %": all(
            abs(after[TEMPERED, rate, 100] - after[BOTH, rate, 100]) < 3e-3 for rate in (slow, fast)
        ),
        "at 0.1 trust_power needs the bound: 0.5 % better": after[BOTH, fastest, 100]
        > after[TEMPERED, fastest, 100] + 5e-3,
    }
