"""The facts on which a built step depends. Each step reads them again and compares them."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep.arrays import Array
from halfstep_torch.distributed.shards import PLAIN, local_part, sharding
from halfstep_torch.leaves.memory import is_other_view
from halfstep_torch.storage.stored_moment import State

_DTYPE, _SHAPE, _BYTES = map(operator.attrgetter, ("dtype", "shape", "nbytes"))
_ADDRESS, _IN_ORDER = Tensor.data_ptr, Tensor.is_contiguous


class Facts(NamedTuple):
    """Facts about parameters with a gradient, in order. A change makes a launch stale.

    Facts are read and compared one by one at every step, without building tuples, because tuples for a
    thousand parameters would start Python's garbage collector in every step.

    Attributes:
        memory: the addresses of weights and state tensors, which also differ by device. Addresses of
            gradients are not included, because each step writes them into tables.
        sizes: the bytes of gradients and state tensors.
        dtypes: the dtypes of weights and state tensors. `grad_dtypes` are the dtypes of gradients.
        in_order: whether weights and gradients are row-major.
        shapes: the shapes of weights, and the strides of weights that are not row-major.
        classes: the classes of weights and gradients that are not plain tensors, with meshes and placements.
    """

    memory: list[int]
    sizes: list[int]
    dtypes: list[torch.dtype]
    grad_dtypes: list[torch.dtype]
    in_order: list[bool]
    shapes: Iterable[tuple[int, ...]]
    classes: list[tuple]


class Reading(NamedTuple):
    """The result of `read`. Its shapes can be read once.

    Attributes:
        facts: the facts on which a launch depends.
        weights, grads: the tensors in this process.
        addresses: the addresses of the gradients, int64.
    """

    facts: Facts
    weights: Sequence[Tensor]
    grads: Sequence[Tensor]
    addresses: np.ndarray


def read(weights: Sequence[Array], grads: Sequence[Array], held: Sequence[Array]) -> Reading:
    """Read the facts about parameters, given their gradients and all tensors in their states."""
    classes = []
    if not {*map(type, weights), *map(type, grads), *map(type, held)} <= PLAIN:
        classes = [(type(x), sharding(x)) for x in (*weights, *grads) if type(x) not in PLAIN]
        weights, grads, held = ([*map(local_part, tensors)] for tensors in (weights, grads, held))
    in_order = [*map(_IN_ORDER, weights), *map(_IN_ORDER, grads)]
    strided = itertools.compress(weights, map(operator.not_, in_order))
    facts = Facts(
        memory=[*map(_ADDRESS, weights), *map(_ADDRESS, held)],
        sizes=[*map(_BYTES, grads), *map(_BYTES, held)],
        dtypes=[*map(_DTYPE, weights), *map(_DTYPE, held)],
        grad_dtypes=[*map(_DTYPE, grads)],
        in_order=in_order,
        shapes=itertools.chain(map(_SHAPE, weights), map(Tensor.stride, strided)),
        classes=classes,
    )
    return Reading(facts, weights, grads, np.array([*map(_ADDRESS, grads)], np.int64))


class _Row(NamedTuple):
    """The known facts about one parameter.

    Attributes:
        names: the names of all entries in its state.
        tensors: the tensors among them. `others` is whether some entries are not tensors.
        facts: the `Facts` of this parameter only, and the bytes of the weight.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    others: bool
    facts: Facts
    bytes: int

    @classmethod
    def of(cls, weight: Tensor, grad: Array, state: State) -> "_Row":
        """Return the row of a parameter."""
        tensors = tuple(x for x in state.values() if isinstance(x, Tensor))
        facts, (local,), *_ = read([weight], [grad], tensors)
        facts = facts._replace(shapes=[*facts.shapes])
        return cls(tuple(state), tensors, len(tensors) < len(state), facts, local.nbytes)


class KnownKey:
    """The facts of a launch, with a row for each parameter. Each step chooses rows.

    Attributes:
        known: whether each parameter has a row.
    """

    def __init__(self, length: int) -> None:
        self._rows: dict[int, _Row] = {}
        self.known = np.zeros(length, bool)

    def put(
        self, places: np.ndarray, weights: Sequence[Tensor], grads: Sequence[Array], held: Sequence[State]
    ) -> None:
        """Set the rows of parameters, given their states, and choose these."""
        for place, weight, grad, state in zip(places, weights, grads, held, strict=True):
            self._rows[place] = _Row.of(weight, grad, state)
        self.known[places] = True
        self.choose(places)

    def choose(self, places: np.ndarray) -> None:
        """Choose parameters that have rows."""
        names, tensors, others, facts, sizes = zip(*(self._rows[i] for i in places), strict=True)
        self._others, join = any(others), itertools.chain.from_iterable
        self._names, self._tensors = [*join(names)], [*join(tensors)]
        # In each field, the first entries of all parameters precede all other entries.
        fields = {}
        for name, column in zip(Facts._fields, zip(*facts, strict=True), strict=True):
            fields[name] = [*join(x[:1] for x in column), *join(x[1:] for x in column)]
        self._facts, self._bytes = Facts(**fields), np.array(sizes, np.int64)
        self._addresses = np.array(self._facts.memory[: len(names)], np.int64)

    def fits(
        self, weights: Sequence[Tensor], grads: Sequence[Array], held: Sequence[State]
    ) -> Reading | None:
        """Return the reading of the chosen parameters if their facts are unchanged, else None."""
        tensors: list[object] = [*itertools.chain.from_iterable(map(dict.values, held))]
        if self._others:  # anything may be kept in a state
            tensors = [x for x in tensors if isinstance(x, Tensor)]
        if [*itertools.chain.from_iterable(held)] != self._names or len(tensors) != len(self._tensors):
            return None
        if not all(map(operator.is_, tensors, self._tensors)):
            return None
        reading = read(weights, grads, self._tensors)
        for known, now in zip(self._facts, reading.facts, strict=True):
            if not (known == now if type(now) is list else all(map(operator.eq, known, now))):
                return None
        near = np.flatnonzero(np.abs(reading.addresses - self._addresses) < self._bytes).tolist()
        # A gradient that is a view of its weight is copied when the launch is built.
        if near and any(is_other_view(reading.grads[i], reading.weights[i]) for i in near):
            return None
        return reading
