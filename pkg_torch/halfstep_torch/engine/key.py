"""What the built step of parameters depends on: facts that each step reads again and compares."""

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

_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")
_ADDRESS, _IN_ORDER = Tensor.data_ptr, Tensor.is_contiguous
_COUNT = "step"


class Key(NamedTuple):
    """Facts about parameters with a gradient, in order: a change makes a launch stale.

    Fields are read and compared one after the other at every step. Tuples are not collected on the way: those
    of a thousand parameters would start Python's garbage collector in every step.

    Attributes:
        count_memory: addresses of the counts.
        array_memory, array_dtypes, array_shapes: of state arrays.
        weight_classes: of what class weights are; `grad_classes` of gradients.
        weight_memory: addresses, which tell the device too. Those of gradients are no part: tables find them
            anew at every step, and keep none. Whose memory it is, the arrays say.
        weight_dtypes, weights_in_order, weight_shapes: of weights; whether they are row-major.
        weight_strides: of weights that are not.
        grad_dtypes, grads_in_order, grad_shapes: of gradients.
        shards: meshes and placements of weights and of gradients, as far as they are DTensors.
    """

    count_memory: list[int]
    array_memory: list[int]
    array_dtypes: list[torch.dtype]
    array_shapes: Iterable[torch.Size]
    weight_classes: list[type]
    weight_memory: list[int]
    weight_dtypes: list[torch.dtype]
    weights_in_order: list[bool]
    weight_shapes: Iterable[torch.Size]
    weight_strides: Iterable[tuple[int, ...]]
    grad_classes: list[type]
    grad_dtypes: list[torch.dtype]
    grads_in_order: list[bool]
    grad_shapes: Iterable[torch.Size]
    shards: list[tuple]


_OF_ARRAYS = ("array_memory", "array_dtypes", "array_shapes")


class Reading(NamedTuple):
    """A key as a step reads it. Its tuples can be read once.

    Attributes:
        key: the facts.
        weights, grads: the tensors in this process.
        addresses: of the gradients, int64.
    """

    key: Key
    weights: Sequence[Tensor]
    grads: Sequence[Tensor]
    addresses: np.ndarray


def read(
    weights: Sequence[Array], grads: Sequence[Array], counts: Sequence[Array], arrays: Sequence[Array]
) -> Reading:
    """Read the key of parameters, given their gradients, their counts, and all their state arrays."""
    classes, shards = ([*map(type, weights)], [*map(type, grads)]), []
    if not {*classes[0], *classes[1], *map(type, arrays)} <= PLAIN:
        shards = [where for where in map(sharding, (*weights, *grads)) if where]
        weights, grads, arrays = ([*map(local_part, tensors)] for tensors in (weights, grads, arrays))
    in_order = [*map(_IN_ORDER, weights)]
    key = Key(
        count_memory=[*map(_ADDRESS, counts)],
        array_memory=[*map(_ADDRESS, arrays)],
        array_dtypes=[*map(_DTYPE, arrays)],
        array_shapes=map(_SHAPE, arrays),
        weight_classes=classes[0],
        weight_memory=[*map(_ADDRESS, weights)],
        weight_dtypes=[*map(_DTYPE, weights)],
        weights_in_order=in_order,
        weight_shapes=map(_SHAPE, weights),
        weight_strides=map(Tensor.stride, itertools.compress(weights, map(operator.not_, in_order))),
        grad_classes=classes[1],
        grad_dtypes=[*map(_DTYPE, grads)],
        grads_in_order=[*map(_IN_ORDER, grads)],
        grad_shapes=map(_SHAPE, grads),
        shards=shards,
    )
    return Reading(key, weights, grads, np.array([*map(_ADDRESS, grads)], np.int64))


