"""How near to float32 bfloat16 weights stay whose rounding errors are fed back into the first moment.

    python benchmarks/fed_back.py [--steps 1500] [--only TEXT ...] [--transformer [400]] [--json NAME.json]

Digits as in `quality.py`, with four seeds. AdamW: a cosine schedule from 1e-3 and from 1e-4, one from 1e-5
for half of the steps, one from 1e-3 that starts again twice, and one from 1e-3 after 20 steps of warm-up. SGD
with a momentum of 0.9 and no decay: one from 0.1 and one from 0.01, for two fifths of the steps. Each row
stands beside float32 under its schedule.
Both ways to store weights take the same bytes. *dist* and *proj* are as in `quality.py`. `--only` has the
schedules in whose names ("adamw 1e-3", "sgd 0.1") one of these texts stands.

`--transformer` trains the character transformer of `transformer.py` in place of the network, with AdamW,
three seeds and a cosine schedule: from 1e-3, and from 2e-3 after 20 steps of warm-up. Its loss is that on
validation text.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import quality
import transformer
from tqdm import tqdm

import halfstep_jax as hs
import report


@dataclasses.dataclass(frozen=True)
class Run:
    """A rule under a schedule.

    Attributes:
        rule: its name.
        rate: the schedule's name.
        schedule: the schedule.
        steps: how many are taken.
    """

    rule: str
    rate: str
    schedule: optax.Schedule
    steps: int

    @property
    def name(self) -> str:
        """What `--only` looks into."""
        return f"{self.rule} {self.rate}"


MOMENTUM, WARM_UP = 0.9, 20
PLAIN: dict[str, Callable] = {
    "adamw": lambda schedule: optax.adamw(schedule, weight_decay=quality.DECAY),
    "sgd": lambda schedule: optax.sgd(schedule, MOMENTUM),
}
OURS: dict[str, Callable] = {
    "adamw": lambda schedule, **options: hs.adamw(schedule, weight_decay=quality.DECAY, **options),
    "sgd": lambda schedule, **options: hs.sgd(schedule, MOMENTUM, **options),
}
RECIPES = {
    "adamw": {"default": quality.BF16, "eight_bit": quality.EIGHT},
    "sgd": {
        "default": {"accumulator_dtype": "bfloat16"},
        "eight_bit": {"accumulator_dtype": hs.scaled("float8_e4m3fn", 128, min_size=0)},
    },
}
STORAGES = ("stochastic", "feedback")
ROWS = [(recipe, storage) for recipe in ("default", "eight_bit") for storage in STORAGES]


def runs(steps: int) -> list[Run]:
    """Return every rule under its schedules."""
    part = steps // 3

    def fall(rule: str, rate: str, n: int) -> Run:
        return Run(rule, rate, optax.cosine_decay_schedule(float(rate), n), n)

    again = optax.join_schedules([optax.cosine_decay_schedule(1e-3, part)] * 3, [part, 2 * part])
    return [
        fall("adamw", "1e-3", steps),
        fall("adamw", "1e-4", steps),
        fall("adamw", "1e-5", steps // 2),
        Run("adamw", "1e-3, restarts", again, 3 * part),
        Run("adamw", "1e-3, warm-up", warm_up(1e-3, steps), steps),
        fall("sgd", "0.1", steps * 2 // 5),
        fall("sgd", "0.01", steps * 2 // 5),
    ]


def warm_up(peak: float, steps: int) -> optax.Schedule:
    """Return a schedule that rises in 20 steps, and falls in the others."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, WARM_UP, steps)


def stored_as(storage: str, options: dict) -> dict[str, Any]:
    """Return the options of a recipe beside a storage of weights; "feedback" steps before it stores mu."""
    plain = {"mu_rounding": "stochastic"} if storage == "feedback" and "mu_rounding" in options else {}
    return {**options, **plain, "param_storage": storage}


def run_all(chosen: list[Run]) -> list[dict[str, Any]]:
    """Train all rows of these runs; compare each with float32."""
    x, y = quality.data()
    start = quality.flat(jax.vmap(lambda s: quality.initial(s, "float32"))(jnp.arange(quality.SEEDS)))
    results = []
    for run in chosen:
        tx = optax.with_extra_args_support(PLAIN[run.rule](run.schedule))
        reference, of_float32, _ = quality.train_by(tx, "float32", 0, run.steps, x, y, lambda w, _: w)
        for recipe, storage in tqdm(ROWS, desc=run.name, unit="row"):
            tx = OURS[run.rule](run.schedule, **stored_as(storage, RECIPES[run.rule][recipe]))
            full, losses, stored = quality.train_by(tx, "bfloat16", 0, run.steps, x, y, hs.float32_params)
            named = {
                "rule": run.rule,
                "rate": run.rate,
                "recipe": recipe,
                "storage": storage,
                "bytes": stored,
            }
            loss = float(losses.mean() - of_float32.mean())
            results.append(named | {"loss": loss} | quality.compare(full, reference, start))
            tqdm.write(str(results[-1]), file=sys.stderr)
    return results


