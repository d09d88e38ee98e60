"""What `quality.py` trains: the settings of each subject by task, and what its tables must show.

- *adam*: formats of moments and storages of weights under AdamW, on digits from 1e-3 on a cosine;
- *fed_back*: bfloat16 weights whose rounding errors are fed back into the first moment, by schedule;
- *rules*: formats under other rules, each at a rate of its own and relative to its own run in float32.
  Schedule-free rules are judged by their averaged weights, at a rate that stands;
- *muon*: its momentum; on digits every kernel is under Muon at 1e-2, and biases are under AdamW;
- *low_weights*: weights of 8 bits without a copy (`eco.py`), at two rates and at one that restarts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import eco
import optax
import optax.contrib
from training import DECAY, LR, Claim, Setting, Task, Transformer

import halfstep_jax as hs

Options = dict[str, Any]
NOISE, NEAREST = "float32, another batch order", "nearest_unchecked"


def _scaled(dtype: str, block_size: int = 128, **options: str) -> Any:
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
E4M3, E5M3 = _scaled("float8_e4m3fn"), _scaled("ufloat8_e5m3")
E3M4, INT8, INT4 = hs.relative("float8_e3m4"), _relative("int8", 128), _relative("int4", 32)
FP8 = _moments(E4M3, E5M3, mu_rounding="stochastic")
TABLES8 = _codebook("dynamic8"), _codebook("udynamic8")
EIGHT = hs.recipes.eight_bit | {"nu_dtype": _scaled("uroot8")}
FOUR = hs.recipes.four_bit | {"mu_dtype": INT4, "nu_dtype": _scaled("uroot8")}
WIDE: dict[str, Options] = {
    "float32": F32,
    "mu bf16, nu scaled fp16": _moments("bfloat16", _scaled("float16")),
    "bf16": BF16,
    "mu bf16, nu ufloat16_e7m9": UNSIGNED,
    "bf16 nearest": _moments("bfloat16", "bfloat16", NEAREST),
    "one_pass: mulaw8, uroot4_e4m4": dict(hs.recipes.one_pass),
    "eight_bit: relative e3m4 with feedback, uroot8": EIGHT,
    "four_bit: relative int4 with feedback, uroot8": FOUR,
    "mu relative e3m4, nu ufloat8_e6m2": _moments(E3M4, "ufloat8_e6m2"),
    "mu relative e3m4, nu uroot8": EIGHT | {"mu_rounding": "stochastic"},
    "mu relative e3m4, nu ufloat8_e5m3": _moments(E3M4, E5M3),
    "mu relative int8, nu ufloat8_e5m3": _moments(INT8, E5M3),
    "mu relative int4, nu ufloat8_e5m3": _moments(INT4, E5M3),
    "fp8: mu e4m3fn, nu ufloat8_e5m3": FP8,
    "fp8: mu e4m3fn, nu e4m3fn": _moments(E4M3, E4M3, mu_rounding="stochastic"),
    "fp8 e4m3fn nearest": _moments(E4M3, E4M3, NEAREST),
    "int8 mu, nu ufloat8_e5m3": _moments(_scaled("int8"), E5M3),
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


def _restarts(steps: int) -> optax.Schedule:
    part = steps // 3
    return optax.join_schedules([optax.cosine_decay_schedule(LR, part)] * 3, [part, 2 * part])


RUNS: dict[tuple[str, str], tuple[Callable[[int], optax.Schedule], float]] = {
    ("adamw", "1e-3"): (_cosine(1e-3), 1),
    ("adamw", "1e-4"): (_cosine(1e-4), 1),
    ("adamw", "1e-5"): (_cosine(1e-5), 1 / 2),
    ("adamw", "1e-3, restarts"): (_restarts, 1),
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


FREE, FREE_LR, ADA, RELATIVE_STEP = "schedule_free_adamw", 2.5e-3, "adafactor", 1e-2
OF_OPTAX, ADA_SUM = f"optax.contrib.{FREE}", f"{ADA}, momentum"
FLOAT16, FINE = _scaled("float16"), _scaled("int8", 32, scale="fine")


def _decayed(link: Callable, rate: float) -> Callable[[Options], Callable[[Task], Any]]:
    def of_task(options: Options) -> Callable[[Task], Any]:
        return lambda task: optax.chain(
            link(**options), hs.add_decayed_weights(DECAY), hs.scale_by_learning_rate(task.rate(rate))
        )

    return of_task


def _free(options: Options) -> Callable[[Task], Any]:
    def make(task: Task) -> Any:
        tx = hs.schedule_free_adamw(_standing(task), 100, weight_decay=DECAY, **options)
        return tx, lambda params, state: hs.schedule_free_eval_params(state, params, tx)

    return make


def _free_of_optax(options: Options) -> Callable[[Task], Any]:
    averaged = optax.contrib.schedule_free_eval_params

    def make(task: Task) -> Any:
        tx = optax.contrib.schedule_free_adamw(_standing(task), 100, weight_decay=DECAY)
        if not options:
            return tx, lambda params, state: averaged(state, params)
        return hs.store_state(tx, **options), lambda params, state: averaged(state.inner_state, params)

    return make


def _standing(task: Task) -> float:
    return FREE_LR * (0.3 if isinstance(task, Transformer) else 1)


def _adafactor(options: Options) -> Callable[[Task], Any]:
    """Return what makes an Adafactor that factors every kernel, at the paper's relative step."""
    return lambda task: hs.adafactor(task.rate(RELATIVE_STEP), min_dim_size_to_factor=8, **options)


