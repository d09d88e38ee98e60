"""What a step asks of an update rule: moments by name, and the update of one leaf."""

from typing import NamedTuple

import numpy as np

from halfstep_spec.storage.formats import Encoded
from halfstep_spec.storage.stored_moment import StoredMoment


class RuleState(NamedTuple):
    """State of one leaf.

    Attributes:
        count: steps taken.
        moments: what is stored, by name.
    """

    count: int
    moments: dict[str, Encoded]


class UpdateRule:
    """A transform of updates that keeps moments. Subclasses are frozen dataclasses of their arguments.

    Attributes:
        seed: of the random words.
    """

    seed: int

    @property
    def moments(self) -> dict[str, StoredMoment]:
        """How the moments are stored, by the names that they have in JAX's state."""
        raise NotImplementedError

    def init(self, shape) -> RuleState:
        """Return zero moments."""
        return RuleState(0, {name: moment.zeros(shape) for name, moment in self.moments.items()})

    def update(
        self, g: np.ndarray, state: RuleState, leaf: str, p: np.ndarray | None = None
    ) -> tuple[np.ndarray, RuleState]:
        """Return the float32 update and the new state.

        Args:
            g: the incoming update, of any dtype that float32 holds.
            state: of this leaf.
            leaf: its name, for the random words.
            p: float32 values of the weights, for rules that read them.
        """
        raise NotImplementedError
