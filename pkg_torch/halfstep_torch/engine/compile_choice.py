"""Whether steps run compiled: what the user chose, and whether there is a compiler."""

import os
import shutil
import sys
import warnings
from collections.abc import Callable

import torch

# Elements from which half a minute of compilation pays on a CPU.
_WORTH_COMPILING = 1_000_000
# Devices whose compiled programs are held to the contract.
_PROVED = ("cpu", "cuda")


def find_cxx() -> str | None:
    """Return the C++ compiler that Inductor will use on CPU, or None if there is none."""
    default = "clang++" if sys.platform == "darwin" else "cl" if sys.platform == "win32" else "g++"
    cxx = os.environ.get("CXX", default)
    return cxx if shutil.which(cxx) else None


class CompileChoice:
    """The choice whether steps run compiled.

    Attributes:
        choice: True, False or "auto". It becomes False where "auto" tried and torch.compile failed.
    """

    def __init__(self, caller: str, choice: bool | str) -> None:
        if choice not in (True, False, "auto"):
            raise ValueError(f'{caller}: compile={choice!r} is not a valid value. Use True, False or "auto".')
        self.choice = choice

    def check(self, caller: str, device: torch.device) -> None:
        """Raise RuntimeError if compilation is demanded on a CPU without a compiler."""
        if self.choice is True and device.type == "cpu" and not find_cxx():
            raise RuntimeError(
                f"{caller}: compile=True, but no C++ compiler is found. "
                "Install g++ (or name one in CXX), or use compile=False: the bits are the same."
            )

    def wanted(self, device: torch.device, elements: int) -> bool:
        """Return whether steps on `device`, where parameters have that many elements, are to be compiled."""
        if self.choice != "auto":
            return bool(self.choice)
        if device.type != "cpu":
            return device.type == "cuda"
        return elements >= _WORTH_COMPILING and find_cxx() is not None

    def prepare(self, caller: str, device: torch.device, elements: int, make: Callable[[], object]) -> bool:
        """Compile if that is wanted, and return whether steps run compiled.

        Args:
            caller: for messages.
            device: of the parameters.
            elements: of all parameters on it.
            make: compiles the kernels.

        Raises:
            RuntimeError: if compilation is demanded and fails.
        """
        if not self.wanted(device, elements):
            return False
        if device.type not in _PROVED:
            warnings.warn(
                f"{caller}: compile=True on {device.type}, for which no compiled step was ever read: the "
                "contract's bits are not promised (C6). Use compile=False, which rounds correctly.",
                RuntimeWarning,
                stacklevel=2,
            )
        try:
            make()
        except Exception as error:
            if self.choice is True:
                raise RuntimeError(
                    f"{caller}: torch.compile failed ({type(error).__name__}). "
                    "Use compile=False: the bits are the same."
                ) from error
            self.choice = False
            warnings.warn(
                f"{caller}: torch.compile failed, steps run in eager mode: slower, with the same bits. "
                f"Use compile=False to silence this. ({type(error).__name__}: {error})",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        return True