def _of_formats(*moments: str, nu: bool = True) -> dict[str, Options]:
    """Return the settings of a rule whose moments with a sign are these: each format for all of them."""

    def options(fmt: Any, fmt_of_nu: Any) -> Options:
        return {f"{moment}_dtype": fmt for moment in moments} | ({"nu_dtype": fmt_of_nu} if nu else {})

    uroot8 = _scaled("uroot8")
    beside = {
        "scaled float16": (FLOAT16, "bfloat16"),
        "bfloat16": ("bfloat16", "bfloat16"),
        "int8 in 32, fine": (FINE, uroot8),
        "e4m3fn": (E4M3, uroot8),
    }
    texts = {"bfloat16": "bfloat16", "scaled float16": "scaled float16; nu bfloat16"}
    wide = options("float32", "float32")
    return {
        "float32": wide,
        NOISE: wide,
        **{(texts.get(x, f"{x}; nu uroot8") if nu else x): options(*pair) for x, pair in beside.items()},
    }


def _lead(lead: Any, nu: Any, storage: str = "") -> Options:
    return {"lead_dtype": lead, "nu_dtype": nu} | ({"param_storage": storage} if storage else {})


def _in_momentum(dtype: Any = None) -> Options:
    return {"nu_dtype": "float32", "momentum": 0.9} | ({"dtype_momentum": dtype} if dtype else {})


