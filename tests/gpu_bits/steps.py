"""The steps whose programs are executed: every rule, format and weight storage, and numbers that are hard.

Of 16 bits that the rounding of a bfloat16 weight discards, one unit in the last place of float32 moves the
result with a chance of 2^-16. So every format is also run with float32 weights, and every rule with float32
moments and weights, which hide nothing.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import halfstep_spec as spec
from gpu_bits.moment_formats import as_spec, pairs, recipe_options, text
from halfstep.storage.formats import Format
from halfstep.storage.moment_formats import ROUNDINGS
from halfstep_spec.cases.steps import step_case
from halfstep_spec.rules.adafactor import Adafactor
from halfstep_spec.rules.adamw_fed_back import FedBack
from halfstep_spec.rules.adamw_in_codes import InCodes
from halfstep_spec.rules.sgd_fed_back import FedBackSGD
from halfstep_spec.vectors import Case

SMALL, MIDDLE, LARGE = (40, 384), (256, 1024), (512, 1024)
"""XLA makes other programs for other shapes."""

# No power of two, and large: a small one hides the last place of an update as 16 bits do.
_RATE, _DECAY = 0.3, 0.1

NOT_EXECUTED = {
    "torch: norms of whole parameters (LAMB, clipping), rows of NorMuon": "eager, by the CPU's own kernels",
    "torch: gradient accumulation, averages of weights": "one operation more than `round_weights`",
    "Muon's factor": "compared by its norm (A14), and bits are not promised: a step is given one",
    "Muon, of a gradient with NaN or infinity": "its factor would be NaN, and torch refuses the step",
    "LAMB16": "its power is compared within bounds (L4), and bits are not promised",
    "several devices": "programs for one GPU are executed; collectives are not",
    "XLA at 512x1024": "a quarter of what has float32 weights or is a recipe; smaller shapes have every step",
    "golden vectors": "one in sixteen, by XLA's programs: each is compiled for itself",
    "other GPUs": "the programs are for an H100, sm_90a; `make compiled-all` reads those of others",
    "other shapes of a kernel than Triton's first": "its autotuner would try them on the device",
}
"""What no test here executes, and why."""


def one_in(count: int, names: Iterable[str]) -> list[str]:
    """Return about one in so many names, chosen by the name: a step that is added moves no other."""
    return [name for name in names if zlib.crc32(name.encode()) % count == 0]


_STEPS = {"adafactor": Adafactor, "adamw_fed_back": FedBack, "adamw_in_codes": InCodes}
_STEPS["sgd_fed_back"] = FedBackSGD
"""By rule: a step that is none of decay and learning rate alone."""


@functools.cache
def steps() -> dict[str, spec.Step]:
    """Return what is run, by name: the contract's steps."""
    made: dict[str, spec.Step] = {}

    def add(
        name: str, rule: spec.Rule, dtype: str, storage: str = "stochastic", make: Callable = spec.Step,
        decay: str = "decoupled",
    ) -> None:  # fmt: skip
        step = make(rule, _DECAY, decay, dtype, storage)
        if step not in made.values():
            made[name] = step

    for name, options in recipe_options().items():
        moments = (as_spec(Format(x) if isinstance(x, str) else x) for x in _moments(options))
        add(f"recipe {name}", _adam(*moments), "bfloat16", options.get("param_storage", "stochastic"))
    for storage in spec.PARAM_STORAGES:
        add(f"AdamW, {storage}", _adam("bfloat16", "bfloat16"), "bfloat16", storage)
    add("AdamW, float16 weights", _adam("bfloat16", "bfloat16"), "float16")
    for pair in pairs():
        for dtype in ("bfloat16", "float32"):
            add(f"AdamW, {text(pair)}, {dtype} weights", _adam(*map(as_spec, pair)), dtype)
    for dtype in ("bfloat16", "float32"):
        for name, rule in _rules(dtype).items():
            # SGD has no other decay, and Adafactor links of its own.
            make, sums = _STEPS.get(name, spec.Step), ("trace", "sgd_fed_back")
            decay = "l2" if name in sums else "decoupled"
            if name == "adamw_in_codes":  # its weights are float32; what it keeps may be of 16 bits
                add(f"{name}, {dtype} moments", rule, "float32", "nearest", make)
                continue
            add(f"{name}, {dtype}", rule, dtype, make=make, decay=decay)
        add(f"Adam, {dtype}", _adam(dtype, dtype), dtype, decay="l2")
        lamb = functools.partial(spec.Lamb, max_norm=10.0, exact=True)
        add(f"LAMB, {dtype}", _adam(dtype, dtype, eps=1e-6), dtype, make=lamb)
    return made


