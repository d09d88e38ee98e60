"""What breaks in silence while an optimizer steps: where its weights and its second moment go."""

from collections.abc import Callable
from typing import Any

import numpy as np
from experiments import SHAPE, Figures, experiment, pool, weights


def _steady(start: Callable, gradient: np.ndarray, steps: int, **numbers) -> np.ndarray:
    run = start(weights(), **numbers)
    native = run.native(gradient)
    for _ in range(steps):
        run.step(native)
    return run.weight() - weights()


def _shares(moved: dict[str, np.ndarray], due: dict[str, np.ndarray]) -> Figures:
    """The movement along the one that is due, as a share of it."""
    return {name: float(np.sum(x * due[name]) / np.sum(due[name] ** 2)) for name, x in moved.items()}


def _ratio(kept: np.ndarray, truth: np.ndarray) -> Figures:
    low, median, high = np.quantile(kept / truth, (0.05, 0.5, 0.95))
    return {"median": float(median), "5 %": float(low), "95 %": float(high)}


def _quotients(largest: dict[str, float], truth: dict[str, float]) -> Figures:
    return {name: float(value / truth[name]) for name, value in largest.items()}


def _walked(moved: np.ndarray, due: np.ndarray) -> Figures:
    def size(x):
        return float(np.sqrt(np.mean(x**2)))

    return {"rms": size(moved), "of float64's": size(moved) / size(due)}


# Five standard errors of the mean of 16,384 stochastically rounded weights at a learning rate of 1e-7.
_SHARE = (0.97, 1.03)
_SPREAD = {"median": ".2f", "5 %": ".2f", "95 %": ".2f"}
_RATES = (1e-5, 1e-6, 1e-7)
_SIZES = (1e-8, 1e-2, 1e4)


@experiment(
    "Small updates", dict.fromkeys(map(str, _RATES), ".3f"), dict.fromkeys(map(str, _RATES), _SHARE), _shares
)
def small(start: Callable) -> dict[str, np.ndarray]:
    """A steady gradient for 1,000 steps, at three learning rates; weights are around 0.02.

    A figure is the movement of the weights, as a share of their movement in float64. It holds what the second
    moment does too: where that freezes below its value, steps are longer, and the figure is above 1.
    """
    return {str(lr): _steady(start, pool()[0], 1000, lr=lr) for lr in _RATES}


@experiment("Weight decay", {"share": ".3f"}, {"share": _SHARE}, _shares)
def decay(start: Callable) -> dict[str, np.ndarray]:
    """No gradient, a learning rate of 1e-3 and a weight decay of 0.1, for 1,000 steps.

    Weights should shrink by 9.5 %; the figure is the share of this that arrives.
    """
    return {"share": _steady(start, np.zeros(SHAPE), 1000, lr=1e-3, weight_decay=0.1)}


@experiment(
    "The second moment after a tenfold drop",
    _SPREAD,
    {"median": (0.95, 1.05), "5 %": (0.5, 1.05), "95 %": (0.95, 2)},
    _ratio,
    moment=True,
)
def drop(start: Callable) -> np.ndarray:
    """3,500 steps; after 500 of them gradients become ten times smaller.

    The figures are the second moment, relative to float64's: median, 5 % and 95 %.
    """
    run, gradients = start(weights()), pool(1.5, 64)
    natives = [[run.native(g * scale) for g in gradients] for scale in (1, 0.1)]
    for step, i in enumerate(np.random.default_rng(2).integers(len(gradients), size=3500)):
        run.step(natives[step >= 500][i])
    return run.second_moment()


@experiment("The second moment without gradients", _SPREAD, {"median": (0.9, 1.1)}, _ratio, moment=True)
def zeros(start: Callable) -> np.ndarray:
    """96 steps with gradients, then 2,000 steps in which they are 0.

    The figures are the second moment, relative to float64's: median, 5 % and 95 %.
    """
    run = start(weights())
    for g in [*map(run.native, pool())] * 6:
        run.step(g)
    zero = run.native(np.zeros(SHAPE))
    for _ in range(2000):
        run.step(zero)
    return run.second_moment()


@experiment(
    "Steady gradients, tiny and huge",
    dict.fromkeys(map(str, _SIZES), ".3f"),
    dict.fromkeys(map(str, _SIZES), _SHARE),
    _shares,
)
def sizes(start: Callable) -> dict[str, np.ndarray]:
    """A steady gradient of one size for 500 steps, at a learning rate of 1e-3, with eps at 1e-30.

    A figure is the movement of the weights, as a share of their movement in float64.
    """
    return {str(size): _steady(start, pool()[0] * (size / 0.01), 500, eps=1e-30) for size in _SIZES}


_SPIKES = {"x100": (100, np.inf), "x10000": (10_000, np.inf), "x10000, clipped": (10_000, 1.0)}


@experiment(
    "One batch 100 and 10,000 times larger",
    dict.fromkeys(_SPIKES, ".2f"),
    dict.fromkeys(_SPIKES, (0, 1.2)),
    _quotients,
)
def spike(start: Callable) -> dict[str, float]:
    """After 300 steps, one gradient is larger than the others.

    A figure is the largest movement of a weight in that step and the 100 after it, relative to float64's.
    Clipped, all gradients are scaled to a norm of at most 1 first, as `clip_grad_norm_` does.
    """
    return {name: _largest_step(start, *of) for name, of in _SPIKES.items()}


def _largest_step(start: Callable, factor: float, max_norm: float) -> float:
    run = start(np.zeros(SHAPE))

    def native(gradient: np.ndarray) -> Any:
        return run.native(gradient * min(1, max_norm / np.linalg.norm(gradient)))

    # Of either sign, so that weights stay small, and their rounding with them.
    natives = [native(g * sign) for g in pool() for sign in (1, -1)]
    order = np.random.default_rng(3).integers(len(natives), size=400)
    for i in order[:300]:
        run.step(natives[i])
    before, steps = run.weight(), []
    for g in [native(pool()[0] * factor), *(natives[i] for i in order[300:])]:
        run.step(g)
        after = run.weight()
        steps.append(np.abs(after - before).max())
        before = after
    return max(steps)


@experiment("Rows touched once in 1,000 steps", {"share": ".3f"}, {"share": (0.9, 1.1)}, _shares)
def once(start: Callable) -> dict[str, np.ndarray]:
    """Each row has a gradient in one step of 1,000, twice in all, as rows of an embedding may.

    The figure is the movement of the weights, as a share of their movement in float64.
    """
    run = start(weights())
    zero, natives = run.native(np.zeros(SHAPE)), {}
    for row in range(SHAPE[0]):
        g = np.zeros(SHAPE)
        g[row] = pool()[0][row]
        natives[7 * row] = run.native(g)
    for step in range(2000):
        run.step(natives.get(step % 1000, zero))
    return {"share": run.weight() - weights()}


@experiment(
    "Idle weights beside live ones",
    {"rms": ".2f", "of float64's": ".2f"},
    {"of float64's": (0, 1.5)},
    _walked,
)
def idle(start: Callable) -> np.ndarray:
    """After 200 steps, the gradients of every second column are 0.

    The figures are the movement of these columns in the next 1,000 steps: its root mean square in learning
    rates, and that relative to float64's.
    """
    run = start(weights())
    live = np.ones(SHAPE)
    live[:, 1::2] = 0
    natives = [[run.native(g * mask) for g in pool()] for mask in (1, live)]
    for step in range(200):
        run.step(natives[0][step % 16])
    before = run.weight()
    for step in range(1000):
        run.step(natives[1][step % 16])
    return ((run.weight() - before) / 1e-3)[:, 1::2]
