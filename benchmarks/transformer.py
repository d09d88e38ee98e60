"""How far each way to store moments leads a small transformer from float32, beside another order of batches.

    python benchmarks/transformer.py [--steps 400] [--only TEXT ...] [--json benchmarks/results/NAME.json]

The demo's character transformer (`examples/`), AdamW at 3e-4, three seeds: of the first weights, the batches
and the random words. Weights are float32, so that nothing but the moments differs; arrays of under 4,096
elements keep float32 moments, as by default. Mean over seeds and their standard deviation: *loss*, that on
validation text less float32's; *dist*, *proj* and `--only` as in `quality.py`.
"""

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import halfstep_jax as hs
import report

# Behind this folder, whose `report` is another than that of the examples.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

import recipe as demo
import train_flax
from text import Text, load_text

SEEDS = 3
OTHER_ORDER = 100


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        name: for the table.
        options: of `halfstep_jax.adamw`; None is `optax.adamw`.
        order: added to the seed of the batches.
    """

    name: str
    options: dict[str, Any] | None = None
    order: int = 0


def _moments(mu: object, nu: object) -> dict[str, Any]:
    return {"mu_dtype": mu, "nu_dtype": nu}


ROWS = (
    Row("float32 (optax.adamw)"),
    Row("float32, another batch order", order=OTHER_ORDER),
    Row("bfloat16", _moments("bfloat16", "bfloat16")),
    Row("sixteen_bit: bfloat16, ufloat16_e7m9", dict(hs.recipes.sixteen_bit)),
    Row("relative int8, ufloat8_e5m3", _moments(hs.relative("int8", 128), hs.scaled("ufloat8_e5m3"))),
    Row("eight_bit: relative e3m4 with feedback, uroot8", dict(hs.recipes.eight_bit)),
    Row("one_pass: mulaw8, uroot4_e4m4", dict(hs.recipes.one_pass)),
    Row("four_bit: relative int4 with feedback, uroot8", dict(hs.recipes.four_bit)),
    Row("fp8: e4m3fn, ufloat8_e5m3", _moments(hs.scaled("float8_e4m3fn"), hs.scaled("ufloat8_e5m3"))),
)


def windows(text: Text, setting: demo.Recipe, order: int) -> jax.Array:
    """Return all batches: int32 (steps, 2, batch, context), characters and those that follow."""
    pairs = text.batches(setting.steps, setting.batch, setting.context, setting.seed + order)
    return jnp.asarray(np.stack([np.stack(pair) for pair in pairs]))


def transform(row: Row, setting: demo.Recipe) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a row."""
    if row.options is None:
        plain = optax.adamw(setting.learning_rate, weight_decay=setting.weight_decay)
        return optax.with_extra_args_support(plain)
    return hs.adamw(setting.learning_rate, weight_decay=setting.weight_decay, **row.options)


def first_weights(setting: demo.Recipe, vocabulary: int, kept: demo.Row = demo.FLOAT32):
    """Return the structure of the model and its first weights, the same numbers in either dtype."""
    return nnx.split(train_flax.make_model(setting, kept, vocabulary))


def train(
    tx: optax.GradientTransformationExtraArgs,
    order: int,
    setting: demo.Recipe,
    text: Text,
    known: Callable[[Any, Any], Any] = lambda weights, _: weights,
    kept: demo.Row = demo.FLOAT32,
) -> list[dict[str, Any]]:
    """Train all seeds by a transform; return of each the first and last weights, the loss, bytes of state.

    `order` is added to the seed of the batches; `known` returns the weights that are judged, of the model's
    and the state; `kept` has the dtype of the model's.
    """
    structure, _ = first_weights(setting, len(text.vocabulary), kept)
    held_out = jnp.asarray(np.stack(text.validation_windows(setting.validation_windows, setting.context)))

    def loss(weights, pair):
        return train_flax.loss_of(nnx.merge(structure, weights), pair[0], pair[1])

    @jax.jit
    def run(weights, state, batches):
        def step(carry, pair):
            weights, state = carry
            updates, state = tx.update(jax.grad(loss)(weights, pair), state, weights)
            return (optax.apply_updates(weights, updates), state), None

        (weights, state), _ = jax.lax.scan(step, (weights, state), batches)
        weights = known(weights, state)
        return weights, loss(weights, held_out)

    results = []
    for seed in range(SEEDS):
        of_seed = dataclasses.replace(setting, seed=seed)
        _, start = first_weights(of_seed, len(text.vocabulary), kept)
        state = tx.init(start)
        if optax.tree.get_all_with_path(state, "seed"):
            state = optax.tree.set(state, seed=jnp.array([0, seed], jnp.uint32))
        weights, last = run(start, state, windows(text, of_seed, order))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        results.append({"start": flat(start), "end": flat(weights), "loss": float(last), "state": size})
    return results


