"""The inputs of kernels that change with each step: numbers and random keys. Contract: A4, W3, W4.

Kernels take numbers as a vector, and keys as columns. All of a device are sent by one copy.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.random_words import leaf_id
from halfstep_torch.engine.batches import Batch, Measured
from halfstep_torch.engine.plan import Stream
from halfstep_torch.engine.rows import alias
from halfstep_torch.engine.slots import Slot, SlotColumns
from halfstep_torch.numbers.random_words import as_int32, leaf_keys
from halfstep_torch.numbers.schedules import Scheduled

# Leaves, counted anew for each step, whose keys are made at once.
_KEYS = 1 << 10
_ALIGNED = 4


def flat(numbers: Values) -> list[float]:
    """Return the numbers of named tuples, nested or not, in their order."""
    made, coming = [], [numbers]
    while coming:  # called at every step: a function of its own for each part takes longer
        x = coming.pop()
        if isinstance(x, (tuple, list)):
            coming += reversed(x)
        else:
            made.append(x)
    return made


def number_places(numbers: Values) -> Values:
    """Return the same named tuples with the place of each number in `flat`: equal for equal shapes."""
    indices = iter(range(len(flat(numbers))))

    def placed(part: Values) -> Values:
        return _made(part, [placed(x) for x in part]) if isinstance(part, tuple) else next(indices)

    return placed(numbers)


def unflat(places: Values, numbers: Sequence) -> Values:
    """Return named tuples of numbers, given their `number_places`."""
    return (
        _made(places, [unflat(x, numbers) for x in places]) if isinstance(places, tuple) else numbers[places]
    )


def _made(like: tuple, values: list) -> tuple:
    return tuple(values) if type(like) is tuple else type(like)(*values)


Numbers = dict[tuple[int, int], tuple[Values, dict[int, Values]]]
"""Of each link of each group, its values and the numbers of each count."""


def attach_numbers(batches: Sequence[Batch], measured: Measured, known: Numbers) -> Numbers:
    """Set the numbers of each rule in batches, also those that depend on all gradients; return them.

    What is `known` of the step before is not computed again: where counts differ, most are one more than
    another's.
    """
    now: Numbers = {}
    for batch in batches:
        group, numbers = batch.group, {slot.step: [] for slot in batch.slots}
        for j in batch.plan.rule_indices:
            link, h, at = group.links[j], group.values[j], (group.index, j)
            before, of_counts = known.get(at, (None, {}))
            of_counts = of_counts if before == h and not link.measures else {}
            _, kept = now.setdefault(at, (h, {}))
            counts = link.counts or Scheduled in map(type, h)
            for step, of_rules in numbers.items():
                place = step if counts else 0
                if place in of_counts:
                    kept[place] = of_counts[place]
                elif place not in kept:
                    kept[place] = link.step_numbers(h, step, measured.get(at))
                of_rules.append(kept[place])
        batch.numbers = numbers
    return now


def stream_keys(streams: Sequence[Stream], steps: Sequence[int], names: Sequence[str]) -> np.ndarray:
    """Return the keys of leaves with the same streams: uint32, one row for each leaf.

    Columns: of every stream k0 and each role's k1. `steps` are the counts after their increment.
    """
    columns = [np.zeros((len(names), 0), np.uint32)]
    for seed, prefix, before, roles in streams:
        counts, leaves = [step - before for step in steps], [leaf_id(prefix + name) for name in names]
        columns.append(leaf_keys(seed, counts, leaves, roles))
    return np.concatenate(columns, axis=1)


class KeysAhead:
    """The keys of leaves with the same streams, for several steps at once if a launch repeats.

    NumPy takes as long for the keys of one leaf as for those of a hundred.
    """

    def __init__(self, streams: Sequence[Stream], names: Sequence[str]) -> None:
        self._streams, self._names = streams, names
        self._first_and_made: tuple[int, list[np.ndarray]] = 0, []

    def at(self, steps: Sequence[int]) -> np.ndarray:
        """Return the columns of `stream_keys` as int32 rows. Counts grow equally from call to call."""
        first, made = self._first_and_made
        if not first <= steps[0] < first + len(made):
            count = max(_KEYS // len(steps), 1) if made else 1
            coming = [step + i for i in range(count) for step in steps]
            keys = as_int32(stream_keys(self._streams, coming, [*self._names] * count))
            first, made = steps[0], [np.ascontiguousarray(x.T) for x in np.split(keys, count)]
            self._first_and_made = first, made  # both or none: the handler of a signal may raise
        return made[steps[0] - first]


Sharing = list[tuple[KeysAhead, list[Batch], list[Slot]]]
"""Batches whose random words are of the same streams, with all their slots, and what makes their keys."""


def sharing_streams(batches: Iterable[Batch]) -> Sharing:
    """Group batches by the streams of their random words."""
    by_streams: dict[tuple, list[Batch]] = {}
    for batch in batches:
        by_streams.setdefault(batch.plan.streams, []).append(batch)
    slots = [[slot for batch in sharing for slot in batch.slots] for sharing in by_streams.values()]
    keys = [KeysAhead(streams, [x.name for x in of]) for streams, of in zip(by_streams, slots, strict=True)]
    return list(zip(keys, by_streams.values(), slots, strict=True))


def attach_keys(sharing: Sharing) -> None:
    """Set the keys of the random words in batches."""
    for keys, batches, slots in sharing:
        columns, start = keys.at([slot.step for slot in slots]), 0
        for batch in batches:
            stop = start + len(batch.slots)
            batch.host_keys, start = columns[:, start:stop], stop


def send(batches: Iterable[Batch]) -> None:
    """Copy numbers and keys of batches to their devices: one asynchronous copy to each device."""
    by_device: dict[torch.device, list[Batch]] = {}
    for batch in batches:
        by_device.setdefault(batch.device, []).append(batch)
    for device, of_device in by_device.items():
        arrays = [array for batch in of_device for array in (batch.host_keys, *_vectors(batch))]
        sent = iter(as_sent(arrays, device))
        for batch in of_device:
            batch.keys = SlotColumns(next(sent))
            vectors = [next(sent) for _ in batch.plan.bounds]
            for k in batch.measuring:
                (numbers, *_) = batch.stage_numbers(k).values()
                for i, x in enumerate(flat(numbers)):
                    if isinstance(x, Tensor):  # the same for all counts
                        vectors[k][i].copy_(x)
            batch.vectors = [x if x.dim() == 1 else SlotColumns(x) for x in vectors]


def as_sent(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays of 4-byte numbers on a device, by one copy from pinned memory; a CPU takes no copy."""
    if not is_elsewhere(device):
        return [torch.from_numpy(array) for array in arrays]
    # Kernels read what begins at a multiple of 16 bytes.
    ends = list(itertools.accumulate(-(-array.size // _ALIGNED) * _ALIGNED for array in arrays))
    host = torch.empty(ends[-1], dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    places = list(zip(arrays, [0, *ends], strict=False))
    for array, start in places:
        host.numpy()[start : start + array.size] = array.reshape(-1).view(np.int32)
    there = host.to(device, non_blocking=True)
    dtypes = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}
    return [alias(there, start, array.shape, dtypes[array.dtype]) for array, start in places]


def is_elsewhere(device: torch.device) -> bool:
    """Whether a device does not read the host's memory."""
    return device.type != "cpu"


def _vectors(batch: Batch) -> list[np.ndarray]:
    """Return the numbers of each stage: a float32 vector, or a column for each slot if counts differ.

    A number that was measured on a device is 0 in them: it stays there.
    """
    made, of_slots = [], 0
    if len(batch.numbers) > 1:
        places = {step: i for i, step in enumerate(batch.numbers)}
        of_slots = [places[slot.step] for slot in batch.slots]
    for k in range(len(batch.plan.bounds)):
        numbers = [*map(flat, batch.stage_numbers(k).values())]
        if k in batch.measuring:
            numbers = [[0.0 if isinstance(x, Tensor) else x for x in of_count] for of_count in numbers]
        made.append(np.ascontiguousarray(np.array(numbers, np.float32)[of_slots].T))
    return made
