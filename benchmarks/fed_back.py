"""How near to float32 bfloat16 weights stay whose rounding errors are fed back into the first moment.

    python benchmarks/fed_back.py [--steps 1500] [--json benchmarks/results/NAME.json]

Digits as in `quality.py`, with four seeds: a cosine schedule from 1e-3 and from 1e-4, one from 1e-5 for half
of the steps, and one from 1e-3 that starts again twice. Each row stands beside float32 under that schedule.
Both ways to store weights take the same bytes. *dist* and *proj* are as in `quality.py`.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import quality
from tqdm import tqdm

import halfstep_jax as hs
import report

RECIPES = {"default": quality.BF16, "eight_bit": quality.EIGHT}
STORAGES = ("stochastic", "feedback")


def schedules(steps: int) -> dict[str, tuple[optax.Schedule, int]]:
    """Return schedules and their steps by name."""
    part = steps // 3
    again = [optax.cosine_decay_schedule(1e-3, part)] * 3
    once = {"1e-3": (1e-3, steps), "1e-4": (1e-4, steps), "1e-5": (1e-5, steps // 2)}
    found = {name: (optax.cosine_decay_schedule(rate, n), n) for name, (rate, n) in once.items()}
    return found | {"1e-3, restarts": (optax.join_schedules(again, [part, 2 * part]), 3 * part)}


def run_all(steps: int) -> list[dict[str, Any]]:
    """Train all rows under all schedules; compare each with float32."""
    x, y = quality.data()
    start = quality.flat(jax.vmap(lambda s: quality.initial(s, "float32"))(jnp.arange(quality.SEEDS)))
    results = []
    for rate, (schedule, n) in schedules(steps).items():
        tx = optax.with_extra_args_support(optax.adamw(schedule, weight_decay=quality.DECAY))
        reference, of_float32, _ = quality.train_by(tx, "float32", 0, n, x, y, lambda w, _: w)
        rows = [(recipe, storage) for recipe in RECIPES for storage in STORAGES]
        for recipe, storage in tqdm(rows, desc=rate, unit="row"):
            options = RECIPES[recipe] | {"param_storage": storage}
            if storage == "feedback":  # steps before it stores mu
                options["mu_rounding"] = "stochastic"
            tx = hs.adamw(schedule, weight_decay=quality.DECAY, **options)
            full, losses, stored = quality.train_by(tx, "bfloat16", 0, n, x, y, hs.float32_params)
            named = {"rate": rate, "recipe": recipe, "storage": storage, "bytes": stored}
            loss = float(losses.mean() - of_float32.mean())
            results.append(named | {"loss": loss} | quality.compare(full, reference, start))
            tqdm.write(str(results[-1]), file=sys.stderr)
    return results


def claims(results: list[dict]) -> dict[str, bool]:
    """Return what the table must show, by sentence."""
    dist = {(row["rate"], row["recipe"], row["storage"]): row["dist"] for row in results}
    proj = {row["recipe"]: abs(row["proj"] - 1) for row in results if row["rate"] == "1e-3"}
    rates = {rate for rate, *_ in dist}

    def below(recipe: str, rate: str, factor: float) -> bool:
        return dist[rate, recipe, "feedback"] < factor * dist[rate, recipe, "stochastic"]

    return {
        "default: under a quarter of the distance at 1e-3 and 1e-4": all(
            below("default", rate, 0.25) for rate in ("1e-3", "1e-4")
        ),
        "eight_bit: under two thirds of the distance at 1e-3 and 1e-4": all(
            below("eight_bit", rate, 2 / 3) for rate in ("1e-3", "1e-4")
        ),
        "eight_bit, fed back, is nearer than the default recipe, stochastic, at 1e-3 and 1e-4": all(
            dist[rate, "eight_bit", "feedback"] < dist[rate, "default", "stochastic"]
            for rate in ("1e-3", "1e-4")
        ),
        "nearer under every schedule": all(below(recipe, rate, 1) for recipe in RECIPES for rate in rates),
        "movement along float32's within 0.002 at 1e-3": max(proj.values()) < 0.002,
    }


def main() -> int:
    """Print the table, and whether it shows what it must."""
    arguments = report.arguments("Feed rounding errors of bfloat16 weights back.", 1500)
    results = run_all(arguments.steps)
    report.print_table(
        "<rate | <recipe | <weights | bytes per parameter | loss over float32 | dist | proj",
        (
            (
                row["rate"],
                row["recipe"],
                row["storage"],
                f"{row['bytes']:.2f}",
                f"{row['loss']:+.5f}",
                f"{row['dist']:.4f} ± {row['spread']:.4f}",
                f"{row['proj']:.4f}",
            )
            for row in results
        ),
    )
    return report.finish(claims(results), {"digits": results}, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
