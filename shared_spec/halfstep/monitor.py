"""The base class of both monitors, with its numbers, steps and warnings."""

import logging
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

from halfstep.diagnosis import Ends, at_ends, end_codes, worst_of

NUMBERS = (
    "updates_lost",
    "update_norm",
    "weight_norm",
    "moments_at_smallest",
    "moments_at_largest",
    "nonfinite",
)
"""Entries of a row besides "step", in order. Shares are between 0 and 1, and `nonfinite` is a count."""
_SAMPLE = 2**14
# This call checks the ends of second moments before a run has lost much.
_EARLY = 10
SAID: set[tuple[str, str]] = set()
"""Pairs of a package and a kind of problem that are logged. Texts are not compared, as shares change."""


class Monitor:
    """Measure rounding losses every N steps, for any transform or optimizer.

    Call `read` after every step, in JAX with the weights and the state. Every `every`-th call returns the
    numbers as a flat dict of floats, for W&B, TensorBoard, a Trainer or Lightning. Other calls return None
    without any work. The numbers are computed on the arrays' devices, and a few bytes are transferred. The
    step itself is not changed.

    | entry | value at the measured step |
    |---|---|
    | `step` | the number of the call |
    | `updates_lost` | share of updates that do not move a 16-bit weight |
    | `update_norm` | norm of the weights' movement |
    | `weight_norm` | norm of the weights |
    | `moments_at_smallest`, `moments_at_largest` | shares of second moments at the ends of their codes |
    | `nonfinite` | number of infinite or NaN weights |

    `updates_lost` and `update_norm` are estimated from the first 16,384 elements of each weight. An update
    counts as lost if a weight that is rounded to nearest does not change, and its moments are not all zero.
    Stochastic rounding by other libraries also counts as a loss, as in `diagnose`. Steps that only accumulate
    gradients, or that are skipped, lose no updates. For DTensors the numbers describe the whole model, so all
    processes in a mesh must call `read`.

    Problems are logged once by the package, such as second moments at the ends of the range of `one_pass`.
    The tenth call also checks for these, whatever `every` is.

    Args:
        tx: the transform in use (JAX).
        optimizer: the optimizer in use, also if accelerate has wrapped it (torch).
        every: number of steps from one measurement to the next.
        extra_args: further arguments for `tx.update`, such as `value` (JAX).

    Raises:
        TypeError: if `optimizer` is not an optimizer.
        ValueError: if `every` is not a positive integer.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(64, 1, bias=False, dtype=torch.bfloat16)
        >>> torch.nn.init.ones_(model.weight).grad = torch.ones_like(model.weight)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> monitor = hs.Monitor(optimizer, every=2)
        >>> for _ in range(2):
        ...     optimizer.step()
        ...     row = monitor.read()
        >>> row["step"], row["updates_lost"], row["weight_norm"]
        (2.0, 1.0, 8.0)

        >>> import halfstep_jax, jax.numpy as jnp, optax
        >>> params, tx = {"w": jnp.ones(64, jnp.bfloat16)}, optax.adamw(1e-5)
        >>> monitor, state = halfstep_jax.Monitor(tx, every=2), tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(params, state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     row = monitor.read(params, state)
        >>> row["updates_lost"]
        1.0

    Source: ours.
    """

    _package = ""
    _second = ""

    def __init__(self, every: SupportsIndex) -> None:
        try:
            self.every = 0 if isinstance(every, bool) else operator.index(every)
        except TypeError:
            self.every = 0
        if self.every < 1:
            raise ValueError(f"Monitor: every={every!r} is not a number of steps. Use an integer >= 1.")
        self._calls = 0
        self._before: object = None

    def _row(self, *step: object) -> dict[str, float] | None:
        """Return the numbers for a step, or None if it is not measured."""
        self._calls += 1
        row = None
        if self._before:
            numbers, ends = self._measured(self._before, *step), self._ends(*step)
            row = row_of(self._package, self._calls, numbers, self._second, ends)
            self._before = None
        elif self._calls == _EARLY:
            say(self._package, problems_of_weights(self._second, self._ends(*step)))
        if (self._calls + 1) % self.every == 0:
            self._before = self._corners(*step)
        return row

    def _corners(self, *step: Any) -> object:  # the arguments of a framework's `read`
        """Return the first elements of each weight, copied."""
        raise NotImplementedError

    # `before` is the result of `_corners`, and `step` has the arguments of a framework's `read`.
    def _measured(self, before: Any, *step: Any) -> Sequence[float]:
        """Return the share of lost updates, the squares of both norms, and the nonfinite weight count."""
        raise NotImplementedError

    def _ends(self, *step: Any) -> Mapping[str, Mapping[str, Ends]]:  # the same
        """Return counts of second moments at the ends of their codes, by format and weight."""
        raise NotImplementedError


def corner(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return slices of an array's first elements, at most 16,384, with whole rows if they fit.

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
    package: str, step: int, numbers: Sequence[float], second: str, ends: Mapping[str, Mapping[str, Ends]]
) -> dict[str, float]:
    """Return the numbers for a step by name, and log their problems once.

    Args:
        package: name of the logger.
        step: number of the step.
        numbers: share of lost updates, squares of both norms, and number of nonfinite weights.
        second: name of the second moments.
        ends: counts of second moments at the ends of their codes, by format and weight.
    """
    lost, moved, weights, nonfinite = map(float, numbers)
    shares = _shares(counts for of_format in ends.values() for counts in of_format.values())
    values = (lost, math.sqrt(moved), math.sqrt(weights), *shares, nonfinite)
    row = {"step": float(step), **dict(zip(NUMBERS, values, strict=True))}
    found = {fmt: at_ends(second, fmt, *shares, worst_of(x)) for fmt, x in ends.items() if end_codes(fmt)}
    if row["updates_lost"] > 0.05:
        found["lost"] = "rounding drops over 5 % of the updates of 16-bit weights. Call diagnose for advice."
    if row["nonfinite"]:
        found["nonfinite"] = (
            "weights are infinite or NaN, and stay so, as after a gradient above 1.8e19, whose square "
            "is infinite. Go back to a checkpoint and clip."
        )
    say(package, found)
    return row


def problems_of_weights(second: str, ends: Mapping[str, Mapping[str, Ends]]) -> dict[str, str]:
    """Return, by format, the problem with the weight that has the most second moments at an end.

    Early in a run second moments still grow from 0, so that up to a quarter may be at the smallest number.
    """
    found = {}
    for fmt, by_weight in ends.items():
        for name, counts in sorted(by_weight.items(), key=lambda row: -max(_shares([row[1]])))[:1]:
            low, high = _shares([counts])
            found[fmt] = at_ends(f"{second} of {name!r}", fmt, low if low > 0.25 else 0.0, high)
    return found


def _shares(ends: Iterable[Ends]) -> tuple[float, float]:
    """Return the shares of elements at the smallest and the largest number."""
    low, high, size = map(sum, zip((0, 0, 0), *ends, strict=True))
    return low / max(size, 1), high / max(size, 1)


def say(package: str, found: Mapping[str, str]) -> None:
    """Log each kind of problem once in a process. Empty texts are skipped."""
    for kind, problem in found.items():
        if problem and (package, kind) not in SAID:
            SAID.add((package, kind))
            logging.getLogger(package).warning("Monitor: %s", problem)
