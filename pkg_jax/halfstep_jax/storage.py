"""How a link stores one of its moments: in which format, rounded how, with whose words.

Contract: F1 to F3. It stands between the update rules, which know moments, and the formats, which know codes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from halfstep_jax.formats import Format, as_format, default_format
from halfstep_jax.random_words import Role

ROUNDINGS = ("stochastic", "nearest", "auto", "nearest_unchecked")


@dataclasses.dataclass(frozen=True)
class StoredMoment:
    """The storage of one moment of one link; checked when the link is built.

    Attributes:
        function: the link, for errors.
        name: "mu" or "nu": the arguments are `mu_dtype` and `mu_rounding`, so `nu`.
        dtype: as the caller gave it; None takes bfloat16 for bfloat16 params, else float32.
        rounding: one of `ROUNDINGS`.
        rate_name: the argument that holds the decay rate.
        rate: the decay rate, a NumPy float32, or an array, which counts as not known (contract F3).
        role: of its random words.

    Raises:
        TypeError: if `dtype` is no dtype.
        ValueError: if the format cannot hold a state, or nearest would freeze it.
    """

    function: str
    name: str
    dtype: Any
    rounding: str
    rate_name: str
    rate: Any
    role: Role

    def __post_init__(self):
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"{self.function}: {self.name}_rounding={self.rounding!r} is not a rounding. "
                'Use "stochastic", "nearest", "auto" or "nearest_unchecked".'
            )
        if self.dtype is not None:
            self._refuse_freezing(as_format(self.function, f"{self.name}_dtype", self.dtype))

    def zeros_like(self, p) -> jax.Array:
        """Return the codes of a new moment of the weight `p`."""
        fmt = default_format(p) if self.dtype is None else self._asked_for
        self._refuse_freezing(fmt)
        return fmt.zeros_like(p)

    def format_of(self, codes: jax.Array, leaf: str) -> Format:
        """Return the format that `codes` are in, and refuse codes that `zeros_like` would not have made.

        Raises:
            TypeError: if they are of another dtype than asked for.
        """
        fmt = as_format(self.function, f"{self.name}_dtype", codes.dtype)
        if self.dtype is not None and fmt != self._asked_for:
            raise TypeError(
                f"{self.function}: the {self.name} of '{leaf}' is {fmt.dtype}, {self.name}_dtype is "
                f"{self._asked_for.dtype}. Pass the state that init made."
            )
        return fmt

    def encode(self, fmt: Format, moment: jax.Array, words: Callable[[Role], jax.Array]) -> jax.Array:
        """Round the float32 `moment` to codes of `fmt`. `words` makes the words of a role, where needed."""
        return fmt.encode(moment, words(self.role) if self._stochastic(fmt) else None)

    def _stochastic(self, fmt: Format) -> bool:
        if not fmt.rounds:
            return False
        if self.rounding == "auto":
            return not _is_constant(self.rate) or fmt.freezes(self.rate)
        return self.rounding == "stochastic"

    @property
    def _asked_for(self) -> Format:
        return as_format(self.function, f"{self.name}_dtype", self.dtype)

    def _refuse_freezing(self, fmt: Format) -> None:
        if self.rounding == "nearest" and _is_constant(self.rate) and fmt.freezes(self.rate):
            raise ValueError(
                f'{self.function}: {self.name}_dtype={fmt.dtype} with {self.name}_rounding="nearest" freezes '
                f"at {self.rate_name}={self.rate!s} (1-{self.rate_name} < 2^-{fmt.gap_exponent}). "
                f'Use {self.name}_rounding="stochastic", or {self.name}_dtype="float32".'
            )


def _is_constant(rate) -> bool:
    """Whether a rate is known when the link is built, and the same under `jax.jit` as without it."""
    return isinstance(rate, np.floating | np.ndarray)
