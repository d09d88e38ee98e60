"""The choice between kernels and plain steps, and the compilers found."""

from collections.abc import Callable
from typing import TypeVar

import torch

from halfstep.kernels.build import find_cc
from halfstep_torch.engine.kernels.kernel import Kernel
from halfstep_torch.engine.kernels.triton_kernel import triton_version
from halfstep_torch.say_once import say_once

K = TypeVar("K", bound=Kernel)


class CompileChoice:
    """The choice between kernels and plain steps.

    Attributes:
        choice: True waits for the compiler and raises if there is no kernel. "auto" uses a kernel as soon
            as it is built, and plain steps until then. False uses plain steps.
    """

    def __init__(self, caller: str, choice: bool | str) -> None:
        if choice not in (True, False, "auto"):
            raise ValueError(f'{caller}: compile={choice!r} is not a valid value. Use True, False or "auto".')
        self.choice = choice

    def check(self, caller: str, device: torch.device) -> None:
        """Raise RuntimeError if kernels are demanded on a CPU or a GPU and there is no compiler."""
        if self.choice is True and device.type in ("cpu", "cuda"):
            self.wants(caller, device)

    def wants(self, caller: str, device: torch.device) -> bool:
        """Return whether steps on a device use kernels.

        Raises:
            RuntimeError: if kernels are demanded and there is no compiler.
        """
        if self.choice is False:
            return False
        problem = _problem_of(device)
        if problem and self.choice is True:
            raise RuntimeError(
                f"{caller}: compile=True, but {problem}, or use compile=False: the bits are the same."
            )
        if problem:
            say_once(f"{caller}: plain steps, which have the same bits and are slower: {problem}.")
        return not problem

    def ready(self, device: torch.device, make: Callable[[], K]) -> K | None:
        """Return a kernel as soon as it is built, if the device has a compiler. It never raises."""
        if self.choice is False or _problem_of(device):
            return None
        kernel = make()
        return kernel if kernel.is_ready(wait=self.choice is True) else None

    def has(self, caller: str, kernel: Kernel) -> bool:
        """Return whether a kernel can be called now.

        Raises:
            RuntimeError: if kernels are demanded and this one cannot be built. A stage with an operation
                without a generated form runs in plain torch.
        """
        if kernel.is_ready(wait=self.choice is True):
            return True
        if kernel.problem and self.choice is True and not kernel.missing:
            raise RuntimeError(
                f"{caller}: compile=True, but {kernel.problem}. Use compile=False: the bits are the same."
            )
        if kernel.problem:
            say_once(f"{caller}: plain steps, which have the same bits and are slower: {kernel.problem}.")
        return False


def _problem_of(device: torch.device) -> str:
    """Return why there is no compiler for a device, with the remedy, or "" if there is one."""
    if device.type == "cpu":
        return "" if find_cc() else "no C compiler is found. Install gcc or clang, or name one in CC"
    if device.type == "cuda":
        return "" if triton_version() else "Triton is not installed. Install the package triton"
    return f"there are no kernels for devices of type {device.type}"
