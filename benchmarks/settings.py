"""What `quality.py` trains by AdamW and SGD: the settings of two subjects by task, and what must hold.

- *adam*: formats of moments and storages of weights under AdamW, on digits from 1e-3 on a cosine;
- *fed_back*: bfloat16 weights whose rounding errors are fed back into the first moment, by schedule.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax
from training import DECAY, LR, Claim, Setting, Task, Transformer

import halfstep_jax as hs

Options = dict[str, Any]
NOISE, NEAREST = "float32, another batch order", "nearest_unchecked"


def blocks(dtype: str, block_size: int = 128, **options: str) -> Any:
    """Return a format with a scale per block, of arrays of any size."""
    return hs.scaled(dtype, block_size, 0, **options)


def _codebook(table: str) -> Any:
    return hs.codebook(table, block_size=128, min_size=0)


def _relative(dtype: str, block_size: int) -> Any:
    return hs.relative(dtype, block_size, min_size=0)


def _moments(mu: Any, nu: Any, rounding: str = "", **others: Any) -> Options:
    return {
        "mu_dtype": mu,
        "nu_dtype": nu,
        **dict.fromkeys(("mu_rounding", "nu_rounding") if rounding else (), rounding),
        **others,
    }


def _adam(options: Options | None, rate: float = LR) -> Callable[[Task], Any]:
    """Return what makes AdamW; no options: Optax's, in float32."""
    if options is None:
        return lambda task: optax.adamw(task.rate(rate), weight_decay=DECAY)
    return lambda task: hs.adamw(task.rate(rate), weight_decay=DECAY, **options)


F32, BF16 = _moments("float32", "float32"), _moments("bfloat16", "bfloat16")
UNSIGNED = _moments("bfloat16", "ufloat16_e7m9")
E4M3, E5M3 = blocks("float8_e4m3fn"), blocks("ufloat8_e5m3")
E3M4, INT8, INT4 = hs.relative("float8_e3m4"), _relative("int8", 128), _relative("int4", 32)
FP8 = _moments(E4M3, E5M3, mu_rounding="stochastic")
TABLES8 = _codebook("dynamic8"), _codebook("udynamic8")
EIGHT = hs.recipes.eight_bit | {"nu_dtype": blocks("uroot8")}
FOUR = hs.recipes.four_bit | {"mu_dtype": INT4, "nu_dtype": blocks("uroot8")}
WIDE: dict[str, Options] = {
    "float32": F32,
    "mu bf16, nu scaled fp16": _moments("bfloat16", blocks("float16")),
    "bf16": BF16,
    "mu bf16, nu ufloat16_e7m9": UNSIGNED,
    "bf16 nearest": _moments("bfloat16", "bfloat16", NEAREST),
    "one_pass: mulaw8, uroot4_e4m4": dict(hs.recipes.one_pass),
    "eight_bit: relative e3m4 with feedback, uroot8": EIGHT,
    "four_bit: relative int4 with feedback, uroot8": FOUR,
    "mu relative e3m4, nu uroot8": EIGHT | {"mu_rounding": "stochastic"},
    "mu relative e3m4, nu ufloat8_e5m3": _moments(E3M4, E5M3),
    "mu relative int8, nu ufloat8_e5m3": _moments(INT8, E5M3),
    "mu relative int4, nu ufloat8_e5m3": _moments(INT4, E5M3),
    "fp8: mu e4m3fn, nu ufloat8_e5m3": FP8,
    "fp8: mu e4m3fn, nu e4m3fn": _moments(E4M3, E4M3, mu_rounding="stochastic"),
    "fp8 e4m3fn nearest": _moments(E4M3, E4M3, NEAREST),
    "int8 mu, nu ufloat8_e5m3": _moments(blocks("int8"), E5M3),
    "8-bit tables: dynamic8, udynamic8": _moments(*TABLES8),
    "8-bit tables, nearest": _moments(*TABLES8, NEAREST),
}
"""By name: the moments under float32 weights."""
NARROW: dict[str, Options] = {
    **{f"{kind}; float32": {**F32, "param_storage": kind} for kind in ("split16", "split8")},
    "split8; bf16": {**BF16, "param_storage": "split8"},
    "split8; mu bf16, nu ufloat16_e7m9": {**UNSIGNED, "param_storage": "split8"},
    "compensated; float32": {**F32, "param_storage": "compensated"},
    "compensated; bf16": {**BF16, "param_storage": "compensated"},
    "stochastic; float32": F32,
    "stochastic; bf16": BF16,
    "stochastic; mu bf16, nu ufloat16_e7m9": UNSIGNED,
    "stochastic; one_pass": dict(hs.recipes.one_pass),
    "stochastic; eight_bit": EIGHT,
    "stochastic; four_bit": FOUR,
    "stochastic; relative e3m4, ufloat8_e5m3": _moments(E3M4, E5M3),
    "stochastic; relative int8, ufloat8_e5m3": _moments(INT8, E5M3),
    "stochastic; relative int4, ufloat8_e5m3": _moments(INT4, E5M3),
    "stochastic; fp8": FP8,
    "nearest; float32": {**F32, "param_storage": "nearest"},
    "nearest; bf16 nearest": _moments("bfloat16", "bfloat16", NEAREST, param_storage="nearest"),
}
"""By name: storage of bfloat16 weights, and moments."""
ON_TRANSFORMER: dict[str, Options] = {
    "bfloat16": BF16,
    "sixteen_bit: bfloat16, ufloat16_e7m9": dict(hs.recipes.sixteen_bit),
    "relative int8, ufloat8_e5m3": _moments(hs.relative("int8", 128), hs.scaled("ufloat8_e5m3")),
    "eight_bit: relative e3m4 with feedback, uroot8": dict(hs.recipes.eight_bit),
    "one_pass: mulaw8, uroot4_e4m4": dict(hs.recipes.one_pass),
    "four_bit: relative int4 with feedback, uroot8": dict(hs.recipes.four_bit),
    "fp8: e4m3fn, ufloat8_e5m3": _moments(hs.scaled("float8_e4m3fn"), hs.scaled("ufloat8_e5m3")),
}
"""By name: moments under float32 weights; arrays of under 4,096 elements keep float32, as by default."""


