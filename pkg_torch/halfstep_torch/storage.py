"""How a link stores one of its moments: in which format, rounded how, with whose words.

Contract: F1 to F3. It stands between the update rules, which know moments, and the formats, which know codes.
"""

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from halfstep_torch.chain import StateArray, Weights
from halfstep_torch.formats import Encoded, Format, default_format
from halfstep_torch.random_words import Role

ROUNDINGS = ("stochastic", "nearest", "auto", "nearest_unchecked")


@dataclasses.dataclass(frozen=True)
class StoredMoment:
    """The storage of one moment of one rule, all choices made.

    Attributes:
        key: of its codes in the state.
        format: of the codes.
        stochastic: whether it is rounded stochastically.
        role: of its random words.
    """

    key: str
    format: Format
    stochastic: bool
    role: Role

    @property
    def arrays(self) -> Mapping[str, StateArray]:
        """The codes, and the scales where there are any."""
        arrays = {self.key: StateArray(self.format.dtype)}
        if self.format.scaled:
            arrays[self._scale] = StateArray(torch.uint8, scale_of=self.format)
        return arrays

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of which it reads words: its own or none."""
        return (self.role,) if self.stochastic else ()

    def store(self, moment: Tensor, words: Callable[[Role], Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Return the state arrays of the float32 `moment`, and the float32 values that they stand for.

        Args:
            moment: what is to be stored.
            words: makes the words of a role.
        """
        chosen = words(self.role) if self.stochastic else None
        (codes, scale), values = self.format.round_trip(moment, chosen, positive=self.role == Role.NU)
        return {self.key: codes} if scale is None else {self.key: codes, self._scale: scale}, values

    def decode(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the float32 values of the state arrays: exact."""
        return self.format.decode(Encoded(state[self.key], state.get(self._scale)))

    @property
    def _scale(self) -> str:
        return f"{self.key}_scale"


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
            f"{rate_name}={rate:.7g} (1-{rate_name} < {fmt.codes.half_gap[1]}). "
            f'Use {name}_rounding="stochastic", or {name}_dtype="float32".'
        )


def stored_moment(
    function: str,
    role: Role,
    key: str,
    fmt: Format | None,
    rounding: str,
    weights: Weights,
    rate_name: str,
    rate: float,
) -> StoredMoment:
    """Return how a moment is stored; "auto" is nearest unless that would freeze.

    Args:
        function: whose arguments they are, for messages.
        role: `Role.MU` or `Role.NU`.
        key: of its codes in the state.
        fmt: how it is to be stored, or None for the default.
        rounding: one of `ROUNDINGS`.
        weights: whose moment it is.
        rate_name: the argument that holds the moment's decay rate.
        rate: the decay rate, a float32 value.

    Raises:
        ValueError: if `rounding` is no rounding, or would freeze the moment.
    """
    name = role.name.lower()
    fmt = fmt or default_format(weights.dtype)
    check_rounding(function, name, rounding)
    check_freezing(function, name, rounding, fmt, rate_name, rate)
    fmt = fmt.for_shape(weights.shape)
    stochastic = rounding == "stochastic" or (rounding == "auto" and fmt.freezes(rate))
    return StoredMoment(key, fmt, stochastic and fmt.rounds, role)
