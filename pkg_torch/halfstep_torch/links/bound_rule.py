"""A rule for one kind of parameter, as a step runs it: a pure function of tensors.

It is hashable and has no number or seed, so equal rules share a compiled kernel.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.float_formats import FLOAT_FORMATS
from halfstep.hyperparameters import Values
from halfstep.moments import Feedback, Moments, feedback_name
from halfstep.random_words import Role
from halfstep.storage.moment_formats import room_for_errors
from halfstep_torch.numbers.op import STEP_OPS, TorchOp, tensor_numbers
from halfstep_torch.numbers.rounding import round_number
from halfstep_torch.storage.relative import into_unit, out_of_unit
from halfstep_torch.storage.state_array import Shape, StateArray, WordSource
from halfstep_torch.storage.stored_moment import Arrays, StoredMoment, Words

_OP = STEP_OPS["elementwise"]


class StepMoment:
    """A moment during one step: the stored value, and the rounding of the new one.

    Attributes:
        value: the float32 values stored by the step before.
        arrays: the new state arrays, once `round` was called.
    """

    def __init__(
        self,
        storage: StoredMoment,
        state: Arrays,
        words: Sequence[Words],
        shape: Shape | None,
        unit: "StepMoment | None",
        feedback: Feedback | None = None,
    ):
        self._storage, self._words, self._shape, self._unit = storage, words, shape, unit
        self._feedback = feedback
        value = self._shaped(storage.decode(state, words))
        self._codes, self._rounded = state[storage.key], None
        self.value: Tensor = value if unit is None else out_of_unit(storage.format, value, unit)
        self.arrays: Arrays = {}

    @property
    def has_inverse_root(self) -> bool:
        """Whether the format rounds by `inverse_root`."""
        return self._storage.format.has_inverse_root

    @property
    def room(self) -> int:
        """`room_for_errors` for the format."""
        return room_for_errors(self._storage.format)

    def inverse_root(self, x: Tensor) -> Tensor:
        """Round x for the new state, and return about 1/sqrt(x) of the unrounded x."""
        codes, inverse = self._storage.encode_with_inverse_root(self._flat(x), self._words)
        self._codes = codes
        self.arrays = {self._storage.key: codes.to(self._storage.format.torch_dtype)}
        return self._shaped(inverse)

    def round(self, x: Tensor) -> Tensor:
        """Round x to the format, once, for the new state. Return the float32 value for the update."""
        fmt, unit = self._storage.format, self._unit
        z = x if unit is None else into_unit(fmt, x, unit)
        self.arrays, values = self._storage.encode(self._flat(z), self._words)
        self._codes, values = self.arrays[self._storage.key], self._shaped(values)
        self._rounded = values if unit is None else out_of_unit(fmt, values, unit)
        if self._feedback is None:
            return self._rounded
        v = None if self._feedback.second is None else self._feedback.second.values
        return self._feedback.apply(x, self._rounded, v, _OP)

    @property
    def values(self) -> Tensor:
        """The stored value, in float32."""
        if not self.arrays:
            return self.value
        if self._rounded is None:
            self._rounded = self._shaped(self._storage.decode(self.arrays, self._words))
        return self._rounded

    @property
    def codes(self) -> Tensor:
        """The stored codes, int32, of a format with inverse roots."""
        return self._shaped(self._codes.to(torch.int32))

    def _flat(self, x: Tensor) -> Tensor:
        return x if self._shape is None else x.reshape(-1)

    def _shaped(self, x: Tensor) -> Tensor:
        return x if self._shape is None else x.view(self._shape)


class RoundedWeight:
    """The weight during a step of a rule that rounds it stochastically to its own dtype (contract P9).

    Attributes:
        value: the weight, in float32.
    """

    def __init__(self, p: Tensor, dtype: str, words: Sequence[Words]):
        self.value, self._dtype, self._words = p, dtype, words
        self.arrays: Arrays = {}

    def round(self, w: Tensor) -> Tensor:
        """Return float32 `w` rounded to the dtype of the weights, in float32."""
        if not self._words:
            return w
        words = self._words[0](tuple(w.shape))
        return round_number(w, self._dtype, words, saturate=False, quiet=True)

    def bound(self, x: Tensor, gaps: int) -> Tensor:
        """Return the smaller of x and 2^gaps over the gap at the weight."""
        if not self._words:
            return x
        n, lowest = FLOAT_FORMATS[self._dtype].gap_exponents(gaps)
        exponents = (self.value.view(torch.int32) & 0x7F800000).clamp(min=lowest << 23)
        # Past 2^31 the pattern and its difference wrap, and the difference is right.
        inverse = (((n << 23) - (1 << 32) if n > 255 else n << 23) - exponents).view(torch.float32)
        return _OP.minimum(inverse, x)


@dataclasses.dataclass(frozen=True)
class BoundRule:
    """A rule bound to one kind of parameter. Its numbers come with each step.

    Attributes:
        rule: the rule, with its options. Numbers, dtypes and seeds are None.
        moments: the storage of the rule's moments, in the order of declaration.
        wide_weights: whether `update` gets float32 weights. Otherwise they keep their dtype, without a copy.
        tensor_numbers: whether numbers are 0-d tensors in eager mode too, because torch rounds a quotient of
            a float and a tensor twice. Our rules have no such quotient and use floats, which are faster on
            the host.
        weight_dtype: the dtype of the weights if the rule rounds them itself, else "".
    """

    rule: Any  # a Rule with only its options: other fields are None
    moments: tuple[StoredMoment, ...] = ()
    wide_weights: bool = True
    tensor_numbers: bool = False
    weight_dtype: str = ""

    @property
    def scope(self) -> str:
        """`Rule.scope` of the rule."""
        return self.rule.scope

    @property
    def needs_only_norms(self) -> bool:
        """Whether `update` uses other elements only through norms (`Rule.needs`)."""
        return self.scope == "elementwise" or self.rule.needs == "norms"

    @functools.cached_property
    def arrays(self) -> Mapping[str, StateArray]:
        """State arrays that the rule keeps, by torch's names for them."""
        return {key: array for stored in self.moments for key, array in stored.arrays.items()}

    @functools.cached_property
    def sources(self) -> tuple[WordSource, ...]:
        """The random words of `update`, for all moments and for weights that it rounds."""
        of_moments = tuple(source for stored in self.moments for source in stored.sources)
        return (*of_moments, WordSource(Role.PARAM)) if self._rounds_weights else of_moments

    @functools.cached_property
    def _drawn(self) -> list[tuple[StoredMoment, slice]]:
        """The moments, each after the moments that it reads, with the places of its words."""
        ends = list(itertools.accumulate(len(stored.sources) for stored in self.moments))
        drawn = [(x, slice(end - len(x.sources), end)) for x, end in zip(self.moments, ends, strict=True)]
        return sorted(drawn, key=lambda pair: bool(pair[0].second))

    @property
    def _rounds_weights(self) -> bool:
        return self.weight_dtype not in ("", "float32")

    def update(
        self,
        u: Tensor,
        p: Tensor,
        state: Arrays,
        numbers: Values,
        words: Sequence[Words],
        op: TorchOp | None = None,
    ) -> tuple[Tensor, Arrays]:
        """Return the outgoing update and the rule's new state arrays.

        Args:
            u: the incoming update, float32, a run of whole blocks. For a rule of scope "parameter" it is the
                whole array in its shape.
            p: the weights, float32, in the shape of `u`.
            state: the state arrays of all rules, in the shape of `u`, with scales in one row. For a rule of
                scope "parameter" all are in one row.
            numbers: the result of `Link.step_numbers`, as 0-d tensors while a stage is traced.
            words: functions from a shape to int32 words, one for each of the `sources`.
            op: the operations, by default `STEP_OPS` of the scope.
        """
        scope = self.rule.scope
        shape = tuple(p.shape) if scope == "parameter" else None
        if self.tensor_numbers:
            numbers = tensor_numbers(numbers, u.device)
        moments: dict[str, StepMoment | RoundedWeight] = dict(self.step_moments(state, words, shape, numbers))
        if self.weight_dtype:
            moments["param"] = RoundedWeight(p, self.weight_dtype, words[-1:] if self._rounds_weights else ())
        op = op or STEP_OPS[scope]
        u = self.rule.update(u, p, numbers, Moments(self.rule.name, moments), op)
        return u, {key: array for moment in moments.values() for key, array in moment.arrays.items()}

    def step_moments(
        self, state: Arrays, words: Sequence[Words], shape: Shape | None, numbers: Values = None
    ) -> dict[str, StepMoment]:
        """Return the moments during one step by name, as whole arrays if a `shape` is given.

        Without the `numbers` of the step, no error is fed back.
        """
        moments: dict[str, StepMoment] = {}
        for stored, drawn in self._drawn:
            shape_here = None if shape is None else stored.arrays[stored.key].values_shape(shape)
            unit = moments[stored.unit] if stored.unit else None
            feedback = None
            if stored.feeds_back and numbers is not None:
                feedback = Feedback(getattr(numbers, feedback_name(stored.name)), moments.get(stored.second))
            moments[stored.name] = StepMoment(stored, state, words[drawn], shape_here, unit, feedback)
        return moments