def adam(task: Task) -> list[Setting]:
    """Return the settings of AdamW; the first is Optax's in float32."""

    def settings(prefix: str, of: dict[str, Options], weights: str) -> list[Setting]:
        return [Setting({"name": prefix + name}, _adam(o), weights=weights) for name, o in of.items()]

    if isinstance(task, Transformer):
        first, others = "float32 (optax.adamw)", settings("", ON_TRANSFORMER, "float32")
    else:
        first = "float32, float32 (optax.adamw)"
        others = settings("float32; ", WIDE, "float32") + settings("bf16 ", NARROW, "bfloat16")
        others[0] = dataclasses.replace(others[0], labels={"name": "float32, float32"})
    plain = _adam(None)
    return [Setting({"name": first}, plain), Setting({"name": NOISE}, plain, order=1), *others]


MOMENTUM, WARM_UP = 0.9, 20


def _warm_up(peak: float) -> Callable[[int], optax.Schedule]:
    return lambda steps: optax.warmup_cosine_decay_schedule(0.0, peak, WARM_UP, steps)


def _cosine(rate: float) -> Callable[[int], optax.Schedule]:
    return lambda steps: optax.cosine_decay_schedule(rate, steps)


def restarts(steps: int) -> optax.Schedule:
    """Return a schedule that falls to 0 three times."""
    part = steps // 3
    return optax.join_schedules([optax.cosine_decay_schedule(LR, part)] * 3, [part, 2 * part])


RUNS: dict[tuple[str, str], tuple[Callable[[int], optax.Schedule], float]] = {
    ("adamw", "1e-3"): (_cosine(1e-3), 1),
    ("adamw", "1e-4"): (_cosine(1e-4), 1),
    ("adamw", "1e-5"): (_cosine(1e-5), 1 / 2),
    ("adamw", "1e-3, restarts"): (restarts, 1),
    ("adamw", "1e-3, warm-up"): (_warm_up(1e-3), 1),
    ("sgd", "0.1"): (_cosine(0.1), 2 / 5),
    ("sgd", "0.01"): (_cosine(0.01), 2 / 5),
}
"""By rule and rate on digits: the schedule of a number of steps, and the share of the steps."""
RUNS_ON_TRANSFORMER = {("adamw", "1e-3"): (_cosine(1e-3), 1), ("adamw", "2e-3, warm-up"): (_warm_up(2e-3), 1)}
FP8_SUM = {"accumulator_dtype": hs.scaled("float8_e4m3fn", 128, min_size=0)}
RECIPES: dict[str, dict[str, Options]] = {
    "adamw": {"default": BF16, "eight_bit": EIGHT},
    "sgd": {"default": {"accumulator_dtype": "bfloat16"}, "eight_bit": FP8_SUM},
}
NAMED = {"default": dict(hs.recipes.sixteen_bit), "eight_bit": dict(hs.recipes.eight_bit)}


