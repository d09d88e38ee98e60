"""The inputs of kernels that change with each step: numbers and random keys. Contract: A4, W3, W4."""

from collections.abc import Iterable, Sequence

import numpy as np

from halfstep.hyperparameters import Values
from halfstep.random_words import leaf_id
from halfstep_torch.engine.batches import Batch, Measured
from halfstep_torch.engine.number_places import flat, number_places, unflat  # noqa: F401
from halfstep_torch.engine.plan import Stream
from halfstep_torch.numbers.random_words import as_int32, leaf_keys
from halfstep_torch.numbers.schedules import Scheduled

# Leaves, counted anew for each step, whose keys are made at once.
_KEYS = 1 << 10


Numbers = dict[tuple[int, int], tuple[Values, dict[int, Values]]]
"""Of each link of each group, its values and the numbers of each count."""


def attach_numbers(batches: Sequence[Batch], measured: Measured, known: Numbers) -> Numbers:
    """Set the numbers of each rule in batches, also those that depend on all gradients; return them.

    What is `known` of the step before is not computed again: where counts differ, most are one more than
    another's.
    """
    now: Numbers = {}
    for batch in batches:
        group, numbers = batch.group, {step: [] for step in batch.steps}
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


Sharing = list[tuple[KeysAhead, list[Batch]]]
"""Batches whose random words are of the same streams, and what makes their keys."""


def sharing_streams(batches: Iterable[Batch]) -> Sharing:
    """Group batches by the streams of their random words."""
    by_streams: dict[tuple, list[Batch]] = {}
    for batch in batches:
        by_streams.setdefault(batch.plan.streams, []).append(batch)
    return [
        (KeysAhead(streams, [slot.name for batch in sharing for slot in batch.slots]), sharing)
        for streams, sharing in by_streams.items()
    ]


def attach_keys(sharing: Sharing) -> None:
    """Set the keys of the random words in batches."""
    for keys, batches in sharing:
        columns, start = keys.at([step for batch in batches for step in batch.steps]), 0
        for batch in batches:
            stop = start + len(batch.slots)
            batch.host_keys, start = columns[:, start:stop], stop
