"""A small network on real images, the same in every framework: first weights, batches, the place of layers.

NumPy alone. Notebook 5 trains it in JAX and PyTorch, and `make peers` with every optimizer that it compares.
The network has one array, so that an optimizer of any library can hold it.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

PIXELS, HIDDEN, CLASSES = 64, 128, 10
SHAPE = (PIXELS + CLASSES, HIDDEN)
"""Rows of the weight: a row for each pixel, then a row for each class."""
STEPS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 600, 128, 1e-3, 0.01


def images() -> tuple[np.ndarray, np.ndarray]:
    """Return 1,797 images of 8 x 8 pixels in [0, 1], float32 (1797, 64), and the digits that they show."""
    digits = load_digits()
    return (digits.data / 16).astype(np.float32), digits.target


def initial_weights(seed: int) -> np.ndarray:
    """Draw first weights, normal with standard deviation 1/sqrt(fan in), that bfloat16 holds."""
    generator = np.random.default_rng([seed, 1])
    layers = [(PIXELS, PIXELS), (CLASSES, HIDDEN)]
    drawn = [generator.standard_normal((rows, HIDDEN)) / np.sqrt(fan_in) for rows, fan_in in layers]
    return (np.concatenate(drawn).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def batches(seed: int, order: int = 0, steps: int = STEPS) -> np.ndarray:
    """Return which images each step sees: integers of shape (steps, batch); `order` is another shuffling."""
    return np.random.default_rng([seed, 2, order]).integers(0, len(load_digits().target), (steps, BATCH))


def distance(weights: np.ndarray, reference: np.ndarray, start: np.ndarray) -> float:
    """Return how far weights end from the reference, relative to how far the reference moved."""
    return float(np.linalg.norm(weights - reference) / np.linalg.norm(reference - start))
