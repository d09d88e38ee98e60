"""What `quality.py` trains by other rules: the settings of three subjects by task, and what must hold.

- *rules*: formats under rules but Adam, each at a rate of its own and relative to its own run in float32.
  Schedule-free rules are judged by their averaged weights, at a rate that stands;
- *muon*: its momentum; on digits every kernel is under Muon at 1e-2, and biases are under AdamW;
- *low_weights*: weights of 8 bits without a copy (`eco.py`), at two rates and at one that restarts.
"""

from collections.abc import Callable
from typing import Any

import eco
import optax
import optax.contrib
from settings import E4M3, E5M3, NOISE, Options, blocks, restarts
from training import DECAY, LR, Claim, Setting, Task, Transformer

import halfstep_jax as hs

FREE, FREE_LR, ADA, RELATIVE_STEP = "schedule_free_adamw", 2.5e-3, "adafactor", 1e-2
OF_OPTAX, ADA_SUM = f"optax.contrib.{FREE}", f"{ADA}, momentum"
FLOAT16, FINE = blocks("float16"), blocks("int8", 32, scale="fine")


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

    uroot8 = blocks("uroot8")
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
            "lead int8 in 32, fine; nu uroot8": _lead(FINE, blocks("uroot8")),
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
    "int8, 128": {"mu_dtype": blocks("int8")},
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
        *of_rate("restarts", lambda task: restarts(task.steps), LOW),
    ]


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
SUBJECTS = {"rules": (rules, _RULES), "muon": (muon, _MUON), "low_weights": (low_weights, _LOW)}
"""By name: the settings of a task, and claims."""
