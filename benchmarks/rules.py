"""Which formats hold under rules other than Adam, judged by the path as `quality.py` judges Adam's.

    python benchmarks/rules.py [--steps 1500] [--transformer [400]] [--only TEXT ...] [--json NAME.json]

The network, batches, decay and figures of `quality.py`, each rule at a rate of its own on a cosine. *dist*
and *proj* are relative to the first row of the same rule, in float32 throughout; schedule-free rules have a
rate that stands, and are judged by their averaged weights. Muon has a table of its own, in `muon.py`.
`--only` picks rows as in `quality.py`, by rule and name.

`--transformer` trains the character transformer of `transformer.py` in place of the network: 400 steps, three
seeds, 0.3 of each rate, which does not fall. That is 3e-4 for the rules that have Adam's.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import quality
import transformer
from tqdm import tqdm

import halfstep_jax as hs
import report

FREE, FREE_LR, WARMUP = "schedule_free_adamw", 2.5e-3, 100
ADA, MOMENTUM, RELATIVE = "adafactor", "adafactor, momentum", 1e-2


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting of a rule.

    Attributes:
        rule: the name of what makes the transform, of `MAKE`.
        name: of the setting, for the table.
        options: of that function.
        weights: dtype of the weights.
        order: which shuffling of the batches.
    """

    rule: str
    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    weights: str = "float32"
    order: int = 0


class Rates(NamedTuple):
    """How a task changes the rates of `ROWS`.

    Attributes:
        factor: of every rate.
        steps: in which rates fall to 0 on a cosine; None: they stand.
    """

    factor: float
    steps: int | None

    def __call__(self, rate: float) -> optax.Schedule:
        """Return the schedule of a rate."""
        rate *= self.factor
        return (
            optax.constant_schedule(rate)
            if self.steps is None
            else optax.cosine_decay_schedule(rate, self.steps)
        )


Made = tuple[optax.GradientTransformation, Callable]


def _decayed(link: Callable, rate: float) -> Callable[..., Made]:
    """Return what makes a chain of a rule, decay and rate, given rates and the rule's options."""

    def make(rates: Rates, **options: Any) -> Made:
        scaled = hs.scale_by_learning_rate(rates(rate))
        return optax.chain(link(**options), hs.add_decayed_weights(quality.DECAY), scaled), hs.float32_params

    return make


def _free(rates: Rates, **options: Any) -> Made:
    tx = hs.schedule_free_adamw(FREE_LR * rates.factor, WARMUP, weight_decay=quality.DECAY, **options)
    return tx, lambda params, state: hs.schedule_free_eval_params(state, params, tx)


def _free_of_optax(rates: Rates, stored: str | None = None) -> Made:
    averaged = optax.contrib.schedule_free_eval_params
    rate = FREE_LR * rates.factor
    tx = optax.contrib.schedule_free_adamw(rate, WARMUP, weight_decay=quality.DECAY)
    if stored is None:
        return tx, lambda params, state: averaged(state, params)
    return hs.store_state(tx, stored), lambda params, state: averaged(state.inner_state, params)


def _adafactor(rates: Rates, **options: Any) -> Made:
    """Return Adafactor that factors every kernel of the network, at the paper's relative step."""
    return hs.adafactor(rates(RELATIVE), min_dim_size_to_factor=8, **options), hs.float32_params


MAKE: dict[str, Callable[..., Made]] = {
    ADA: _adafactor,
    MOMENTUM: _adafactor,
    "scale_by_ademamix": _decayed(hs.scale_by_ademamix, quality.LR),
    "scale_by_adan": _decayed(hs.scale_by_adan, quality.LR),
    "scale_by_lion": _decayed(hs.scale_by_lion, quality.LR / 4),
    FREE: _free,
    f"optax.contrib.{FREE}": _free_of_optax,
}
"""By rule: what returns a transform of rates and options, and what returns the weights that are judged."""


def _scaled(dtype: str, block_size: int = 128, **options: str) -> object:
    return hs.scaled(dtype, block_size, 0, **options)


FLOAT16, INT8, E4M3 = _scaled("float16"), _scaled("int8", 32, scale="fine"), _scaled("float8_e4m3fn")
UROOT8 = _scaled("uroot8")


