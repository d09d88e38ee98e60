"""The numbers of a monitor, its steps, and its warnings."""

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
"""The entries of a row beside "step", in order. Shares are between 0 and 1; `nonfinite` is a count."""
_SAMPLE = 2**14
_EARLY = 10
# The call that looks at the ends of second moments before a run has lost much.
SAID: set[tuple[str, str]] = set()
"""The problems that each package has logged in this process: a share changes from step to step."""


class Monitor:
    """Measure the losses by rounding every N steps, for any transform or optimizer.

    Call `read` after every step, in JAX with the weights and the state. Every `every`-th call returns the
    numbers as a flat dict of floats, for W&B, TensorBoard, a Trainer or Lightning; others return None, and do
    nothing. The numbers are computed where the arrays are, and a few bytes are transferred. The step itself
    is left alone.

    | entry | of the measured step |
    |---|---|
    | `step` | the number of the call |
    | `updates_lost` | share of the updates of 16-bit weights that move nothing |
    | `update_norm` | the norm of the movement of the weights |
    | `weight_norm` | the norm of the weights |
    | `moments_at_smallest`, `moments_at_largest` | shares of second moments at the ends of their codes |
    | `nonfinite` | how many weights are infinite or NaN |

    The first two are estimates, from the first 16,384 elements of each weight. An update counts as lost if a
    weight that is rounded to nearest stays where it was, and its moments are not all zero. As `diagnose`, it
    takes the stochastic rounding of other libraries for a loss. Nothing is lost between two steps of an
    accumulation of gradients, or by a step that is left out. For DTensors the numbers are of the whole
    model, so all processes of a mesh must call `read`.

    What is wrong is said once in the log of the package, such as second moments at the ends of what
    `one_pass` holds. For these the tenth call looks too, whatever `every` is.

    Args:
        tx: of JAX: the transform that trains.
        optimizer: of torch: that trains; one that accelerate has wrapped, too.
        every: how many steps lie between two that are measured.
        extra_args: of JAX: what `tx.update` wants beside updates, state and params, such as `value`.

    Raises:
        TypeError: if `optimizer` is no optimizer.
        ValueError: if `every` is no positive integer.

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
        """Return the numbers of a step, if it is one that is measured."""
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

    def _corners(self, *step: Any) -> object:  # what a framework's `read` is given
        """Return the first elements of each weight, copied."""
        raise NotImplementedError

    # `before` is what `_corners` returned, and `step` what a framework's `read` is given.
    def _measured(self, before: Any, *step: Any) -> Sequence[float]:
        """Return lost updates as a share, the squares of both norms, and how many weights are not finite."""
        raise NotImplementedError

    def _ends(self, *step: Any) -> Mapping[str, Mapping[str, Ends]]:  # the same
        """Return by format and weight how many second moments are at the ends of their codes."""
        raise NotImplementedError


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
    package: str, step: int, numbers: Sequence[float], second: str, ends: Mapping[str, Mapping[str, Ends]]
) -> dict[str, float]:
    """Return the numbers of a step by name; say once in the log what is wrong with them.

    Args:
        package: whose log it is.
        step: its number.
        numbers: lost updates, both norms still as squares, and how many weights are not finite.
        second: the name of second moments, and
        ends: by format and weight, how many of them are at the ends of their codes.
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
    """Return by format the problem of the weight with the most second moments at an end.

    Early in a run second moments still grow from 0. So a quarter of a weight's may be at their smallest.
    """
    found = {}
    for fmt, by_weight in ends.items():
        for name, counts in sorted(by_weight.items(), key=lambda row: -max(_shares([row[1]])))[:1]:
            low, high = _shares([counts])
            found[fmt] = at_ends(f"{second} of {name!r}", fmt, low if low > 0.25 else 0.0, high)
    return found


def _shares(ends: Iterable[Ends]) -> tuple[float, float]:
    """Return the shares of elements at the smallest and at the largest number."""
    low, high, size = map(sum, zip((0, 0, 0), *ends, strict=True))
    return low / max(size, 1), high / max(size, 1)


def say(package: str, found: Mapping[str, str]) -> None:
    """Log each problem, by its kind, once in a process; an empty one is none."""
    for kind, problem in found.items():
        if problem and (package, kind) not in SAID:
            SAID.add((package, kind))
            logging.getLogger(package).warning("Monitor: %s", problem)
