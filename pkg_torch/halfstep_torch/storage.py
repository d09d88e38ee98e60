"""How a link stores one of its moments: in which format, rounded how, with whose words.

Contract: F1 to F3. It stands between the update rules, which know moments, and the formats, which know codes.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from halfstep_torch.formats import Format, resolve_format
from halfstep_torch.random_words import Role

ROUNDINGS = ("stochastic", "nearest", "auto", "nearest_unchecked")


@dataclasses.dataclass(frozen=True)
class StoredMoment:
    """The storage of one moment of one rule, all choices made.

    Attributes:
        format: of the codes.
        stochastic: whether it is rounded stochastically.
        role: of its random words.
    """

    format: Format
    stochastic: bool
    role: Role

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of which it reads words: its own or none."""
        return (self.role,) if self.stochastic else ()

    def encode(self, moment: Tensor, words: Callable[[Role], Tensor]) -> Tensor:
        """Round the float32 `moment` to codes; `words` makes the words of a role."""
        return self.format.encode(moment, words(self.role) if self.stochastic else None)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the float32 values of `codes`: exact."""
        return self.format.decode(codes)


def check_rounding(function: str, name: str, rounding: str) -> None:
    """Raise ValueError unless `rounding` is one of the four ways to round a moment (contract F2)."""
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"{function}: {name}_rounding={rounding!r} is not a rounding. "
            'Use "stochastic", "nearest", "auto" or "nearest_unchecked".'
        )


def check_freezing(function: str, name: str, rounding: str, fmt: Format, rate_name: str, rate: float) -> None:
    """Raise ValueError where "nearest" would freeze a moment (contract F3).

    Args:
        function: whose arguments they are, for the message.
        name: of the moment, "mu" or "nu".
        rounding: of the moment.
        fmt: of the moment.
        rate_name: the argument that holds its decay rate.
        rate: the decay rate, a float32 value.
    """
    if rounding == "nearest" and fmt.freezes(rate):
        raise ValueError(
            f'{function}: {name}_dtype={fmt.name} with {name}_rounding="nearest" freezes at '
            f"{rate_name}={rate:.7g} (1-{rate_name} < 2^-{fmt.gap_exponent}). "
            f'Use {name}_rounding="stochastic", or {name}_dtype="float32".'
        )


def stored_moment(
    function: str,
    role: Role,
    dtype: str | None,
    rounding: str,
    param_dtype: torch.dtype,
    rate_name: str,
    rate: float,
) -> StoredMoment:
    """Return how a moment is stored; "auto" is nearest unless that would freeze.

    Args:
        function: whose arguments they are, for messages.
        role: `Role.MU` or `Role.NU`.
        dtype: name of the format, or None for the default.
        rounding: one of `ROUNDINGS`.
        param_dtype: of the weights.
        rate_name: the argument that holds the moment's decay rate.
        rate: the decay rate, a float32 value.

    Raises:
        ValueError: if `rounding` is no rounding, or would freeze the moment.
    """
    name, fmt = role.name.lower(), resolve_format(dtype, param_dtype)
    check_rounding(function, name, rounding)
    check_freezing(function, name, rounding, fmt, rate_name, rate)
    stochastic = rounding == "stochastic" or (rounding == "auto" and fmt.freezes(rate))
    return StoredMoment(fmt, stochastic and fmt.rounds, role)
