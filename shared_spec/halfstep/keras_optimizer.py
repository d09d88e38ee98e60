"""Functions for both Keras optimizers: checks, and state without weights as bytes.

A Keras checkpoint holds the weights itself. The state is a state file, which either package can read.
"""

import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from halfstep.checkpoint.state_file import read_state_file, write_state_file

T = TypeVar("T")
CALLER = "KerasOptimizer"
_PACKAGES = {"jax": "halfstep_jax", "torch": "halfstep_torch"}


def check_arguments(backend: str, due: str, options: Mapping[str, object]) -> None:
    """Raise RuntimeError if Keras runs another backend, and TypeError for `weight_decay`."""
    if backend != due:
        others = (
            f", or use {package}.integrations.keras under {name!r}"
            for name, package in _PACKAGES.items()
            if name != due
        )
        raise RuntimeError(
            f"{CALLER}: the backend of Keras is {backend!r}. Set KERAS_BACKEND={due} before Keras is imported"
            f"{''.join(others)}."
        )
    if "weight_decay" in options:
        raise TypeError(
            f"{CALLER}: weight_decay={options['weight_decay']} would be rounded by Keras to the dtype of the "
            'weights. Put it into the config: "adamw(weight_decay=0.1)".'
        )


def state_bytes(save: Callable[[pathlib.Path], None]) -> np.ndarray:
    """Return the uint8 bytes of a state file written by `save`, without the weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "state"
        save(path)
        header, arrays = read_state_file(CALLER, path)
        write_state_file(path, header, {name: x for name, x in arrays.items() if not _is_weight(name)})
        return np.fromfile(path, np.uint8)


def load_bytes(
    data: np.ndarray, save: Callable[[pathlib.Path], None], load: Callable[[pathlib.Path], T]
) -> T:
    """Return load(path) for a file with the weights from `save` and the state from `state_bytes`."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "state"
        save(path)
        weights = {name: x for name, x in read_state_file(CALLER, path)[1].items() if _is_weight(name)}
        np.asarray(data, np.uint8).tofile(path)
        header, arrays = read_state_file(CALLER, path)
        write_state_file(path, header, weights | arrays)
        return load(path)


def _is_weight(name: str) -> bool:
    return name.startswith("params/")