def _rules(dtype: str) -> dict[str, spec.Rule]:
    """Return every rule that keeps moments, all of a dtype, and Adam as it may be switched."""
    rules = {name: _with_moments(kind, dtype) for name, kind in spec.RULES.items()}
    # Adam is what recipes and formats are run with.
    del rules["adam"]
    switches: dict[str, dict] = {"nesterov": {"nesterov": True}, "eps_root": {"eps_root": 1e-12}}
    switches |= {"eps of 0": {"eps": 0.0}}
    # "auto" becomes one of these, and nearest_unchecked is what forces one.
    roundings = [name for name in ROUNDINGS if name not in ("auto", "nearest_unchecked", "stochastic")]
    switches |= {f"mu {name}": {"mu_rounding": name} for name in roundings}
    rules |= {f"AdamW, {name}": _adam(dtype, dtype, **switch) for name, switch in switches.items()}
    return rules | {"store_state": spec.StoreState(_adam("float32", "float32"), spec.scaled("float8_e4m3fn"))}


def _adam(mu: str | spec.Format, nu: str | spec.Format, **options: Any) -> spec.ScaleByAdam:
    # So that steps that are the same compare equal.
    formats = {"mu_dtype": spec.as_format(mu), "nu_dtype": spec.as_format(nu)}
    return spec.ScaleByAdam(**formats, **{"mu_rounding": "stochastic"} | options)


def _with_moments(kind: type[spec.Rule], dtype: str) -> spec.Rule:
    """Return a rule all of whose moments have a dtype and are rounded stochastically, its factor given."""
    names = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = {name: dtype for name in names if name.endswith("_dtype")}
    if "learning_rate" in names:  # a rule that takes the whole step has the numbers of all of it
        options |= {"learning_rate": _RATE} | ({"weight_decay": _DECAY} if "weight_decay" in names else {})
    if "param_dtype" in options:
        options["param_dtype"] = spec.scaled("int8", "row", 0, 0, scale="fine")
    options |= {name: "stochastic" for name in names if name.endswith("rounding")}
    return kind(**options, **dict.fromkeys({"given"}.intersection(names), True))


def _moments(options: dict) -> tuple:
    return options["mu_dtype"], options["nu_dtype"]


def case(name: str, shape: tuple[int, ...], count: int) -> Case:
    """Return so many steps of a name, with what the contract says they give."""
    p, gradients = numbers(shape, count)
    step = steps()[name]
    # One infinity or NaN would spread over the whole matrix; so would NorMuon's square of a large number.
    if isinstance(step.rule, (spec.RULES["muon"], spec.RULES["adafactor"])):
        gradients = np.where(np.isfinite(gradients), gradients, np.float32(0))
    if isinstance(step.rule, spec.RULES["normuon"]):
        gradients = np.clip(gradients, -(2.0**48), 2.0**48).astype(np.float32)
    return step_case(step, name, spec.round_to(p, step.param_dtype), gradients, None, _RATE, (), ())


def numbers(shape: tuple[int, ...], count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and a gradient for each step: over many binades, with every special number."""
    rng, tiny = np.random.default_rng(seed), 2.0**-126
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3.38e38, -3.38e38, tiny, -tiny, tiny / 2, 1e-40, -1e-45]
    special += [1.0, -1.0, 1e30, 1e-30, 65504, 448, 2.0**-24, 2.0**-127]

    def wide(*axes: int, low: int, high: int) -> np.ndarray:
        return rng.normal(0, 1, axes) * np.exp2(rng.integers(low, high, axes))

    p = wide(*shape, low=-12, high=4)
    p.ravel()[:400] = rng.choice(special, p.ravel()[:400].shape)
    every = count, *shape
    g = np.where(rng.random(every) < 0.2, wide(*every, low=-120, high=60), wide(*every, low=-24, high=2))
    g *= rng.random(every) < 7 / 8
    # Two rows of three have none of them: one marks a whole block.
    rows = (np.arange(shape[0]) % 3 == 0).reshape(-1, *([1] * (len(shape) - 1)))
    g = np.where((rng.random(every) < 0.3) & rows, rng.choice(special, every), g)
    return p.astype(np.float32), g.astype(np.float32)


def nearly_subnormal(case: Case) -> np.ndarray:
    """Tell of each step and weight whether it has had a gradient for which A8 excuses it.

    A product with it may be subnormal; at an eps of 0 its square, too, is not hidden by anything. L2 decay
    makes such gradients of such weights.
    """

    def is_tiny(name: str) -> np.ndarray:
        values = spec.decode(case.inputs[name].bits, case.inputs[name].dtype)
        hidden = "eps" not in case.inputs or case.inputs["eps"].bits.any()
        return (values != 0) & (np.abs(values) < 2.0 ** (-100 if hidden else -50))

    decayed = is_tiny("p") if case.arguments["decay"] == "l2" else np.False_
    return np.logical_or.accumulate(is_tiny("g") | decayed)
