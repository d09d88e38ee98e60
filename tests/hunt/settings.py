"""What the hunt draws: rules, formats, ways to store weights, trees, hyperparameters and patterns."""

import dataclasses
import itertools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import strategies as st

import halfstep_spec as spec
from halfstep_spec import CODEBOOK_CODES, PARAM_STORAGES, PLAIN_CODES, SCALED_CODES
from halfstep_spec.storage.relative import LARGEST_BOUND, bound
from halfstep_spec.storage.relative_codes import FINE_CODES, FIXED_CODES
from hunt import rules

EXAMPLES = int(os.environ.get("HUNT", "2000"))
"""Of the steps; lives, files and state dicts are taken in proportion."""
SEED = int(os.environ.get("HUNT_SEED", "24"))
SHAPES = (
    *((), (0,), (1,), (2,), (3, 0), (7,), (13,), (15,), (16,), (17,), (31, 2), (33,), (63,), (64,), (65,)),
    *((127,), (128,), (129,), (2, 3), (5, 7), (1, 129), (3, 1, 4), (2, 3, 11), (2, 1, 3, 2), (1, 2, 2, 1, 3)),
)
"""From no axis to five; no element, primes, and powers of two with their neighbours."""
MATRICES = ((1, 1), (2, 3), (31, 2), (5, 7), (1, 129), (16, 17))
"""Two axes and some elements, as Muon asks for."""
PATHS = (("w",), ("b", "w"), ("blocks/0/w", "blocks/1/w"), ("a/kernel", "a/bias", "head/kernel"))
"""Names of the arrays of a tree; a number is a place in a list."""
_MUONS = ("muon", "normuon")
_BLOCKS = (2, 4, 16, 128, "row", None)
_ODD_BLOCKS = (*_BLOCKS, 1, 7, 13)


