"""How a link stores one of its moments: in which format, rounded how, with whose words.

Contract: F1 to F3. It stands between the update rules, which know moments, and the formats, which know codes.
"""

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from halfstep_torch.chain import StateArray, Weights
from halfstep_torch.numbers.random_words import Role
from halfstep_torch.storage.formats import Encoded, Format, default_format

ROUNDINGS = ("stochastic", "nearest", "auto", "nearest_unchecked")

# Of a second moment, what is not zero is not stored as zero; of another transform's state it is not known
# what is one.
_POSITIVE = {Role.NU: True, Role.STATE: None}


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
        packed_of = self.format if self.format.codes.packed else None
        arrays = {self.key: StateArray(self.format.dtype, packed_of=packed_of)}
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
        positive = _POSITIVE.get(self.role, False)
        (codes, scale), values = self.format.round_trip(moment, chosen, positive=positive)
        return {self.key: codes} if scale is None else {self.key: codes, self._scale: scale}, values

    def decode(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the float32 values of the state arrays: exact."""
        return self.format.decode(Encoded(state[self.key], state.get(self._scale)))

    @property
    def _scale(self) -> str:
        return f"{self.key}_scale"


@dataclasses.dataclass(frozen=True)
class MomentArguments:
    """What a moment is called: in the state, and in the arguments of its link.

    Attributes:
        role: of its random words.
        key: of its codes in the state.
        dtype: the argument that says how it is stored.
        rounding: the argument that says how it is rounded.
        rate: the argument that holds its decay rate.
    """

    role: Role
    key: str
    dtype: str
    rounding: str
    rate: str

    def check(self, function: str, fmt: Format | None, rounding: str, rate: float) -> None:
        """Raise ValueError for what is no rounding (contract F2), or would freeze the moment (F3).

        Args:
            function: whose arguments they are, for the message.
            fmt: how the moment is to be stored; None, where the weights' dtype decides, cannot freeze yet.
            rounding: of the moment.
            rate: its decay rate, a float32 value.
        """
        if rounding not in ROUNDINGS:
            raise ValueError(
                f"{function}: {self.rounding}={rounding!r} is not a rounding. "
                'Use "stochastic", "nearest", "auto" or "nearest_unchecked".'
            )
        if fmt is not None and rounding == "nearest" and fmt.freezes(rate):
            raise ValueError(
                f'{function}: {self.dtype}={fmt.name} with {self.rounding}="nearest" freezes at '
                f"{self.rate}={rate:.7g} (1-{self.rate} < {fmt.codes.half_gap[1]}). "
                f'Use {self.rounding}="stochastic", or {self.dtype}="float32".'
            )

    def stored(
        self, function: str, fmt: Format | None, rounding: str, weights: Weights, rate: float
    ) -> StoredMoment:
        """Return how the moment of a parameter is stored; "auto" is nearest unless that would freeze.

        Args:
            function: whose arguments they are, for messages.
            fmt: how it is to be stored, or None for the default.
            rounding: one of `ROUNDINGS`.
            weights: whose moment it is.
            rate: its decay rate, a float32 value.

        Raises:
            ValueError: as `check`.
        """
        fmt = fmt or default_format(weights.dtype)
        self.check(function, fmt, rounding, rate)
        fmt = fmt.for_shape(weights.shape)
        stochastic = rounding == "stochastic" or (rounding == "auto" and fmt.freezes(rate))
        return StoredMoment(self.key, fmt, stochastic and fmt.rounds, self.role)


def group_value(fmt: Format | None) -> Format | str | None:
    """Return a format as it stands in a param group: a plain one by its name."""
    return fmt if fmt is None or fmt.scaled else fmt.name
