"""Numbers and random keys, the inputs of kernels that change with each step. Contract: A4, W3, W4."""

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.random_words import leaf_id
from halfstep_torch.engine.batches import Batch, Measured
from halfstep_torch.engine.number_places import flat, number_places, unflat  # noqa: F401
from halfstep_torch.engine.plan import Stream
from halfstep_torch.links.link import LateNumbers, Link, is_ours
from halfstep_torch.numbers.random_words import as_int32, leaf_keys
from halfstep_torch.numbers.schedules import Scheduled

# Keys made at once, counting each leaf at each step.
_KEYS = 1 << 10
# Counts with numbers computed at once, and counts with numbers kept at most.
_AHEAD, _KEPT = 16, 256
_STEPS = operator.attrgetter("steps")


Numbers = dict[tuple[int, int], tuple[Values, dict[int, Values]]]
"""Values and numbers by count, for each link of each group."""


def attach_numbers(batches: Sequence[Batch], measured: Measured, known: Numbers) -> Numbers:
    """Set and return the numbers of each rule in batches, including numbers that depend on all gradients.

    Numbers `known` from earlier steps are not computed again, because a count is often another's plus one. If
    all counts are equal, the numbers of a few counts are computed at once.
    """
    now: Numbers = {}
    for batch in batches:
        group, numbers = batch.group, {}
        for step in set(batch.steps):
            numbers[step] = []
        for j in batch.plan.rule_indices:
            link, h, at = group.links[j], group.values[j], (group.index, j)
            if at not in now:
                before, of_counts = known.get(at, (None, {}))
                now[at] = h, of_counts if before == h and not link.measures else {}
            of_counts, follows = now[at][1], Scheduled in map(type, h)
            for step, of_rules in numbers.items():
                place = step if follows or link.counts else 0
                if place not in of_counts:
                    again = bool(of_counts) and len(numbers) == 1 and not follows
                    _compute(link, h, step, measured.get(at), place, of_counts, again)
                of_rules.append(of_counts[place])
        batch.numbers, batch.late = numbers, None
        if measured:
            of_links = [measured.get((group.index, j)) for j in batch.plan.rule_indices]
            rows = [x.rows for x in of_links if isinstance(x, LateNumbers)]
            batch.late = rows[0] if len(rows) == 1 else None
    return now


def _compute(
    link: Link,
    h: Values,
    step: int,
    measured: Mapping[str, Tensor] | None,
    place: int,
    of_counts: dict[int, Values],
    again: bool,
) -> None:
    """Add a step's numbers to a link's, and numbers of coming steps if the link is used `again`."""
    if len(of_counts) > _KEPT:
        of_counts.clear()
    of_counts[place] = link.step_numbers(h, step, measured)
    # A user's rule may raise for a count that no step reaches.
    if again and link.counts and is_ours(type(link.rule)):
        of_counts.update({later: link.step_numbers(h, later) for later in range(step + 1, step + _AHEAD)})


def stream_keys(streams: Sequence[Stream], steps: Sequence[int], names: Sequence[str]) -> np.ndarray:
    """Return the keys of leaves with the same streams, uint32, a row for each leaf.

    Columns are k0 and each role's k1, for every stream. `steps` are the counts after their increment.
    """
    return _keys(streams, np.array(steps, np.int64), leaves_of(streams, names))


def leaves_of(streams: Sequence[Stream], names: Sequence[str]) -> np.ndarray:
    """Return the ids of leaves in each stream, a row for each stream."""
    rows = [[leaf_id(stream.prefix + name) for name in names] for stream in streams]
    return np.array(rows, np.uint32).reshape(len(streams), len(names))


def _keys(streams: Sequence[Stream], steps: np.ndarray, leaves: np.ndarray) -> np.ndarray:
    columns = [np.zeros((len(steps), 0), np.uint32)]
    for (seed, _, before, roles), of_stream in zip(streams, leaves, strict=True):
        columns.append(leaf_keys(seed, steps - before, of_stream, roles))
    return np.concatenate(columns, axis=1)


class KeysAhead:
    """The keys of leaves with the same streams, for several steps at once if counts grow equally.

    NumPy needs the same time for the keys of one leaf and of a hundred leaves.

    Args:
        streams: the streams of the words.
        leaves: the ids of the leaves in each stream (`leaves_of`).
    """

    def __init__(self, streams: Sequence[Stream], leaves: np.ndarray) -> None:
        self._streams, self._leaves = streams, leaves
        self._first_and_made: tuple[np.ndarray, list[np.ndarray]] = np.zeros(0, np.int64), []

    def part(self, places: np.ndarray) -> "KeysAhead":
        """Return the keys of some of the leaves."""
        return KeysAhead(self._streams, self._leaves[:, places])

    def at(self, steps: Sequence[int]) -> np.ndarray:
        """Return the columns of `stream_keys` as int32 rows, given the count of each leaf."""
        now = np.array(steps, np.int64)
        first, made = self._first_and_made
        ahead = now - first if made else now
        if not (0 <= ahead[0] < len(made) and (ahead == ahead[0]).all()):
            count = max(_KEYS // len(now), 1) if made else 1
            coming = (np.arange(count)[:, None] + now).reshape(-1)
            keys = as_int32(_keys(self._streams, coming, np.tile(self._leaves, count)))
            first, made, ahead = now, [np.ascontiguousarray(x.T) for x in np.split(keys, count)], now - now
            self._first_and_made = first, made  # both or none, because a signal handler may raise
        return made[ahead[0]]


class Sharing(NamedTuple):
    """Batches with the same streams of random words, and the keys of their slots."""

    keys: KeysAhead
    batches: Sequence[Batch]


def sharing_streams(batches: Iterable[Batch]) -> list[Sharing]:
    """Group batches by the streams of their random words."""
    by_streams: dict[tuple, list[Batch]] = {}
    for batch in batches:
        by_streams.setdefault(batch.plan.streams, []).append(batch)
    return [
        Sharing(
            KeysAhead(streams, leaves_of(streams, [slot.name for batch in of for slot in batch.slots])), of
        )
        for streams, of in by_streams.items()
    ]


def some_sharing(all_sharing: Iterable[Sharing], parts: Mapping[int, Batch]) -> list[Sharing]:
    """Return the same for parts of batches, given by the ids of the batches."""
    some = []
    for keys, batches in all_sharing:
        places, chosen, start = [], [], 0
        for batch in batches:
            if (part := parts.get(id(batch))) is not None:
                places.append(start + (np.array(part.all_places) if part.places is None else part.places))
                chosen.append(part)
            start += len(batch.slots)
        if chosen:
            some.append(Sharing(keys.part(np.concatenate(places)), chosen))
    return some


def attach_keys(sharing: Iterable[Sharing]) -> None:
    """Set the keys of the random words in batches."""
    for keys, batches in sharing:
        columns, start = keys.at([*itertools.chain.from_iterable(map(_STEPS, batches))]), 0
        for batch in batches:
            stop = start + len(batch.slots)
            batch.host_keys, start = columns[:, start:stop], stop