def flat(tree) -> np.ndarray:
    """Return all weights as one vector, float64."""
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def compare(results: list[dict], truth: list[dict]) -> dict[str, float]:
    """Return figures of a row against float32's, seed by seed: mean and standard deviation."""
    loss, dist, proj = [], [], []
    for mine, theirs in zip(results, truth, strict=True):
        moved = theirs["end"] - theirs["start"]
        loss.append(mine["loss"] - theirs["loss"])
        dist.append(np.linalg.norm(mine["end"] - theirs["end"]) / np.linalg.norm(moved))
        proj.append((mine["end"] - mine["start"]) @ moved / (moved @ moved))
    figures = {"state": results[0]["state"] / results[0]["end"].size}
    for name, values in (("loss", loss), ("dist", dist), ("proj", proj)):
        figures |= {name: float(np.mean(values)), f"{name} spread": float(np.std(values))}
    return figures


def run_all(rows: Iterable[Row], steps: int) -> list[dict]:
    """Train every row and compare it with the first."""
    setting, text = demo.Recipe(steps=steps), load_text()
    results, truth = [], None
    for row in tqdm(rows, unit="row"):
        trained = train(transform(row, setting), row.order, setting, text)
        truth = trained if truth is None else truth
        results.append({"name": row.name, **compare(trained, truth)})
        tqdm.write(str(cells(results[-1])), file=sys.stderr)
    return results


EIGHT = (
    "relative int8, ufloat8_e5m3",
    "eight_bit: relative e3m4 with feedback, uroot8",
    "one_pass: mulaw8, uroot4_e4m4",
)
FOUR = "four_bit: relative int4 with feedback, uroot8"
OTHER = "float32, another batch order"
CLAIMS = {
    "four_bit: dist <= 0.15": lambda dist: dist[FOUR] <= 0.15,
    **{
        f"{name}: dist under half of another batch order's": lambda dist, name=name: (
            dist[name] < dist[OTHER] / 2
        )
        for name in (*EIGHT, FOUR)
    },
}


def claims(results: list[dict]) -> dict[str, bool]:
    """Return what the table must show, by sentence; a sentence about a row that was left out is left out."""
    dist, held = {row["name"]: row["dist"] for row in results}, {}
    for sentence, shows in CLAIMS.items():
        with contextlib.suppress(KeyError):
            held[sentence] = shows(dist)
    return held


def cells(row: dict) -> tuple[str, ...]:
    """Return the cells of a row."""
    spread = (f"{row[name]:.4f} ± {row[f'{name} spread']:.4f}" for name in ("dist", "proj"))
    return row["name"], f"{row['state']:.2f}", f"{row['loss']:+.4f} ± {row['loss spread']:.4f}", *spread


def main() -> int:
    """Print the table, and whether it shows what it must."""
    arguments = report.arguments(
        "Train a transformer with every recipe; compare with float32.", 400, rows=True
    )
    results = run_all(report.chosen(ROWS, arguments.only), arguments.steps)
    report.print_table(
        "<moments | bytes of state per parameter | loss over float32 | dist | proj", map(cells, results)
    )
    return report.finish(claims(results), results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
