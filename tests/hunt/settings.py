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

EXAMPLES = int(os.environ.get("HUNT", "2000"))
"""Of the steps; lives, files and state dicts are taken in proportion."""
SEED = int(os.environ.get("HUNT_SEED", "24"))
SHAPES = (
    *((), (0,), (1,), (2,), (3, 0), (7,), (13,), (15,), (16,), (17,), (31, 2), (33,), (63,), (64,), (65,)),
    *((127,), (128,), (129,), (2, 3), (5, 7), (1, 129), (3, 1, 4), (2, 3, 11), (2, 1, 3, 2), (1, 2, 2, 1, 3)),
)
"""From no axis to five; no element, primes, and powers of two with their neighbours."""
PATHS = (("w",), ("b", "w"), ("blocks/0/w", "blocks/1/w"), ("a/kernel", "a/bias", "head/kernel"))
"""Names of the arrays of a tree; a number is a place in a list."""
_BLOCKS = (2, 4, 16, 128, "row", None)
_ODD_BLOCKS = (*_BLOCKS, 1, 7, 13)


@dataclasses.dataclass(frozen=True)
class Setting:
    """All that a step is compiled for.

    Attributes:
        rule: a key of `halfstep_spec.RULES`.
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

    def link(self, package: ModuleType, numbers: dict[str, Any], seed: Any) -> Any:
        """Return the rule of a package."""
        formats = {name: formatted(package, fmt) for name, fmt in self.formats}
        arguments = {**formats, **dict(self.options), **numbers, "seed": seed}
        if package is spec:
            return spec.RULES[self.rule](**arguments)
        unchecked = {"nearest": "nearest_unchecked"}
        arguments = {
            name: unchecked.get(value, value) if name.endswith("rounding") else value
            for name, value in arguments.items()
        }
        return getattr(package, self.rule if self.rule == "trace" else f"scale_by_{self.rule}")(**arguments)

    def reference(self, numbers: "Numbers") -> spec.Step:
        """Return the step of the reference."""
        rule = self.link(spec, numbers.rule, numbers.seed)
        decay = numbers.weight_decay if self.decay else 0.0
        return spec.Step(rule, decay, self.decay or "decoupled", self.dtype, self.storage)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What a compiled step takes as numbers."""

    rule: dict[str, float]
    learning_rate: float
    weight_decay: float
    seed: int


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


@st.composite
def _moments(draw, rule: str) -> tuple[tuple, tuple]:
    """Return formats and other arguments of a rule."""
    signed, roundings = st.sampled_from(SIGNED), st.sampled_from(_ROUNDINGS)
    if rule == "trace":
        kept = {"accumulator_dtype": draw(signed), "rounding": draw(roundings)}
        return (("accumulator_dtype", kept["accumulator_dtype"]),), (
            ("rounding", kept["rounding"]),
            ("nesterov", draw(st.booleans())),
        )
    if rule == "lion":
        return (("mu_dtype", draw(signed)),), (("mu_rounding", draw(roundings)),)
    second = st.sampled_from(SECOND)
    if rule == "adan":
        kinds = {"mu_dtype": signed, "diff_dtype": signed, "nu_dtype": second, "grad_dtype": signed}
        chosen = {name: draw(kind) for name, kind in kinds.items()}
        return tuple(chosen.items()), (("mu_rounding", draw(roundings)), ("nu_rounding", "stochastic"))
    kind = draw(st.sampled_from(("apart", "relative", "roots")))
    if kind == "roots":
        mu, nu = draw(st.sampled_from(ROOTS))
    else:
        mu, nu = draw(signed if kind == "apart" else st.sampled_from(FIXED + FINE)), draw(second)
    paid = () if kind == "roots" else ("paid",)
    options = {
        "mu_rounding": draw(st.sampled_from((*_ROUNDINGS, *paid))),
        "nu_rounding": draw(st.sampled_from(("stochastic", "nearest"))),
        "nesterov": draw(st.booleans()),
        "bias_correction": draw(st.booleans()),
    }
    return (("mu_dtype", mu), ("nu_dtype", nu)), tuple(options.items())


@st.composite
def settings_of_steps(draw) -> Setting:
    """Draw a setting."""
    rule = draw(st.sampled_from(("trace", "lion", "adam", "adam", "adam", "adan")))
    kinds, options = draw(_moments(rule))
    names = draw(st.sampled_from(PATHS))
    return Setting(
        rule,
        draw(st.sampled_from(("float32", "bfloat16", "bfloat16", "float16"))),
        draw(st.sampled_from(tuple(PARAM_STORAGES))),
        kinds,
        options,
        draw(st.sampled_from(("", "decoupled", "l2"))),
        tuple((name, draw(st.sampled_from(SHAPES))) for name in names),
    )


_RATES = (0.9, 0.0, 0.5, 0.8, 0.95, 0.98, 0.99, 0.999, 0.9999)
_PAIRS = [pair for pair in itertools.product(_RATES, _RATES[1:]) if bound(*pair) <= LARGEST_BOUND]
_TINY = (1e-8, 1e-30, 1e-6, 1e-3, 1.0)


@st.composite
def numbers_of(draw, setting: Setting) -> Numbers:
    """Draw hyperparameters that the setting takes."""
    rate = st.sampled_from(_RATES)
    if setting.rule == "trace":
        rule = {"decay": draw(rate)}
    elif setting.rule == "lion":
        rule = {"b1": draw(rate), "b2": draw(rate)}
    elif setting.rule == "adan":
        rule = {name: draw(rate) for name in ("b1", "b2", "b3")} | {"eps": draw(st.sampled_from(_TINY))}
    else:
        b1, b2 = draw(st.sampled_from(_PAIRS))
        rule = {"b1": b1, "b2": b2, "eps": draw(st.sampled_from(_TINY))}
        rule["eps_root"] = draw(st.sampled_from((0.0, 1e-16)))
    return Numbers(
        rule,
        # Not 0: a first step at 0 without gradients makes state alone, for torch.distributed.checkpoint.
        draw(st.sampled_from((1e-3, 1e-12, 1e-7, 1e-5, 0.1, 3.0))),
        draw(st.sampled_from((0.1, 1e-4, 0.5))),
        draw(st.sampled_from((0, 7, 2**32, 2**40 + 5, 2**64 - 1))),
    )


_KINDS = ("near 1", "any", "special", "tiny", "huge", "zero")
_SPECIAL = (0, 1, 0x80000000, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0x7F800000)
_SPECIALS = np.array([*_SPECIAL, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32)
kinds_of_numbers = st.sampled_from(_KINDS)


def patterns(seed: int, kind: str, shape: tuple[int, ...], dtype: str, least: float = 0.0) -> np.ndarray:
    """Return patterns of `dtype`: of all bits alike, of special numbers, or of normal ones of some size.

    Numbers below `least` become 0.
    """
    rng = np.random.default_rng(seed)
    if kind == "any":
        width = {"float32": np.uint32}.get(dtype, np.uint16)
        bits = rng.integers(0, np.iinfo(width).max, shape, width, endpoint=True)
    elif kind == "special":
        bits = spec.round_to(np.asarray(rng.choice(_SPECIALS, shape), np.uint32).view(np.float32), dtype)
    else:
        exponent = {"near 1": 0, "tiny": -30, "huge": 40, "zero": -200}[kind]
        x = rng.normal(size=shape) * np.exp2(exponent + rng.integers(-8, 1, shape))
        bits = spec.round_to(np.asarray(x, np.float32), dtype)
    bits = np.asarray(bits)
    return np.where(np.abs(spec.decode(bits, dtype)) < least, bits.dtype.type(0), bits)
