"""What PTX leaves to the device: results that it only bounds."""

from typing import Literal, get_args

import numpy as np

How = Literal["exact", "up", "down", "random", "wild"]
HOWS: tuple[How, ...] = get_args(How)
# How many numbers a result may be from the correctly rounded result. NVIDIA's PTX ISA states two ulps for
# `div.full` and one ulp for `rcp.approx`. For `sqrt.approx` it states "the maximum relative error over the
# entire positive finite floating-point range is 2^-23". That is two ulps where the mantissa is large. One ulp
# is assumed, because JAX measured 1.0 ulp for `sqrt` and for `reciprocal` on an H100 and a B200, over all
# inputs (https://docs.jax.dev/en/latest/accuracy.html). For `ex2.approx` and `lg2.approx` it is 2^-22 or so.
BOUNDS = {"div": 2, "rcp": 1, "sqrt": 1, "ex2": 4, "lg2": 4}


class Approximations:
    """Approximate operations: the correctly rounded result, moved by some numbers.

    Attributes:
        how: "exact" for not at all; "up" or "down", in magnitude, by all that the bound allows; "random",
            the same wherever the operands are the same, as on a device; "wild", anew for each instruction.
            What only "wild" shows is a program that computes an approximation twice and needs both to agree.
        bounds: by operation.
        met: how many launches of instructions there were, by operation.
    """

    def __init__(self, how: How = "exact", bounds: dict[str, int] = BOUNDS, seed: int = 0) -> None:
        self.how, self.bounds, self.met = how, bounds, dict.fromkeys(bounds, 0)
        self._seed, self._rng = np.uint32(seed), np.random.default_rng(seed)

    def __call__(self, name: str, right: np.ndarray, *operands: np.ndarray) -> np.ndarray:
        """Return what a device might, given the correctly rounded result and the operands, float32."""
        self.met[name] += 1
        bound, pattern = self.bounds[name], right.view(np.uint32)
        moved = (pattern + self._moves(bound, right.shape, operands)).astype(np.uint32)
        # Zeros and infinities are exact in NVIDIA's tables.
        movable = np.isfinite(right) & ((pattern & np.uint32(0x7FFFFFFF)) > bound)
        return np.where(movable, moved, pattern).view(np.float32)

    def _moves(self, bound: int, shape: tuple[int, ...], operands: tuple[np.ndarray, ...]) -> np.ndarray:
        if self.how == "wild":
            return self._rng.integers(-bound, bound + 1, shape)
        if self.how == "random":
            word = self._seed
            for x in operands:
                word = (word ^ x.view(np.uint32)) * np.uint32(0x9E3779B1)
                word = word ^ (word >> np.uint32(15))
            return word.astype(np.int64) % (2 * bound + 1) - bound
        return np.array({"exact": 0, "up": bound, "down": -bound}[self.how], np.int64)
