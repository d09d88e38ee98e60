"""Devices, compilers, and steps on one device, for `python -m halfstep`."""

import importlib.metadata
import importlib.util
import os
import shutil

import numpy as np
import torch

from halfstep.hyperparameters import Arguments
from halfstep.kernels.build import find_cc, folder
from halfstep_torch.rules.adam import AdamW

MODES = ("plain steps", *(["kernels"] if find_cc() else []))
"""Ways to run a step."""


def about() -> list[str]:
    """Return a line for each device and each compiler."""
    names = [f"device {i}: cuda, {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    cc = find_cc()
    lines = [*(names or ["device: cpu"]), f"C compiler: {shutil.which(cc) if cc else 'none found'}"]
    triton = importlib.util.find_spec("triton") is not None
    lines.append(f"Triton: {importlib.metadata.version('triton') if triton else 'none found'}")
    return lines


def devices() -> list[str]:
    """Return the device types with promised bits."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def final_weights(
    recipe: Arguments,
    question: tuple[np.ndarray, np.ndarray],
    leaf: str,
    device: str,
    mode: str,
    *,
    learning_rate: float,
    **hyperparameters: float,
) -> np.ndarray:
    """Take steps of AdamW for `python -m halfstep`, and return the weights' patterns."""
    weights, gradients = question
    array = torch.from_numpy(weights.view(np.int16).copy()).view(torch.bfloat16).to(device)
    parameter = torch.nn.Parameter(array)
    optimizer = AdamW(
        [(leaf.replace("/", "."), parameter)],
        lr=learning_rate,
        compile=mode == "kernels",
        **hyperparameters,
        **recipe,
    )
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient).to(device, torch.bfloat16)  # exact
        optimizer.step()
    return parameter.detach().cpu().view(torch.int16).numpy().view(np.uint16)


def warm(recipe: Arguments) -> list[str]:
    """Build AdamW's kernels for bfloat16 weights on each device, and return lines that say where they are.

    A recipe may store the moments of vectors and of matrices differently.
    """
    said = []
    for device in devices():
        shapes = {"weight": (256, 256), "bias": (256,)}
        params = {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device))
            for name, shape in shapes.items()
        }
        for p in params.values():
            p.grad = torch.zeros_like(p)
        AdamW(params.items(), compile=True, **recipe).step()
        kept = folder() if device == "cpu" else os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache")
        said.append(f"{device}: " + (f"kept in {kept}" if kept else "built, and kept nowhere"))
    return said
