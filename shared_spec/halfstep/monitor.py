"""What a run tells of itself while it trains: which numbers, at which steps, and what to say of them."""

import logging
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

from halfstep.diagnosis import at_ends, end_codes

NUMBERS = (
    "updates_lost",
    "update_norm",
    "weight_norm",
    "moments_at_smallest",
    "moments_at_largest",
    "nonfinite",
)
"""The entries of a row beside "step", in order. Shares are between 0 and 1; `nonfinite` is a count."""
_SAMPLE = 2**14
SAID: set[tuple[str, str]] = set()
"""Of which packages what was said in this process: a share changes from step to step."""


def checked_every(every: Any) -> int:
    """Return a number of steps; refuse what is none."""
    try:
        steps = 0 if isinstance(every, bool) else operator.index(every)
    except TypeError:
        steps = 0
    if steps < 1:
        raise ValueError(f"Monitor: every={every!r} is not a number of steps. Use an integer >= 1.")
    return steps


def corner(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of the first elements of an array, at most 16,384: whole rows where they fit.

    Example:
        >>> corner((100_000, 4096))
        (slice(0, 4, None), slice(0, 4096, None))
    """
    room, sizes = _SAMPLE, []
    for size in reversed(shape):
        sizes.append(min(size, max(room, 1)))
        room //= max(sizes[-1], 1)
    return tuple(slice(0, size) for size in reversed(sizes))


def row_of(
    package: str, step: int, numbers: Sequence[float], second: str, formats: Collection[str]
) -> dict[str, float]:
    """Return the numbers of a step by name; say once in the log what is wrong with them.

    Args:
        package: whose log it is.
        step: its number.
        numbers: in the order of `NUMBERS`, norms still as squares.
        second: the name of second moments, and
        formats: those that they are kept in.
    """
    row = {"step": float(step), **dict(zip(NUMBERS, map(float, numbers), strict=True))}
    for norm in ("update_norm", "weight_norm"):
        row[norm] = math.sqrt(row[norm])
    ends = (row["moments_at_smallest"], row["moments_at_largest"])
    found = {fmt: at_ends(second, fmt, *ends) for fmt in formats if end_codes(fmt)}
    if row["updates_lost"] > 0.05:
        found["lost"] = "rounding drops over 5 % of the updates of 16-bit weights. Call diagnose for advice."
    if row["nonfinite"]:
        found["nonfinite"] = "weights are infinite or NaN, and stay so. Go back to a checkpoint and clip."
    for kind, problem in found.items():
        if problem and (package, kind) not in SAID:
            SAID.add((package, kind))
            logging.getLogger(package).warning("Monitor: %s", problem)
    return row
