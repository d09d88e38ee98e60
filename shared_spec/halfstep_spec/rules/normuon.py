"""NorMuon: rows of the factor, an output each, of one length in the mean. Contract: A22. Vectors: normuon."""

import dataclasses
from typing import Any

import numpy as np

from halfstep_spec.numbers.means import mean
from halfstep_spec.numbers.moments import ema
from halfstep_spec.numbers.newton_schulz import newton_schulz, shape_scale
from halfstep_spec.rule import Moment, moment
from halfstep_spec.rules.muon import ScaleByMuon
from halfstep_spec.storage.stored_moment import StoredMoment

_SMALLEST_NORMAL = np.float32(2.0**-126)


@dataclasses.dataclass(frozen=True)
class ScaleByNorMuon(ScaleByMuon):
    """Muon with rows of the factor divided by the roots of an average of their mean squares.

    Attributes:
        beta2: rate of that average.
    """

    beta2: float = 0.95
    nu_row: Moment = moment("beta2", dtype="mu_dtype", rounding="mu_rounding")

    @property
    def moments(self) -> dict[str, StoredMoment]:
        """How they are stored: the average of rows in float32, one number an output."""
        stored = super().moments
        axis = 1 - self.output_axis

        def shape_of(shape: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(1 if i == axis else size for i, size in enumerate(shape))

        rows = StoredMoment("float32", "nearest", stored["nu_row"].role, shape=shape_of)
        return stored | {"nu_row": rows}

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return (s r / d) o, o the factor, d of its row and r of its matrix."""
        inputs, outputs = 1 - self.output_axis, self.output_axis
        h = self.momentum(g, n, moments.mu)
        o = h if self.given else newton_schulz(h, [inputs], [outputs])
        q = mean(o * o, inputs)
        v = moments.nu_row.round(ema(moments.nu_row.value, q, n.beta2))
        i = np.float32(1) / (np.sqrt(v) + np.float32(1e-10))
        before, after = mean(q, outputs), mean((q * i) * i, outputs)
        r = np.sqrt(before / np.maximum(after, _SMALLEST_NORMAL))
        s = shape_scale(self.scale, g.shape[inputs], g.shape[outputs])
        return o * ((r * i) * s)
