"""The row that trains: a network of digits, and how far from float32 it ends."""

import pathlib
import sys
from collections.abc import Callable

import numpy as np
import torch
from experiments import Figures, experiment
from runs import Float32Run
from torch.nn import functional

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
import digits

SEEDS = (0, 1)


def _gradient(stored: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """Return the gradient of the mean cross entropy, computed in float32."""
    w = stored.to(torch.float32, copy=True).requires_grad_()
    hidden = functional.gelu(x @ w[: digits.PIXELS], approximate="tanh")
    functional.cross_entropy(hidden @ w[digits.PIXELS :].T, y).backward()
    assert w.grad is not None
    return w.grad.numpy()


def _stored(run: object) -> torch.Tensor:
    """Return the weight that the network computes with."""
    stored = getattr(run, "stored", None)
    if stored is None:
        return torch.tensor(run.weight())
    return stored if isinstance(stored, torch.Tensor) else torch.tensor(np.asarray(stored, np.float32))


def _trained(start: Callable, seed: int) -> np.ndarray:
    """Return the weight after a run; the float32 run takes gradients as they are."""
    x, y = (torch.from_numpy(array) for array in digits.images())
    run = start(digits.initial_weights(seed), lr=digits.LEARNING_RATE, weight_decay=digits.WEIGHT_DECAY)
    for batch in torch.from_numpy(digits.batches(seed)):
        gradient = _gradient(_stored(run), x[batch], y[batch])
        run.step(gradient if isinstance(run, Float32Run) else run.native(gradient))
    return run.weight()


def _distances(ends: list[np.ndarray], truths: list[np.ndarray]) -> Figures:
    starts = map(digits.initial_weights, SEEDS)
    return {"distance": float(np.mean(list(map(digits.distance, ends, truths, starts))))}


@experiment("A small network", {"distance": ".4f"}, {"distance": (0, 0.15)}, _distances)
def network(start: Callable) -> list[np.ndarray]:
    """A network of 9,472 weights is trained on images of digits for 600 steps, at a learning rate of 1e-3.

    The figure is the distance from the end of a float32 run, relative to the distance that the float32 run
    moved. It is a mean over two seeds. Other batches give 0.12 (notebook 5).
    """
    return [_trained(start, seed) for seed in SEEDS]