def _rows(rule: str, *moments: str, nu: bool = True) -> tuple[Row, ...]:
    """Return the rows of a rule whose moments with a sign are these: each format for all of them."""

    def row(name: str, fmt: Any, fmt_of_nu: Any, order: int = 0, **options: Any) -> Row:
        dtypes = {f"{moment}_dtype": fmt for moment in moments} | ({"nu_dtype": fmt_of_nu} if nu else {})
        return Row(rule, name, {**dtypes, **options}, order=order)

    return (
        row("float32", "float32", "float32"),
        row("float32, another batch order", "float32", "float32", order=1),
        row("scaled float16; nu bfloat16" if nu else "scaled float16", FLOAT16, "bfloat16"),
        row("bfloat16", "bfloat16", "bfloat16"),
        row("int8 in 32, fine; nu uroot8" if nu else "int8 in 32, fine", INT8, UROOT8),
        row("e4m3fn; nu uroot8" if nu else "e4m3fn", E4M3, UROOT8),
    )


def _lead(lead: Any, nu: Any, **options: Any) -> dict[str, Any]:
    return {"lead_dtype": lead, "nu_dtype": nu, **options}


F32, BF16 = _lead("float32", "float32"), _lead("bfloat16", "bfloat16")
NU = {"nu_dtype": "float32"}
ROWS = (
    *_rows("scale_by_ademamix", "mu", "slow"),
    *_rows("scale_by_adan", "mu", "diff", "grad"),
    *_rows("scale_by_lion", "mu", nu=False),
    Row(ADA, "float32", NU),
    Row(ADA, "float32, another batch order", NU, order=1),
    Row(ADA, "float32, nothing factored", {**NU, "factored": False}),
    Row(ADA, "nu of biases bf16", {"nu_dtype": "bfloat16"}),
    Row(ADA, "bf16 split8; nu bf16", {"nu_dtype": "bfloat16", "param_storage": "split8"}, "bfloat16"),
    Row(ADA, "bf16 stochastic; nu bf16", {"nu_dtype": "bfloat16"}, "bfloat16"),
    Row(ADA, "bf16 nearest; nu bf16", {"nu_dtype": "bfloat16", "param_storage": "nearest"}, "bfloat16"),
    Row(MOMENTUM, "float32", {**NU, "momentum": 0.9}),
    Row(MOMENTUM, "float32, another batch order", {**NU, "momentum": 0.9}, order=1),
    Row(MOMENTUM, "momentum bf16", {**NU, "momentum": 0.9, "dtype_momentum": "bfloat16"}),
    Row(MOMENTUM, "momentum int8 in 32, fine", {**NU, "momentum": 0.9, "dtype_momentum": INT8}),
    Row(MOMENTUM, "momentum e4m3fn", {**NU, "momentum": 0.9, "dtype_momentum": E4M3}),
    Row(FREE, "float32", F32),
    Row(FREE, "float32, another batch order", F32, order=1),
    Row(FREE, "lead bf16; nu bf16", BF16),
    Row(FREE, "lead scaled float16; nu bf16", _lead(FLOAT16, "bfloat16")),
    Row(FREE, "lead int8 in 32, fine; nu uroot8", _lead(INT8, UROOT8)),
    Row(FREE, "lead e4m3fn; nu ufloat8_e5m3", _lead(E4M3, _scaled("ufloat8_e5m3"))),
    Row(FREE, "bf16 split16; float32", {**F32, "param_storage": "split16"}, "bfloat16"),
    Row(FREE, "bf16 split8; bf16", {**BF16, "param_storage": "split8"}, "bfloat16"),
    Row(FREE, "bf16 compensated; bf16", {**BF16, "param_storage": "compensated"}, "bfloat16"),
    Row(FREE, "bf16 stochastic; bf16", BF16, "bfloat16"),
    Row(FREE, "bf16 nearest; bf16", {**BF16, "param_storage": "nearest"}, "bfloat16"),
    Row(f"optax.contrib.{FREE}", "float32"),
    Row(f"optax.contrib.{FREE}", "z bf16; nu bf16, by store_state", {"stored": "bfloat16"}),
    Row(f"optax.contrib.{FREE}", "bf16", weights="bfloat16"),
)


