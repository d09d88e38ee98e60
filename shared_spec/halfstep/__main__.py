"""Print the installed versions, and whether steps on this machine give the bits of the contract.

python -m halfstep
python -m halfstep --compiled
python -m halfstep --version
python -m halfstep memory --params 8e9 --recipe one_pass
python -m halfstep warm one_pass eight_bit
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from halfstep import newest, recipes
from halfstep.checkpoint.header import SPEC_VERSION
from halfstep.hyperparameters import Arguments
from halfstep.memory import RECIPES, bytes_per_weight, count_of, memory_table
from halfstep.version import __version__

T = TypeVar("T")
_MACHINES = {"jax": "halfstep_jax.report.machine", "torch": "halfstep_torch.report.machine"}
_DISTRIBUTIONS = {"jax": ("jax", "jaxlib", "optax"), "torch": ("torch",), "": ("numpy", "ml_dtypes")}
# Enough elements for block scales, in blocks that the last axis does not divide.
_SHAPE, _STEPS, _LEAF = (50, 100), 10, "layer/kernel"
_HYPERPARAMETERS = {"learning_rate": 1e-3, "weight_decay": 0.1, "seed": 7}


class Machine(Protocol):
    """The interface of each package's module `machine`.

    Attributes:
        MODES: the ways in which steps can run.
    """

    MODES: Sequence[str]

    def about(self) -> list[str]:
        """Return a line for each device and each compiler."""
        ...

    def devices(self) -> list[str]:
        """Return a name for each kind of device."""
        ...

    def final_weights(
        self,
        recipe: Arguments,
        question: tuple[np.ndarray, np.ndarray],
        leaf: str,
        device: str,
        mode: str,
        **hyperparameters: float,
    ) -> np.ndarray:
        """Return the patterns of the weights after several AdamW steps.

        Args:
            recipe: arguments for the optimizer.
            question: patterns of bfloat16 weights, and a gradient for each step.
            leaf: name of the weights, with "/" between its parts.
            device: one of `devices()`.
            mode: one of `MODES`.
            hyperparameters: further arguments, by JAX's names.
        """
        ...


def question() -> tuple[np.ndarray, np.ndarray]:
    """Return bfloat16 weights as bits, and for each step a float32 gradient that is exact in bfloat16."""
    words = np.random.PCG64(0).random_raw((_STEPS + 1) * _SHAPE[0] * _SHAPE[1])
    values = (words >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
    bits = values.reshape(_STEPS + 1, *_SHAPE).view(np.uint32) & np.uint32(0xFFFF0000)
    # A power of two apart, so that moments rise and fall.
    scales = np.exp2(-np.arange(_STEPS, dtype=np.float32)).reshape(-1, 1, 1)
    return (bits[0] >> np.uint32(16)).astype(np.uint16), bits[1:].view(np.float32) * scales


def due(recipe: Arguments) -> np.ndarray:
    """Return the reference's final weights as bits."""
    # Imported by name, because only this command uses the reference.
    spec = importlib.import_module("halfstep_spec")
    options = dict(recipe)
    storage = options.pop("param_storage", "stochastic")
    formats = {
        name: value if isinstance(value, str) else spec.Format(**dataclasses.asdict(value))
        for name, value in options.items()
    }
    rule = spec.ScaleByAdam(seed=_HYPERPARAMETERS["seed"], **formats)
    step = spec.Step(rule, _HYPERPARAMETERS["weight_decay"], param_storage=storage)
    weights, gradients = question()
    state = step.init(weights)
    for gradient in gradients:
        rate = np.float32(_HYPERPARAMETERS["learning_rate"])
        weights, state = step.step(weights, gradient, state, _LEAF, rate)
    return weights


def verdict(machine: Machine, device: str, mode: str) -> tuple[bool, str]:
    """Take steps with every recipe in one mode on one device, and return whether all bits are right."""
    start, wrong = time.perf_counter(), []
    for name in RECIPES:
        recipe = getattr(recipes, name)
        given = machine.final_weights(recipe, question(), _LEAF, device, mode, **_HYPERPARAMETERS)
        different = int((given != due(recipe)).sum())
        if different:
            wrong.append(f"{name} ({different} weights)")
    seconds = f"{time.perf_counter() - start:.1f} s"
    what = f"{_STEPS} steps of AdamW on {np.prod(_SHAPE)} weights, {len(RECIPES)} recipes, {seconds}"
    if wrong:
        return False, f"bits that differ from the reference: {', '.join(wrong)} ({what})"
    return True, f"every bit is the bit of the reference ({what})"


def versions(framework: str) -> str:
    """Return the versions of a framework's packages, or "" if one is missing."""
    pairs = ((name, _version(name)) for name in _DISTRIBUTIONS[framework])
    return ", ".join(f"{name} {version}" for name, version in pairs)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def _word(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser for one argument, with errors that the command line prints."""

    def read_or_say(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix("memory: ")) from None

    return read_or_say


def _recipe(name: str) -> str:
    bytes_per_weight(name)
    return name


def warm(names: Sequence[str]) -> int:
    """Compile kernels for the named recipes, or for all, ahead of time for images and clusters.

    The folder of kernels is printed for each device. On the same kind of processor or GPU, a process that
    finds the folder runs kernels from its first step.
    """
    machine = importlib.import_module(_MACHINES["torch"])
    for name in names or RECIPES:
        start = time.perf_counter()
        kept = "; ".join(machine.warm(getattr(recipes, name)))
        print(f"{name}: {time.perf_counter() - start:.1f} s; {kept}", flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status, which is 1 if a bit differs."""
    parser = argparse.ArgumentParser(
        prog="python -m halfstep", description="Print what is installed, and try it."
    )
    parser.add_argument("--version", action="version", version=f"halfstep {__version__}")
    commands = parser.add_subparsers(dest="command")
    memory = commands.add_parser("memory", help="print what a model of a size takes, by recipe")
    memory.add_argument("--params", type=_word(count_of), required=True, help="weights, such as 8e9 or 8B")
    memory.add_argument("--recipe", type=_word(_recipe), help="one alone; all without it")
    warming = commands.add_parser("warm", help="compile and store the steps of AdamW in PyTorch, by recipe")
    warming.add_argument("recipes", nargs="*", type=_word(_recipe), help="all without any")
    given = parser.parse_args(argv)
    if given.command == "memory":
        print(memory_table(given.params, given.recipe or ""))
        return 0
    if given.command == "warm":
        return warm(given.recipes)
    print(f"halfstep {__version__}, contract version {SPEC_VERSION}")
    print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, ", end="")
    print(f"{os.cpu_count()} processors; {versions('')}")
    right = True
    for framework, module in _MACHINES.items():
        if importlib.util.find_spec(framework) is None:
            print(f"\n{framework} is not installed")
            continue
        machine: Any = importlib.import_module(module)  # a Machine, which no checker sees of a module
        print(f"\n{versions(framework)}")
        notes = [newest.note(framework, _version(framework))]
        print("\n".join(f"  {line}" for line in (*filter(None, notes), *machine.about())), flush=True)
        for device in machine.devices():
            for mode in machine.MODES:
                same, words = verdict(machine, device, mode)
                print(f"  {device}, {mode}: {words}", flush=True)
                right &= same
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
