"""How far weights fed back end from float32 where coming rates are unknown: never farther than stochastic.

    python benchmarks/unknown_rates.py [--json benchmarks/results/NAME.json]

20 kinds of made-up gradients under 6 schedules of 400 steps, in which the rate rises: AdamW up to 1e-3 and
1e-5, SGD with a momentum of 0.9 up to 1e-4. Weights in bfloat16 are from 0.016 to 0.031, 1,024 of each kind.
The rate comes through `optax.inject_hyperparams`, which hides the schedule; `peak_lr` is known. A cell of the
table is |w - w32| under `"feedback"`, divided by that under `"stochastic"`: the largest over the kinds, and
the median. *known* is the same with the schedule itself.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import halfstep_jax as hs
import report

STEPS, SIZE, MOMENTUM = 400, 1024, 0.9
_NOISE = np.random.default_rng(0)


def _fall(t: np.ndarray, steps: int) -> np.ndarray:
    return 0.5 * (1 + np.cos(np.pi * np.clip(t / steps, 0, 1)))


SCHEDULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "up in 20 steps, cosine": lambda t: np.where(t < 20, (t + 1) / 20, _fall(t - 20, STEPS - 20)),
    "1,000 times up in 100 steps": lambda t: 10 ** (3 * np.minimum(t / 100 - 1, 0)),
    "8 times up at step 200": lambda t: np.where(t < 200, 1 / 8, 1),
    "1,000 times up at step 200": lambda t: np.where(t < 200, 1e-3, 1),
    "cosine, three times": lambda t: _fall(t % 133, 133),
    "cosine, up in 20 steps": lambda t: np.where(t < 200, _fall(t, 200), np.minimum((t - 200) / 20, 1)),
}
"""By name: the rate, relative to the largest, of counts of steps."""


def gradients(size: int) -> dict[str, np.ndarray]:
    """Return by name, for each step, the gradients of a kind: (steps, size)."""
    t, noise = np.arange(STEPS)[:, None], _NOISE.standard_normal((STEPS, size))
    sign = np.where(_NOISE.random(size) < 0.5, -1, 1)
    steady = sign * _NOISE.uniform(0.5, 1.5, size)
    drift, chance = noise + 0.3 * steady, _NOISE.random((STEPS, size))
    return {
        "steady": steady + 0 * noise,
        "noise": noise,
        "drift": noise + 0.5 * steady,
        "weak drift": noise + 0.1 * steady,
        "alternating": steady * np.where(t % 2, 1, -1) + 0.2 * sign,
        "every second": steady * (t % 2),
        "every tenth": (steady + 0.1 * noise) * (t % 10 == 0),
        "a sine": steady * np.sin(2 * np.pi * t / 20) + 0.1 * steady,
        "1 in 20": (noise + steady) * (chance < 0.05),
        "1 in 100": (noise + steady) * (chance < 0.01),
        "a spike": drift * np.where(t == 150, 1000, 1),
        "stopping": drift * (t < 200),
        "starting": drift * (t >= 200),
        "growing": drift * 10 ** (3 * t / STEPS),
        "shrinking": drift * 10 ** (-3 * t / STEPS),
        "of all sizes": drift * np.exp(3 * _NOISE.standard_normal(size)),
        "heavy tails": _NOISE.standard_t(2, (STEPS, size)) + 0.3 * steady,
        "in bursts": drift * (t % 20 < 10),
        "idle between": drift * ((t < 50) | (t > 300)),
        "turning": steady * np.where(t // 50 % 2, 1, -1) + 0.3 * noise + 0.2 * steady,
    }


def optimizer(
    rule: str, storage: str, rates: jax.Array, known: bool
) -> optax.GradientTransformationExtraArgs:
    """Return AdamW or SGD at rates that it is shown, or that reach it one by one."""
    make, fixed = {"adamw": (hs.adamw, {}), "sgd": (hs.sgd, {"momentum": MOMENTUM})}[rule]
    decay = {"weight_decay": 0.0} if rule == "adamw" else {}

    def of_rate(learning_rate, peak_lr=None):
        return make(learning_rate, **fixed, **decay, param_storage=storage, peak_lr=peak_lr)

    def schedule(count):
        return rates[jnp.minimum(count, STEPS - 1)]

    if known:
        return of_rate(schedule)
    inject = optax.inject_hyperparams(of_rate, hyperparam_dtype=jnp.float32)
    return inject(learning_rate=schedule, peak_lr=float(rates.max()))


def run(tx: optax.GradientTransformationExtraArgs, start: jax.Array, kinds: jax.Array) -> np.ndarray:
    """Return the weights after all steps, in float32."""

    @jax.jit
    def train(p, state):
        def step(carry, g):
            p, state = carry
            updates, state = tx.update(g.astype(p.dtype), state, p)
            return (optax.apply_updates(p, updates), state), None

        return jax.lax.scan(step, (p, state), kinds)[0][0]

    return np.asarray(train(start, tx.init(start)), np.float32)


def cells(rule: str, largest: float, size: int = SIZE, known: bool = True) -> list[dict[str, Any]]:
    """Return, for each schedule, the distances of all kinds by storage, relative to how far float32 moved."""
    kinds = jnp.asarray(np.stack(list(gradients(size).values()), 1), jnp.bfloat16)
    sizes = _NOISE.uniform(0.016, 0.031, kinds.shape[1:]) * np.where(
        _NOISE.random(kinds.shape[1:]) < 0.5, -1, 1
    )
    start, rows = jnp.asarray(sizes, jnp.bfloat16), []
    for name, shape in SCHEDULES.items():
        rates = jnp.asarray(largest * shape(np.arange(STEPS)), jnp.float32)
        due = run(
            optimizer(rule, "nearest", rates, True), start.astype(jnp.float32), kinds.astype(jnp.float32)
        )
        moved = np.linalg.norm(due - np.asarray(start, np.float32), axis=1)
        dist = {}
        for storage, shown in [("stochastic", False), ("feedback", False), *([("feedback", True)] * known)]:
            w = run(optimizer(rule, storage, rates, shown), start, kinds)
            label = f"{storage}, known" if shown else storage
            dist[label] = (np.linalg.norm(w - due, axis=1) / np.maximum(moved, 1e-12)).tolist()
        rows.append({"rule": rule, "largest": largest, "schedule": name, **dist})
    return rows


def ratios(row: dict[str, Any], storage: str = "feedback") -> np.ndarray:
    """Return by how much farther each kind ends from float32 than under stochastic rounding."""
    return np.array(row[storage]) / np.maximum(row["stochastic"], 1e-12)


def main() -> int:
    """Print the table, and whether it shows what it must."""
    arguments = report.arguments("Feed errors back without knowing the rates that come.")
    settings = (("adamw", 1e-3), ("adamw", 1e-5), ("sgd", 1e-4))
    rows = [row for setting in settings for row in cells(*setting)]
    names = list(gradients(1))

    def text(row: dict[str, Any], storage: str) -> str:
        found = ratios(row, storage)
        return f"{found.max():.2f} ({names[int(found.argmax())]}), {np.median(found):.2f}"

    report.print_table(
        "<rule | largest rate | <schedule | <unknown: largest, median | <known: largest, median",
        (
            (
                row["rule"],
                f"{row['largest']:.0e}",
                row["schedule"],
                text(row, "feedback"),
                text(row, "feedback, known"),
            )
            for row in rows
        ),
    )
    held = {
        "unknown rates: nearer to float32 than stochastic rounding in every cell": all(
            ratios(row).max() < 1 for row in rows
        ),
        "known rates: likewise": all(ratios(row, "feedback, known").max() < 1 for row in rows),
    }
    return report.finish(held, {"cells": rows}, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