def on_digits(rows: list[Row], steps: int) -> list[dict[str, Any]]:
    """Train rows on digits and compare each with the first of its rule."""
    x, y = quality.data()
    start = quality.flat(jax.vmap(lambda seed: quality.initial(seed, "float32"))(jnp.arange(quality.SEEDS)))
    results, references = [], {}
    for row in tqdm(rows, unit="row"):
        tx, known = MAKE[row.rule](Rates(1.0, steps), **row.options)
        tx = optax.with_extra_args_support(tx)
        full, losses, stored = quality.train_by(tx, row.weights, row.order, steps, x, y, known)
        reference = references.setdefault(row.rule, full)
        named = {"rule": row.rule, "name": row.name, "bytes": stored, "loss": float(losses.mean())}
        named["weights"] = row.weights
        results.append(named | quality.compare(full, reference, start))
        tqdm.write(str(results[-1]), file=sys.stderr)
    return results


def on_transformer(rows: list[Row], steps: int) -> list[dict[str, Any]]:
    """Train rows with float32 weights on the character transformer, compared with the first of their rule."""
    setting, text = transformer.demo.Recipe(steps=steps), transformer.load_text()
    rates = Rates(setting.learning_rate / quality.LR, None)
    results, references = [], {}
    for row in tqdm([row for row in rows if row.weights == "float32"], unit="row"):
        tx, known = MAKE[row.rule](rates, **row.options)
        tx, order = optax.with_extra_args_support(tx), transformer.OTHER_ORDER * row.order
        trained = transformer.train(tx, order, setting, text, known)
        named = {"rule": row.rule, "name": row.name, "weights": row.weights}
        results.append(named | transformer.compare(trained, references.setdefault(row.rule, trained)))
        tqdm.write(str(results[-1]), file=sys.stderr)
    return results


def claims(results: list[dict]) -> dict[str, bool]:
    """Return what the table must show, by sentence, of the rules that it has."""
    held = {}
    free = [row for row in results if FREE in row["rule"]]
    narrow = {row["name"]: row["dist"] for row in free if row["weights"] == "bfloat16"}
    for name, dist in narrow.items():
        alone = name == "bf16" or "nearest" in name
        held[f"{name}: dist {'over 0.3' if alone else 'under 0.1'}"] = dist > 0.3 if alone else dist < 0.1
    for rule in dict.fromkeys(row["rule"] for row in results):
        wide = [row for row in results if row["rule"] == rule and row["weights"] == "float32"]
        dist = {row["name"]: row["dist"] for row in wide}
        if noise := dist.get("float32, another batch order"):
            sixteen = max((dist[name] for name in dist if "16" in name), default=0.0)
            held[f"{rule}: 16 bits have under half of the dist of another batch order"] = sixteen < noise / 2
    dist = {row["name"]: row["dist"] for row in results}
    if (lead := dist.get("lead bf16; nu bf16")) and (z := dist.get("z bf16; nu bf16, by store_state")):
        held["a lead in bfloat16: under a third of the dist of z in bfloat16"] = lead < z / 3
    return held


def main() -> int:
    """Print the table, and whether it shows what it must."""
    arguments = report.arguments("Train digits by rules other than Adam.", 1500, rows=True, transformer=400)
    rows = [
        row
        for row in ROWS
        if row.name == "float32" or any(text in f"{row.rule} {row.name}" for text in arguments.only)
    ]
    if arguments.transformer:
        results = on_transformer(rows, arguments.transformer)
        report.print_table(
            "<rule | <moments | bytes of state per parameter | loss over float32 | dist | proj",
            ((row["rule"], *transformer.cells(row)) for row in results),
        )
    else:
        results = on_digits(rows, arguments.steps)
        report.print_table(
            "<rule | <moments | bytes per parameter | training loss | dist | proj",
            ((row["rule"], row["name"], f"{row['bytes']:.2f}", *quality.cells(row)) for row in results),
        )
    return report.finish(claims(results), results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
