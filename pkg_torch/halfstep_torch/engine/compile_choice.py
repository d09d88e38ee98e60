"""Whether steps run compiled: by the user's choice, the cost of eager steps, and what can compile."""

import collections
import platform
import sys
import warnings
from collections.abc import Callable

import torch

from halfstep.newest import say_if_newer
from halfstep_torch.engine.inductor import find_cxx, missing_options
from halfstep_torch.engine.signals import SignalsWait
from halfstep_torch.say_once import say_once

# Weights stepped eagerly on a CPU, counted anew in every step, that take about as long as compiling: 10 to 15
# seconds. So no run, however long or short, takes over twice the time of the better choice.
_COST_OF_COMPILING = 300_000_000
# Devices whose compiled programs were read, or run against the contract's vectors.
_PROVED = ("cpu", "cuda")
# Systems on which compiled programs for a CPU were run.
_PROVED_CPUS = [("linux", "x86_64")]


class CompileChoice:
    """The choice whether steps run compiled.

    Attributes:
        choice: True, False or "auto". It becomes False where "auto" tried and torch.compile failed.
        stepped: of each type of device, how many weights "auto" was asked for, counted anew in every step.
    """

    def __init__(self, caller: str, choice: bool | str) -> None:
        if choice not in (True, False, "auto"):
            raise ValueError(f'{caller}: compile={choice!r} is not a valid value. Use True, False or "auto".')
        self.choice = choice
        self.stepped: collections.Counter[str] = collections.Counter()

    def check(self, caller: str, device: torch.device) -> None:
        """Raise RuntimeError if compilation is demanded on a CPU without a compiler."""
        if self.choice is True and device.type == "cpu" and not find_cxx():
            raise RuntimeError(
                f"{caller}: compile=True, but no C++ compiler is found. "
                "Install g++ (or name one in CXX), or use compile=False: the bits are the same."
            )

    def _wanted(
        self, device: torch.device, elements: int, at_hand: Callable[[], bool] = lambda: False
    ) -> bool:
        """Return whether a step of `elements` on `device` should be compiled."""
        if self.choice != "auto":
            return bool(self.choice)
        if device.type != "cpu":
            return device.type == "cuda"
        self.stepped[device.type] += elements
        if device.type == "cpu" and at_hand():
            return True
        return self.stepped[device.type] >= _COST_OF_COMPILING and find_cxx() is not None

    def is_due(self, device: torch.device, elements: int) -> bool:
        """Count an eager step of `elements`; return whether it was the last before compiling."""
        return self.choice == "auto" and self._wanted(device, elements)

    def prepare(
        self,
        caller: str,
        device: torch.device,
        elements: int,
        make: Callable[[], object],
        at_hand: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Compile by `make` if a step of `elements` should be compiled; return whether steps run compiled.

        "auto" compiles at once what is `at_hand`: stored kernels are loaded, in no time.
        """
        if not self._wanted(device, elements, at_hand):
            return False
        if why := _unproved(device):
            if self.choice == "auto":
                self.choice = False
                warnings.warn(
                    f"{caller}: {why}, so steps run in eager mode: slower, with the contract's bits. "
                    "Use a newer torch; or compile=False, which silences this.",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return False
            warnings.warn(
                f"{caller}: compile=True on {device.type}: {why}, so the contract's bits are not promised "
                "(C6). Use compile=False, which rounds correctly.",
                RuntimeWarning,
                stacklevel=2,
            )
        system = sys.platform, platform.machine()
        if device.type == "cpu" and system not in _PROVED_CPUS:
            say_once(
                f"{caller}: compiled steps on a CPU were held against the contract's vectors on Linux and "
                f"x86-64, and never on {' and '.join(system)}. compile=False steps without a compiler."
            )
        say_if_newer("torch", torch.__version__)
        # Else an error that a handler raises would count as one of torch.compile.
        with SignalsWait():
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


def _unproved(device: torch.device) -> str:
    """Return why compiled steps may differ from the contract on a device; "" if they do not."""
    if device.type not in _PROVED:
        return "no compiled step was ever read there"
    if missing := missing_options(device):
        return f"torch {torch.__version__} has no option {missing[0]} of Inductor"
    return ""