OF_RULES: dict[str, tuple[Callable[[Options], Callable[[Task], Any]], dict[str, Options]]] = {
    "scale_by_ademamix": (_decayed(hs.scale_by_ademamix, LR), _of_formats("mu", "slow")),
    "scale_by_adan": (_decayed(hs.scale_by_adan, LR), _of_formats("mu", "diff", "grad")),
    "scale_by_lion": (_decayed(hs.scale_by_lion, LR / 4), _of_formats("mu", nu=False)),
    ADA: (
        _adafactor,
        {
            "float32": {"nu_dtype": "float32"},
            NOISE: {"nu_dtype": "float32"},
            "float32, nothing factored": {"nu_dtype": "float32", "factored": False},
            "nu of biases bf16": {"nu_dtype": "bfloat16"},
            "bf16 split8; nu bf16": {"nu_dtype": "bfloat16", "param_storage": "split8"},
            "bf16 stochastic; nu bf16": {"nu_dtype": "bfloat16"},
            "bf16 nearest; nu bf16": {"nu_dtype": "bfloat16", "param_storage": "nearest"},
        },
    ),
    ADA_SUM: (
        _adafactor,
        {
            "float32": _in_momentum(),
            NOISE: _in_momentum(),
            "momentum bf16": _in_momentum("bfloat16"),
            "momentum int8 in 32, fine": _in_momentum(FINE),
            "momentum e4m3fn": _in_momentum(E4M3),
        },
    ),
    FREE: (
        _free,
        {
            "float32": _lead("float32", "float32"),
            NOISE: _lead("float32", "float32"),
            "lead bf16; nu bf16": _lead("bfloat16", "bfloat16"),
            "lead scaled float16; nu bf16": _lead(FLOAT16, "bfloat16"),
            "lead int8 in 32, fine; nu uroot8": _lead(FINE, _scaled("uroot8")),
            "lead e4m3fn; nu ufloat8_e5m3": _lead(E4M3, E5M3),
            "bf16 split16; float32": _lead("float32", "float32", "split16"),
            **{
                f"bf16 {x}; bf16": _lead("bfloat16", "bfloat16", x)
                for x in ("split8", "compensated", "stochastic", "nearest")
            },
        },
    ),
    OF_OPTAX: (
        _free_of_optax,
        {"float32": {}, "z bf16; nu bf16, by store_state": {"format": "bfloat16"}, "bf16": {}},
    ),
}
"""By rule: what makes it of options, and options by name; names that begin with bf16 have such weights."""


def rules(task: Task) -> list[Setting]:
    """Return the settings of all rules but Muon; those with bfloat16 weights are for digits."""
    settings = []
    for rule, (make, rows) in OF_RULES.items():
        for name, options in rows.items():
            narrow = "bfloat16" if name.startswith("bf16") else "float32"
            labels, order = {"rule": rule, "name": name}, int(name == NOISE)
            settings.append(Setting(labels, make(options), rule, narrow, order))
    wide = [x for x in settings if x.weights == "float32"]
    return wide if isinstance(task, Transformer) else settings


FP16, INT8_FINE = "scaled float16, 128", "int8, 32, fine"
MOMENTA: dict[str, Options | None] = {
    "float32": {"mu_dtype": "float32"},
    NOISE: {"mu_dtype": "float32"},
    INT8_FINE: {"mu_dtype": FINE},
    "optax.contrib.muon, float32": None,
    "optax.contrib.muon; bfloat16 weights": None,
    "float32, bias_correction": {"mu_dtype": "float32", "bias_correction": True},
    "float32, products in bfloat16": {"mu_dtype": "float32", "ns_dtype": "bfloat16"},
    FP16: {"mu_dtype": FLOAT16},
    "bfloat16": {"mu_dtype": "bfloat16"},
    "int8, 128": {"mu_dtype": _scaled("int8")},
    "float8_e4m3fn, 128": {"mu_dtype": E4M3},
    f"{FP16}; bfloat16 weights, stochastic": {"mu_dtype": FLOAT16},
    f"{FP16}; bfloat16 weights, nearest": {"mu_dtype": FLOAT16, "param_storage": "nearest"},
}
"""By name: options of Muon; None is Optax's."""


def muon(task: Task) -> list[Setting]:
    """Return the settings of Muon; on the transformer AdamW has 3e-4, a tenth of Muon's rate."""
    on_transformer = isinstance(task, Transformer)

    def kernels(name: str, x: Any) -> bool | None:
        """Let Muon step every kernel of the small network: its first and last are matrices too."""
        return True if name.endswith("kernel") and x.ndim == 2 and name.startswith("layer") else None

    def make(options: Options | None) -> Callable[[Task], Any]:
        def of_task(task: Task) -> Any:
            rates = {"learning_rate": task.rate(1e-2)}
            rates["adam_learning_rate"] = task.rate(LR) if on_transformer else None
            if options is None:
                return optax.contrib.muon(**rates, eps=1e-7)
            return hs.muon(**rates, matrices=kernels, **options)

        return of_task

    chosen = ("float32", NOISE, FP16, INT8_FINE) if on_transformer else MOMENTA
    return [
        Setting(
            {"name": name},
            make(MOMENTA[name]),
            weights="bfloat16" if "bfloat16 weights" in name else "float32",
            order=int(name == NOISE),
            alike=not on_transformer,
        )
        for name in chosen
    ]