def on_transformer(steps: int) -> list[dict[str, Any]]:
    """Train the transformer by every row and compare with float32."""
    setting, text = transformer.demo.Recipe(steps=steps), transformer.load_text()
    schedules = {"1e-3": optax.cosine_decay_schedule(1e-3, steps), "2e-3, warm-up": warm_up(2e-3, steps)}
    recipes = {"default": hs.recipes.sixteen_bit, "eight_bit": hs.recipes.eight_bit}
    results = []
    for rate, schedule in schedules.items():
        plain = optax.with_extra_args_support(PLAIN["adamw"](schedule))
        reference = transformer.train(plain, 0, setting, text)
        for recipe, storage in tqdm(ROWS, desc=f"transformer {rate}", unit="row"):
            tx = OURS["adamw"](schedule, **stored_as(storage, dict(recipes[recipe])))
            kept = transformer.demo.STOCHASTIC
            trained = transformer.train(tx, 0, setting, text, hs.float32_params, kept)
            figures = transformer.compare(trained, reference)
            named = {"rule": "adamw", "rate": rate, "recipe": recipe, "storage": storage}
            made = {"bytes": 2 + figures["state"], "spread": figures["dist spread"], **figures}
            results.append(named | made)
            tqdm.write(str(results[-1]), file=sys.stderr)
    return results


CLAIMS = {
    "default: under a quarter of the distance at 1e-3 and 1e-4, and with SGD": lambda below: all(
        below(run, "default", 0.25) for run in ("adamw 1e-3", "adamw 1e-4", "sgd 0.1", "sgd 0.01")
    ),
    "eight_bit: under two thirds of the distance at 1e-3 and 1e-4": lambda below: all(
        below(run, "eight_bit", 2 / 3) for run in ("adamw 1e-3", "adamw 1e-4")
    ),
    "eight_bit, fed back, is nearer than the default recipe, stochastic, at 1e-3 and 1e-4": lambda below: all(
        below(run, "eight_bit", 1, "default") for run in ("adamw 1e-3", "adamw 1e-4")
    ),
    "default: under a quarter of the distance also after a warm-up": lambda below: below(
        "adamw 1e-3, warm-up", "default", 0.25
    ),
    "SGD, eight_bit: under three quarters of the distance at 0.1": lambda below: below(
        "sgd 0.1", "eight_bit", 0.75
    ),
}
"""By sentence: whether the rows show it, from what says that a row fed back is below a factor of another."""


def claims(results: list[dict]) -> dict[str, bool]:
    """Return what the table must show, by sentence; a sentence about a run that was left out is left out."""
    dist = {(f"{row['rule']} {row['rate']}", row["recipe"], row["storage"]): row["dist"] for row in results}

    def below(run: str, recipe: str, factor: float, other: str = "") -> bool:
        return dist[run, recipe, "feedback"] < factor * dist[run, other or recipe, "stochastic"]

    held: dict[str, bool] = {}
    for sentence, shows in CLAIMS.items():
        with contextlib.suppress(KeyError):
            held[sentence] = shows(below)
    pairs = [(run, recipe) for run, recipe, storage in dist if storage == "feedback"]
    held["nearer under every schedule"] = all(below(run, recipe, 1) for run, recipe in pairs)
    proj = [abs(row["proj"] - 1) for row in results if (row["rule"], row["rate"]) == ("adamw", "1e-3")]
    held |= {"movement along float32's within 0.002 at 1e-3": max(proj) < 0.002} if proj else {}
    return held


def main() -> int:
    """Print the table, and whether it shows what it must."""
    arguments = report.arguments("Feed rounding errors of bfloat16 weights back.", 1500, True, 400)
    model = "transformer" if arguments.transformer else "digits"
    if arguments.transformer:
        results = on_transformer(arguments.transformer)
    else:
        chosen = (run for run in runs(arguments.steps) if any(x in run.name for x in arguments.only))
        results = run_all(list(chosen))
    report.print_table(
        "<rule | <rate | <recipe | <weights | bytes per parameter | loss over float32 | dist | proj",
        (
            (
                row["rule"],
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
    return report.finish(claims(results), {model: results}, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
