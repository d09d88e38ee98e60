"""What `python -m halfstep` needs of this package: devices, compilers, and steps on one device."""

import importlib.metadata
import importlib.util
import shutil

import numpy as np
import torch

from halfstep.hyperparameters import Arguments
from halfstep_torch.engine.compiled_stage import is_at_hand
from halfstep_torch.engine.inductor import find_cxx, missing_options
from halfstep_torch.engine.kernel_store import folder
from halfstep_torch.rules.adam import AdamW

MODES = ("eager", "torch.compile")
"""In which ways steps are taken."""


def about() -> list[str]:
    """Return a line for each device and each compiler."""
    names = [f"device {i}: cuda, {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    cxx = find_cxx()
    lines = [*(names or ["device: cpu"]), f"C++ compiler: {shutil.which(cxx) if cxx else 'none found'}"]
    triton = importlib.util.find_spec("triton") is not None
    lines.append(f"Triton: {importlib.metadata.version('triton') if triton else 'none found'}")
    lacking = [name for device in devices() for name in missing_options(torch.device(device))]
    return [*lines, *(f"this torch lacks the option {name}: steps on a GPU stay eager" for name in lacking)]


def devices() -> list[str]:
    """Return the device types whose bits are promised."""
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
        compile=mode != "eager",
        **hyperparameters,
        **recipe,
    )
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient).to(device, torch.bfloat16)  # exact
        optimizer.step()
    return parameter.detach().cpu().view(torch.int16).numpy().view(np.uint16)


def warm(recipe: Arguments) -> str:
    """Compile AdamW's step of bfloat16 weights on a CPU; return in words what was stored."""
    parameter = torch.nn.Parameter(torch.zeros(256, 256, dtype=torch.bfloat16))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = AdamW([("weight", parameter)], compile=True, **recipe)
    optimizer.step()
    if not all(map(is_at_hand, optimizer._launches[None].batches)):
        return f"{torch.get_num_threads()} threads, in torch.compile's cache"
    return (
        f"stored in {folder()}: there steps are compiled from the first one on, in processes of "
        f"{torch.get_num_threads()} threads on this kind of processor"
    )