LOW = ("float32", "bfloat16, stochastic", "int8, stochastic", "int8, fed back", "int8, fed back by ECO")
BOUNDED, E4M3_ECO = "int8, fed back by ECO, at most 4 roots", "float8_e4m3fn, fed back by ECO"


def low_weights(task: Task) -> list[Setting]:
    """Return the settings of weights of 8 bits, at each rate."""

    def of_rate(rate: str, schedule: Callable[[Task], optax.Schedule], names: Any) -> list[Setting]:
        def make(row: eco.Row) -> Callable[[Task], Any]:
            return lambda task: (eco.adamw(row, schedule(task), DECAY), lambda weights, _: weights)

        rows = [row for row in eco.ROWS if row.name in names]
        labels = [{"name": row.name} | ({"rate": rate} if rate else {}) for row in rows]
        return [
            Setting(x, make(row), rate, order=int(row.name == NOISE))
            for x, row in zip(labels, rows, strict=True)
        ]

    if isinstance(task, Transformer):
        names = (*LOW[:1], NOISE, *LOW[1:4], E4M3_ECO)
        return of_rate("", lambda task: task.rate(LR), names)
    return [
        *of_rate("1e-03", lambda task: task.rate(LR), [row.name for row in eco.ROWS]),
        *of_rate("1e-05", lambda task: task.rate(LR / 100), (*LOW, BOUNDED)),
        *of_rate("restarts", lambda task: _restarts(task.steps), LOW),
    ]


SUBJECTS: dict[str, Callable[[Task], list[Setting]]] = {
    f.__name__: f for f in (adam, fed_back, rules, muon, low_weights)
}
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
_RULES: tuple[Claim, ...] = (
    *(("dist", f"{FREE} bf16 {x}", 0.1) for x in ("split16; float32", "split8; bf16", "stochastic; bf16")),
    ("dist", f"{FREE} bf16 compensated; bf16", 0.1),
    ("dist", 0.3, f"{FREE} bf16 nearest; bf16"),
    ("dist", 0.3, f"{OF_OPTAX} bf16"),
    ("dist", f"{FREE} lead bf16; nu bf16", (1 / 3, f"{OF_OPTAX} z bf16; nu bf16, by store_state")),
    *(
        ("dist", f"{rule} {name}", (0.5, f"{rule} {NOISE}"))
        for rule, (_, rows) in OF_RULES.items()
        for name in rows
        if NOISE in rows and "16" in name and not name.startswith("bf16")
    ),
)
_MUON: tuple[Claim, ...] = (
    ("dist", FP16, 0.03),
    ("bias", FP16, 0.002),
    ("dist", INT8_FINE, 0.40),
    ("proj", 0.91, INT8_FINE),
    ("dist", NOISE, "int8, 128"),
    ("dist", NOISE, "float8_e4m3fn, 128"),
    ("dist", "optax.contrib.muon, float32", 0.03),
    *(("over", name, 0.003) for name in (FP16, INT8_FINE)),
)
_LOW: tuple[Claim, ...] = (
    ("dist", "int8, fed back 1e-03", (0.5, "int8, stochastic 1e-03")),
    *(("dist", f"int8, fed back{x} 1e-03", "bfloat16, stochastic 1e-03") for x in ("", " into bfloat16")),
    ("dist", "int8, fed back into relative int8 1e-03", "bfloat16, stochastic 1e-03"),
    ("dist", "int8, fed back restarts", "bfloat16, stochastic restarts"),
    ("dist", 1, "int8, fed back by ECO restarts"),
    ("dist", 1, f"{BOUNDED} 1e-05"),
    ("dist", "int8, fed back", "bfloat16, stochastic"),
    ("dist", NOISE, E4M3_ECO),
)
CLAIMS = {"adam": _ADAM, "fed_back": _FED_BACK, "rules": _RULES, "muon": _MUON, "low_weights": _LOW}