class _Row(NamedTuple):
    """What is known of one parameter.

    Attributes:
        names: of all entries of its state.
        tensors: the tensors among them; `others` tells that some are none.
        count: the count among the tensors; `arrays` are the others.
        facts: an entry, or a tuple of entries, for each field of `Key`, and last the bytes of the weight.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    others: bool
    count: Tensor
    arrays: tuple[Tensor, ...]
    facts: tuple

    @classmethod
    def of(cls, state: State) -> "_Row":
        """Return the row of a parameter, without facts."""
        tensors = {key: x for key, x in state.items() if isinstance(x, Tensor)}
        arrays = tuple(x for key, x in tensors.items() if key != _COUNT)
        return cls(
            tuple(state), tuple(tensors.values()), len(tensors) < len(state), state[_COUNT], arrays, ()
        )


class KnownKey:
    """The key of a launch: a row for each parameter, of which each step chooses some.

    Attributes:
        known: which parameters have a row.
    """

    def __init__(self, length: int) -> None:
        self._rows: dict[int, _Row] = {}
        self.known = np.zeros(length, bool)

    def put(
        self, places: np.ndarray, weights: Sequence[Tensor], grads: Sequence[Array], held: Sequence[State]
    ) -> None:
        """Set the rows of parameters, given their states, and choose these."""
        rows = [*map(_Row.of, held)]
        arrays = [x for row in rows for x in row.arrays]
        reading = read(weights, grads, [row.count for row in rows], arrays)
        fields: dict[str, list] = {name: [*column] for name, column in reading.key._asdict().items()}
        self._shards, strides = fields.pop("shards"), iter(fields["weight_strides"])
        fields["weight_strides"] = [() if x else (next(strides),) for x in fields["weights_in_order"]]
        for name in _OF_ARRAYS:
            column = iter(fields[name])
            fields[name] = [tuple(itertools.islice(column, len(row.arrays))) for row in rows]
        fields["bytes"] = [x.nbytes for x in reading.weights]
        for place, row, facts in zip(places, rows, zip(*fields.values(), strict=True), strict=True):
            self._rows[place] = row._replace(facts=facts)
        self.known[places] = True
        self.choose(places)

    def choose(self, places: np.ndarray) -> None:
        """Choose parameters, whose rows are known."""
        names, tensors, others, self._counts, arrays, facts = zip(
            *(self._rows[i] for i in places), strict=True
        )
        self._others, join = any(others), itertools.chain.from_iterable
        self._names, self._tensors, self._arrays = [*join(names)], [*join(tensors)], [*join(arrays)]
        *columns, sizes = zip(*facts, strict=True)
        fields = dict(zip(Key._fields, map(list, columns), strict=False))
        for name in ("weight_strides", *_OF_ARRAYS):
            fields[name] = [*join(fields[name])]
        self._key, self._bytes = Key(**fields, shards=self._shards), np.array(sizes, np.int64)
        self._addresses = np.array(self._key.weight_memory, np.int64)

    def fits(
        self, weights: Sequence[Tensor], grads: Sequence[Array], held: Sequence[State]
    ) -> Reading | None:
        """Return what is read of the chosen parameters if their key is unchanged."""
        tensors: list[object] = [*itertools.chain.from_iterable(map(dict.values, held))]
        if self._others:  # anything may be kept in a state
            tensors = [x for x in tensors if isinstance(x, Tensor)]
        if [*itertools.chain.from_iterable(held)] != self._names or len(tensors) != len(self._tensors):
            return None
        if not all(map(operator.is_, tensors, self._tensors)):
            return None
        reading = read(weights, grads, self._counts, self._arrays)
        for known, now in zip(self._key, reading.key, strict=True):
            if not (known == now if type(now) is list else all(map(operator.eq, known, now))):
                return None
        near = np.flatnonzero(np.abs(reading.addresses - self._addresses) < self._bytes).tolist()
        # A gradient that is a view of its weight is copied when the launch is built.
        if near and any(is_other_view(reading.grads[i], reading.weights[i]) for i in near):
            return None
        return reading
