"""What users do to weights between two steps: the edits that the hunt draws."""

from collections.abc import Callable

import numpy as np

import halfstep_spec as spec

Edit = Callable[[np.ndarray, np.random.Generator, float], np.ndarray]
"""Of float32 weights; with a source of numbers, and the largest number of the dtype."""


def _some(x: np.ndarray, rng: np.random.Generator, number: float) -> np.ndarray:
    """Return the weights with a number, of either sign, in place of about half of them."""
    return np.where(rng.random(x.shape) < 0.5, x, number * rng.choice((-1.0, 1.0), x.shape))


EDITS: dict[str, Edit] = {
    "none": lambda x, rng, largest: x,
    "zero": lambda x, rng, largest: np.zeros_like(x),
    "mask": lambda x, rng, largest: _some(x, rng, 0.0),
    "bounds": lambda x, rng, largest: np.clip(x, 0, 0.25),
    "shrink": lambda x, rng, largest: x * np.float32(1e-3),
    "grow": lambda x, rng, largest: x * np.float32(64),
    "flip": lambda x, rng, largest: -x,
    "new": lambda x, rng, largest: rng.normal(size=x.shape) * 0.02,
    "average": lambda x, rng, largest: (x + rng.normal(size=x.shape)) / 2,
    "largest": lambda x, rng, largest: _some(x, rng, largest),
    "infinite": lambda x, rng, largest: _some(x, rng, np.inf),
}
FINITE = tuple(name for name in EDITS if name not in ("largest", "infinite"))
OF_NORMS = ("adafactor", "lamb", "lamb16", "muon", "normuon")
"""Rules that read more than an element: an infinite weight, or its decay, makes NaN or is refused."""


def edits_for(rule: str) -> tuple[str, ...]:
    """Return the names of the edits that leave the weights of a rule finite."""
    return FINITE if rule in OF_NORMS else tuple(EDITS)


def edited(name: str, bits: np.ndarray, dtype: str, draw_seed: int, least: float = 0.0) -> np.ndarray:
    """Return patterns of `dtype` after an edit; what is not changed keeps its pattern.

    Numbers below `least` become 0.
    """
    x, fmt = spec.decode(bits, dtype), spec.FLOAT_FORMATS[dtype]
    largest = float(spec.decode(np.full((), fmt.max_code, fmt.code_dtype), dtype))
    with np.errstate(all="ignore"):
        new = np.asarray(EDITS[name](x, np.random.default_rng(draw_seed), largest), np.float32)
    new = np.where(np.abs(new) < least, np.float32(0), new)
    return np.where(new == x, bits, spec.round_to(new, dtype)).astype(bits.dtype)