@dataclasses.dataclass(frozen=True)
class Setting:
    """All that a step is compiled for.

    Attributes:
        rule: a key of `halfstep_spec.RULES`, or "lamb"; "muon" and "normuon" have the factor given (A14), and
            "adamw_in_codes" float32 weights, which it stores itself; those fed back round their own.
        dtype: of the weights.
        storage: of the weights.
        formats: of the moments, by argument: (function of the packages, its arguments), or a name.
        options: other arguments of the rule, by name.
        decay: "decoupled", "l2" or "".
        shapes: of the arrays, by name.
    """

    rule: str
    dtype: str
    storage: str
    formats: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    decay: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def auto(self) -> bool:
        """Whether a rounding depends on the rates."""
        return "auto" in dict(self.options).values()

    def _arguments(self, package: ModuleType, seed: Any) -> dict[str, Any]:
        formats = {name: formatted(package, fmt) for name, fmt in self.formats}
        return {**formats, **dict(self.options), "seed": seed}

    def links(self, package: ModuleType, numbers: dict[str, Any], seed: Any) -> list[Any]:
        """Return the links of a package; numbers may be traced."""
        return rules.links(package, self.rule, self.decay, {**self._arguments(package, seed), **numbers})

    def reference(self, numbers: "Numbers") -> spec.Step:
        """Return the step of the reference."""
        arguments = {**self._arguments(spec, numbers.seed), **numbers.rule}
        decay = (numbers.weight_decay, self.decay) if self.decay else (0.0, "decoupled")
        return rules.reference(self.rule, arguments, decay, self.dtype, self.storage)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What a compiled step takes as numbers."""

    rule: dict[str, float]
    learning_rate: float
    weight_decay: float
    seed: int

    @property
    def of_links(self) -> dict[str, float]:
        """All but the seed, by the names of `Setting.links`."""
        return {**self.rule, "lr": self.learning_rate, "weight_decay": self.weight_decay}


def formatted(package: ModuleType, fmt: Any) -> Any:
    """Return a format of a package."""
    if isinstance(fmt, str):
        return fmt
    function, name, block, options = fmt
    if function == "relative" and block is None:
        return package.relative(name)
    return getattr(package, function)(name, block, min_size=0, min_ndim=0, **dict(options))


def _blocks(codes: Any) -> tuple:
    return _BLOCKS if codes.packed else _ODD_BLOCKS


def formats(keep: Callable[[Any], bool]) -> list[Any]:
    """Return every format whose codes are as asked; float32 and bfloat16 are in front, for shrinking."""
    plain = [name for name, codes in PLAIN_CODES.items() if keep(codes) and name != "uroot4_e4m4"]
    blocked = [
        (function, name, block, ())
        for function, kinds in (("scaled", SCALED_CODES), ("codebook", CODEBOOK_CODES))
        for name, codes in kinds.items()
        if keep(codes)
        for block in _blocks(codes)
    ]
    fine = [("scaled", "int8", block, (("scale", "fine"),)) for block in _ODD_BLOCKS]
    return plain + blocked + (fine if keep(SCALED_CODES["int8"]) else [])


SIGNED, SECOND = formats(lambda codes: codes.signed), formats(lambda codes: codes.for_second_moments)
FIXED = [("relative", name, None, ()) for name in FIXED_CODES if name != "mulaw8"]
FINE = [("relative", name, block, ()) for name in FINE_CODES for block in _BLOCKS if block is not None]
# Together: a second moment in fourth roots has a largest number, and only these stop with it.
ROOTS = [(mu, "uroot4_e4m4") for mu in (*FIXED, ("relative", "mulaw8", None, ()))]
_ROUNDINGS = ("stochastic", "nearest", "auto")


_KINDS_OF = {
    "trace": {"accumulator_dtype": SIGNED},
    "lion": {"mu_dtype": SIGNED},
    **{name: {"mu_dtype": formats(lambda codes: codes.signed and not codes.packed)} for name in _MUONS},
    "adan": {"mu_dtype": SIGNED, "diff_dtype": SIGNED, "nu_dtype": SECOND, "grad_dtype": SIGNED},
    "ademamix": {"mu_dtype": SIGNED, "slow_dtype": SIGNED, "nu_dtype": SECOND},
    "rms": {"nu_dtype": SECOND},
    "adafactor": {"nu_dtype": SECOND},
    "schedule_free": {"nu_dtype": SECOND, "lead_dtype": SIGNED},
    "adamw_fed_back": {"mu_dtype": [*SIGNED, *FINE, *FIXED], "nu_dtype": SECOND},
    "sgd_fed_back": {"accumulator_dtype": SIGNED},
    "adamw_in_codes": {
        "mu_dtype": [fmt for fmt in (*SIGNED, *FINE) if fmt != "float16"],
        "nu_dtype": SECOND,
        "param_dtype": [("scaled", "int8", "row", (("scale", "fine"),))],
    },
}
"""Of rules whose formats do not depend on each other; Adam's do, and LAMB's."""
_BOTH, _SECOND_ROUNDINGS = (True, False), ("stochastic", "nearest")
_OF_MUON = {
    "mu_rounding": _ROUNDINGS,
    "nesterov": _BOTH,
    "bias_correction": _BOTH,
    "output_axis": (0, 1),
    "scale": ("original", "consistent_rms", None),
    "given": (True,),
}
_OPTIONS_OF = {
    "trace": {"rounding": (*_ROUNDINGS, "feedback"), "nesterov": _BOTH},
    "lion": {"mu_rounding": _ROUNDINGS},
    **dict.fromkeys(_MUONS, _OF_MUON),
    "adan": {"mu_rounding": _ROUNDINGS, "nu_rounding": _SECOND_ROUNDINGS},
    "ademamix": {"mu_rounding": _ROUNDINGS, "slow_rounding": _ROUNDINGS, "nu_rounding": _SECOND_ROUNDINGS},
    "rms": {"nu_rounding": _SECOND_ROUNDINGS, "eps_in_sqrt": _BOTH, "bias_correction": _BOTH},
    "adafactor": {
        "nu_rounding": _SECOND_ROUNDINGS,
        "factored": (True, True, False),
        "step_offset": (0, 2),
        "min_dim_size_to_factor": (2, 0, 5, 128),
    },
    "schedule_free": {
        "nu_rounding": _SECOND_ROUNDINGS,
        "eps_in_sqrt": _BOTH,
        "bias_correction": _BOTH,
        "lead_rounding": _SECOND_ROUNDINGS,
    },
    "adamw_fed_back": {"mu_rounding": _ROUNDINGS, "nu_rounding": _SECOND_ROUNDINGS, "nesterov": _BOTH},
    "sgd_fed_back": {"rounding": _ROUNDINGS, "nesterov": _BOTH},
    "adamw_in_codes": {"mu_rounding": _ROUNDINGS, "nu_rounding": _SECOND_ROUNDINGS},
}
RULES = (
    *("trace", "lion", "adam", "adan", "ademamix", "rms", "adafactor", *_MUONS, "schedule_free", "lamb"),
    "adamw_in_codes",
    "adamw_fed_back",
    "sgd_fed_back",
)


_DECAYS = {"adafactor": ("", "decoupled"), "adamw_in_codes": ("decoupled",), "adamw_fed_back": ("decoupled",)}
_DECAYS["sgd_fed_back"] = ("",)
"""Of rules that do not take every kind."""


def _drawn(draw, choices: dict[str, Any]) -> tuple:
    return tuple((name, draw(st.sampled_from(some))) for name, some in choices.items())


@st.composite
def _moments(draw, rule: str) -> tuple[tuple, tuple]:
    """Return formats and other arguments of a rule."""
    if rule in _KINDS_OF:
        return _drawn(draw, _KINDS_OF[rule]), _drawn(draw, _OPTIONS_OF[rule])
    kind = draw(st.sampled_from(("apart", "relative", "roots")))
    if kind == "roots":
        mu, nu = draw(st.sampled_from(ROOTS))
    else:
        firsts = SIGNED if kind == "apart" else FIXED + FINE
        mu, nu = draw(st.sampled_from(firsts)), draw(st.sampled_from(SECOND))
    feedback = () if kind == "roots" else ("feedback",)
    options = {
        "mu_rounding": (*_ROUNDINGS, *feedback),
        "nu_rounding": _SECOND_ROUNDINGS,
        "nesterov": _BOTH,
        "bias_correction": _BOTH,
    }
    return (("mu_dtype", mu), ("nu_dtype", nu)), _drawn(draw, options)


@st.composite
def settings_of_steps(draw) -> Setting:
    """Draw a setting."""
    rule = draw(st.sampled_from((*RULES, "adam", "adam")))
    kinds, options = draw(_moments(rule))
    names = draw(st.sampled_from(PATHS))
    shapes = MATRICES if rule in _MUONS else SHAPES
    dtypes, storages = ("float32", "bfloat16", "bfloat16", "float16"), tuple(PARAM_STORAGES)
    if rule == "adamw_in_codes":
        dtypes, storages = ("float32",), ("nearest",)
    if rule in ("adamw_fed_back", "sgd_fed_back"):
        storages = ("nearest",)
    return Setting(
        rule,
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from(storages)),
        kinds,
        options,
        draw(st.sampled_from(_DECAYS.get(rule, ("", "decoupled", "l2")))),
        tuple((name, draw(st.sampled_from(shapes))) for name in names),
    )


_RATES = (0.9, 0.0, 0.5, 0.8, 0.95, 0.98, 0.99, 0.999, 0.9999)
_KEPT = tuple(rate for rate in _RATES if rate)  # of moments that what is fed back is divided by
_PAIRS = [pair for pair in itertools.product(_RATES, _RATES[1:]) if bound(*pair) <= LARGEST_BOUND]
_TINY = (1e-8, 1e-30, 1e-6, 1e-3, 1.0)
_RMS = {"decay": _RATES, "eps": _TINY}
_NUMBERS_OF = {
    "trace": {"decay": _RATES},
    "sgd_fed_back": {"decay": _KEPT, "peak_lr": (0.0, 0.1)},
    "lion": {"b1": _RATES, "b2": _RATES},
    "muon": {"beta": _RATES},
    "normuon": {"beta": _RATES, "beta2": _RATES},
    "adan": {"b1": _RATES, "b2": _RATES, "b3": _RATES, "eps": _TINY},
    "ademamix": {
        **{name: _RATES for name in ("b1", "b2", "b3")},
        **{"alpha": (5.0, 0.0, 1e-3, 8.0), "eps": _TINY, "eps_root": (0.0, 1e-16)},
    },
    "rms": _RMS,
    "adafactor": {
        **{
            "decay_rate": (0.8, 0.0, 0.5, 0.95, 1.0),
            "epsilon": (1e-30, 0.0, 1e-8),
            "floor": (0.0, 2.0**-23, 1e-3),
        },
        **{"clipping_threshold": (1.0, 0.5, 3.0), "min_scale": (1e-3, 0.0, 1.0)},
    },
    "schedule_free": {**_RMS, "b1": _RATES, "warmup_steps": (0.0, 1.0, 3.0, 1000.0)},
}
"""Of rules whose rates do not depend on each other; Adam's do, and LAMB's."""


@st.composite
def numbers_of(draw, setting: Setting) -> Numbers:
    """Draw hyperparameters that the setting takes."""
    if setting.rule in _NUMBERS_OF:
        rule = dict(_drawn(draw, _NUMBERS_OF[setting.rule]))
    else:
        kept = setting.rule in ("adamw_in_codes", "adamw_fed_back")
        b1, b2 = draw(st.sampled_from([pair for pair in _PAIRS if pair[0] or not kept]))
        rule = {"b1": b1, "b2": b2} | dict(_drawn(draw, {"eps": _TINY, "eps_root": (0.0, 1e-16)}))
        if setting.rule == "lamb":
            rule["max_norm"] = draw(st.sampled_from((10.0, 0.0, 1e-3, 1e30)))
    return Numbers(
        rule,
        # Not 0: a first step at 0 without gradients makes state alone, for torch.distributed.checkpoint.
        draw(st.sampled_from((1e-3, 1e-12, 1e-7, 1e-5, 0.1, 3.0))),
        draw(st.sampled_from((0.1, 1e-4, 0.5))),
        draw(st.sampled_from((0, 7, 2**32, 2**40 + 5, 2**64 - 1))),
    )


_KINDS = ("near 1", "any", "special", "tiny", "huge", "zero", "rows")
_SPECIAL = (0, 1, 0x80000000, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0x7F800000)
_SPECIALS = np.array([*_SPECIAL, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32)
kinds_of_numbers = st.sampled_from(_KINDS)
_FINITE = st.sampled_from(("near 1", "tiny", "zero", "rows"))


def kinds_for(setting: Setting) -> st.SearchStrategy[str]:
    """Return the kinds of numbers that a setting takes: Muon refuses infinities, also those of a format."""
    return _FINITE if setting.rule in _MUONS else kinds_of_numbers


def patterns(seed: int, kind: str, shape: tuple[int, ...], dtype: str, least: float = 0.0) -> np.ndarray:
    """Return patterns of `dtype`: of all bits alike, of special numbers, or of normal ones of some size.

    Of the kind "rows" every second row is zero.

    Numbers below `least` become 0.
    """
    rng = np.random.default_rng(seed)
    if kind == "any":
        width = {"float32": np.uint32}.get(dtype, np.uint16)
        bits = rng.integers(0, np.iinfo(width).max, shape, width, endpoint=True)
    elif kind == "special":
        bits = spec.round_to(np.asarray(rng.choice(_SPECIALS, shape), np.uint32).view(np.float32), dtype)
    else:
        exponent = {"near 1": 0, "rows": 0, "tiny": -30, "huge": 40, "zero": -200}[kind]
        x = rng.normal(size=shape) * np.exp2(exponent + rng.integers(-8, 1, shape))
        if kind == "rows" and shape:
            x[::2] = 0  # the same rows at every step: whole blocks that never have a gradient
        bits = spec.round_to(np.asarray(x, np.float32), dtype)
    bits = np.asarray(bits)
    return np.where(np.abs(spec.decode(bits, dtype)) < least, bits.dtype.type(0), bits)
