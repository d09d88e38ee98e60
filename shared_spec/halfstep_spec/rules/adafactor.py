"""Adafactor: a factored second moment, and steps in units of root mean squares. Contract: A18, A19."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfstep_spec.numbers.means import inverse_power, mean
from halfstep_spec.rule import Moment, Rule, moment
from halfstep_spec.rules.step import Links, Step
from halfstep_spec.rules.weight_decay import AddDecayedWeights
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.stored_moment import StoredMoment


@dataclasses.dataclass(frozen=True)
class ScaleByFactoredRms(Rule):
    """Divide by the root of a second moment that a matrix keeps as a row and a column.

    Arguments as in `optax.scale_by_factored_rms`, and `floor`, how `nu` is stored, and seed.

    Attributes:
        floor: the least mean of a row, and the least root that divides.
    """

    scope = "parameter"

    factored: bool = True
    decay_rate: float = 0.8
    step_offset: int = 0
    min_dim_size_to_factor: int = 128
    epsilon: float = 1e-30
    floor: float = 0.0
    nu_dtype: str | Format = "float32"
    nu_rounding: str = "stochastic"
    seed: int = 0
    nu: Moment = moment(signed=False)
    nu_row: Moment = moment(signed=False, dtype="nu_dtype", rounding="nu_rounding")
    nu_col: Moment = moment(signed=False, dtype="nu_dtype", rounding="nu_rounding")

    @property
    def moments(self) -> dict[str, StoredMoment]:
        """How they are stored: rows and columns in float32, each in its shape."""
        stored = super().moments
        shapes = {name: self._shape(name) for name in stored}
        plain = {"dtype": "float32", "rounding": "nearest"}
        return {
            name: dataclasses.replace(kept, shape=shapes[name], **({} if name == "nu" else plain))
            for name, kept in stored.items()
        }

    def _shape(self, name: str):
        def shape_of(shape: tuple[int, ...]) -> tuple[int, ...]:
            axes = self.axes(shape)
            if (axes is None) != (name == "nu"):
                return (1,)
            reduced = None if axes is None else axes[name == "nu_col"]
            return tuple(1 if axis == reduced else size for axis, size in enumerate(shape))

        return shape_of

    def axes(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the longest axis and the second; None where nu is not factored. Of equal ones the last."""
        if not self.factored or len(shape) < 2:
            return None
        second, longest = (int(axis) for axis in np.argsort(shape, kind="stable")[-2:])
        return None if shape[second] < max(1, self.min_dim_size_to_factor) else (longest, second)

    def corrections(self, count: int) -> Mapping[str, Any]:
        """Return the shares of the new and of the old value in an average."""
        share = inverse_power(max(count - self.step_offset, 1), self.decay_rate)
        return {"share": share, "kept": np.float32(1) - share}

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return g over the root; the formula is in the contract."""
        square, axes = g * g + n.epsilon, self.axes(g.shape)

        def averaged(kept: Any, new: np.ndarray) -> np.ndarray:
            return kept.round((n.kept * kept.value) + (n.share * new))

        if axes is None:
            root = np.sqrt(averaged(moments.nu, square))
            idle = [moments.nu_row, moments.nu_col]
        else:
            longest, second = axes
            row = averaged(moments.nu_row, mean(square, longest))
            col = averaged(moments.nu_col, mean(square, second))
            root = np.sqrt(row / np.maximum(mean(row, second), n.floor)) * np.sqrt(col)
            idle = [moments.nu]
        for kept in idle:
            kept.round(kept.value)
        return g / np.maximum(root, n.floor)


@dataclasses.dataclass(frozen=True)
class ClipByBlockRms(Rule):
    """Shorten an update with a root mean square above `threshold`."""

    scope = "parameter"

    threshold: float = 1.0

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return g / max(rms(g) / threshold, 1), as a product with an inverse."""
        rms = np.sqrt(mean(g * g))
        return (np.float32(1) / np.maximum(rms * (np.float32(1) / n.threshold), np.float32(1))) * g


@dataclasses.dataclass(frozen=True)
class ScaleByParamBlockRms(Rule):
    """Multiply an update by the root mean square of its weight, at least `min_scale`."""

    scope = "parameter"

    min_scale: float = 1e-3

    def update(self, g: np.ndarray, p: np.ndarray | None, n: Any, moments: Any) -> np.ndarray:
        """Return max(rms(p), min_scale) g."""
        assert p is not None
        return np.maximum(np.sqrt(mean(p * p)), n.min_scale) * g


@dataclasses.dataclass(frozen=True)
class Adafactor(Step):
    """One step of Adafactor on one leaf, in Optax's order: decay is absolute, and last.

    Attributes:
        clipping_threshold: of the update of the rule.
        min_scale: of the weight.
    """

    clipping_threshold: float = 1.0
    min_scale: float = 1e-3

    def links(self, learning_rate) -> tuple[Links, Links]:
        """Return the links behind the rule; none is in front."""
        _, (*decay, rate) = super().links(learning_rate)
        decay = [AddDecayedWeights(self.weight_decay, absolute=True) for _ in decay]
        clip, scale = ClipByBlockRms(self.clipping_threshold), ScaleByParamBlockRms(self.min_scale)
        return (), (clip, rate, scale, *decay)
