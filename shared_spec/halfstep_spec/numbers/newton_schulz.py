"""The Newton-Schulz factor of matrices. Contract: A14. Vectors: muon."""

import math
from collections.abc import Sequence

import numpy as np

_COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5


def newton_schulz(
    x: np.ndarray,
    reduction_axes: Sequence[int],
    output_axes: Sequence[int],
    coefficients=_COEFFICIENTS,
    eps=1e-7,
) -> np.ndarray:
    """Return the factor of every matrix of a float32 array, in float32, from sums in float64.

    Each matrix, inputs by outputs, becomes X over max(|X|, eps), |X| its Frobenius norm; then each step is
    X = (a X) + ((b A) + (c (A A))) X with A = X X^T. Of a zero matrix it is 0.

    Args:
        x: float32.
        reduction_axes: of the inputs.
        output_axes: of the outputs; all other axes count matrices.
        coefficients: (a, b, c) of every step.
        eps: the least value of a norm.
    """
    counting = [axis for axis in range(x.ndim) if axis not in (*reduction_axes, *output_axes)]
    order = [*counting, *reduction_axes, *output_axes]
    moved = np.transpose(x.astype(np.float64), order)
    inputs = math.prod(x.shape[axis] for axis in reduction_axes)
    factors = [
        _factor(matrix, coefficients, eps)
        for matrix in moved.reshape(-1, inputs, math.prod(moved.shape[len(moved.shape) - len(output_axes) :]))
    ]
    stacked = np.stack(factors).reshape(moved.shape)
    return np.transpose(stacked, np.argsort(order)).astype(np.float32)


def shape_scale(scale: str | None, inputs: int, outputs: int) -> np.float32:
    """Return the number that multiplies the factor, by the name of the scale and the shape."""
    if scale is None:
        return np.float32(1)
    if scale == "consistent_rms":
        return np.float32(0.2 * math.sqrt(max(inputs, outputs)))
    return np.float32(math.sqrt(max(1, outputs / inputs)))


def _factor(x: np.ndarray, coefficients, eps: float) -> np.ndarray:
    x = x / max(np.linalg.norm(x), eps)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x
