"""Optimizer state without weights, as bytes, for checkpoints that hold the weights themselves."""

import os

import numpy as np

from halfstep.checkpoint.state_file import FileArray, read_state_file, write_state_file


def state_bytes(caller: str, path: str | os.PathLike[str]) -> np.ndarray:
    """Remove the weights from a state file, and return its bytes, uint8."""
    header, arrays = read_state_file(caller, path)
    write_state_file(path, header, {name: x for name, x in arrays.items() if not _is_weight(name)})
    return np.fromfile(path, np.uint8)


def replace_state(caller: str, path: str | os.PathLike[str], data: np.ndarray) -> None:
    """Replace all but the weights of a state file by the bytes that `state_bytes` returned."""
    weights: dict[str, FileArray] = {
        name: x for name, x in read_state_file(caller, path)[1].items() if _is_weight(name)
    }
    np.asarray(data, np.uint8).tofile(path)
    header, arrays = read_state_file(caller, path)
    write_state_file(path, header, weights | arrays)


def _is_weight(name: str) -> bool:
    return name.startswith("params/")