def fed_back(task: Task) -> list[Setting]:
    """Return each recipe under each schedule with and without feedback, behind float32, which has no row."""

    def make(rule: str, schedule: Callable, **options: Any) -> Callable[[Task], Any]:
        if rule == "sgd":
            alias = hs.sgd if options else optax.sgd
            return lambda task: alias(schedule(task.steps), MOMENTUM, **options)
        alias = hs.adamw if options else optax.adamw
        return lambda task: alias(schedule(task.steps), weight_decay=DECAY, **options)

    on_transformer = isinstance(task, Transformer)
    settings = []
    for (rule, rate), (schedule, share) in (RUNS_ON_TRANSFORMER if on_transformer else RUNS).items():
        run = {"rule": rule, "rate": rate}
        settings.append(Setting(run, make(rule, schedule), f"{run}", share=share, shown=False))
        for recipe, options in (NAMED if on_transformer else RECIPES[rule]).items():
            for storage in ("stochastic", "feedback"):
                # "feedback" steps before it stores mu.
                steps_first = storage == "feedback" and "mu_rounding" in options
                plain = {"mu_rounding": "stochastic"} if steps_first else {}
                made = make(rule, schedule, **{**options, **plain, "param_storage": storage})
                labels = {**run, "recipe": recipe, "storage": storage}
                settings.append(Setting(labels, made, f"{run}", "bfloat16", share=share))
    return settings


_EIGHT, _FOUR = (
    "eight_bit: relative e3m4 with feedback, uroot8",
    "four_bit: relative int4 with feedback, uroot8",
)
_ONE, _W = "one_pass: mulaw8, uroot4_e4m4", "float32; "
_ADAM: tuple[Claim, ...] = (
    ("dist", f"{_W}mu bf16, nu scaled fp16", 0.005),
    ("dist", f"{_W}bf16", 0.015),
    ("dist", 0.015, f"{_W}bf16 nearest"),
    ("proj", f"{_W}bf16 nearest", 0.99),
    ("dist", f"{_W}fp8: mu e4m3fn, nu ufloat8_e5m3", 0.12),
    ("bias", f"{_W}fp8: mu e4m3fn, nu ufloat8_e5m3", 0.01),
    ("dist", _W + _ONE, 0.088),
    ("bias", _W + _ONE, 0.0007),
    ("dist", _W + _EIGHT, 0.036),
    ("dist", _W + _FOUR, 0.05),
    ("dist", f"{_W}mu relative int8, nu ufloat8_e5m3", f"{_W}fp8: mu e4m3fn, nu ufloat8_e5m3"),
    *(("bias", f"{_W}mu relative {mu}, nu ufloat8_e5m3", 0.0005) for mu in ("e3m4", "int8")),
    ("dist", f"{_W}mu relative int4, nu ufloat8_e5m3", NOISE),
    ("dist", f"{_W}8-bit tables: dynamic8, udynamic8", 0.06),
    ("bias", f"{_W}8-bit tables: dynamic8, udynamic8", 0.01),
    ("bias", 0.015, f"{_W}fp8 e4m3fn nearest"),
    *(("dist", f"bf16 {kind}; float32", 0.02) for kind in ("compensated", "split8", "split16")),
    ("dist", "bf16 split8; bf16", 0.015),
    ("dist", "bf16 stochastic; float32", NOISE),
    ("dist", 0.3, "bf16 nearest; float32"),
    ("proj", "bf16 nearest; float32", 0.9),
    ("dist", _FOUR, 0.15),
    *(("dist", name, (0.5, NOISE)) for name in ("relative int8, ufloat8_e5m3", _EIGHT, _ONE, _FOUR)),
)
_QUARTER = ("adamw 1e-3", "adamw 1e-4", "sgd 0.1", "sgd 0.01", "adamw 1e-3, warm-up")
_FED_BACK: tuple[Claim, ...] = (
    *(("dist", f"{x} default feedback", (0.25, f"{x} default stochastic")) for x in _QUARTER),
    *(("dist", f"{x} eight_bit feedback", (2 / 3, f"{x} eight_bit stochastic")) for x in _QUARTER[:2]),
    *(("dist", f"{x} eight_bit feedback", f"{x} default stochastic") for x in _QUARTER[:2]),
    ("dist", "sgd 0.1 eight_bit feedback", (0.75, "sgd 0.1 eight_bit stochastic")),
    *(
        ("dist", f"{' '.join(run)} {recipe} feedback", f"{' '.join(run)} {recipe} stochastic")
        for run in (*RUNS, *RUNS_ON_TRANSFORMER)
        for recipe in NAMED
    ),
    *(
        ("bias", f"adamw 1e-3 {recipe} {storage}", 0.002)
        for recipe in NAMED
        for storage in ("stochastic", "feedback")
    ),
)
SUBJECTS = {"adam": (adam, _ADAM), "fed_back": (fed_back, _FED_BACK)}
"""By name: the settings of a task, and claims."""
