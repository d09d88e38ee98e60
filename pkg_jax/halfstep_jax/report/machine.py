"""Devices, and a few steps on one of them, for `python -m halfstep`."""

import jax
import numpy as np
import optax

from halfstep.hyperparameters import Arguments
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.rules.adam import adamw

MODES = ("jax.jit",)
"""In which ways steps are taken."""


def about() -> list[str]:
    """Return a line for each device."""
    return [f"device {device.id}: {device.platform}, {device.device_kind}" for device in jax.devices()]


def devices() -> list[str]:
    """Return a platform for each kind of device."""
    return list(dict.fromkeys(device.platform for device in jax.devices()))


def final_weights(
    recipe: Arguments,
    question: tuple[np.ndarray, np.ndarray],
    leaf: str,
    device: str,
    mode: str,
    **hyperparameters: float,
) -> np.ndarray:
    """Return the bits of the weights after steps of AdamW, for `python -m halfstep`."""
    tx = adamw(**hyperparameters, **recipe)

    def tree(array: Tree) -> Tree:
        for part in reversed(leaf.split("/")):
            array = {part: array}
        return array

    @jax.jit
    def step(params, state, gradient):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    weights, gradients = question
    with jax.default_device(jax.devices(device)[0]):
        params = tree(jax.lax.bitcast_convert_type(weights, jax.numpy.bfloat16))
        state = tx.init(params)
        for gradient in gradients:
            params, state = step(params, state, tree(gradient))
        (array,) = jax.tree.leaves(params)
        return np.asarray(array).view(np.uint16)
