"""Protection of a step from autograd, Dynamo, `torch.autocast`, other threads and signals."""

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")
_ALL = sorted(signal.valid_signals())
# Without the wrapper, which converts each result to an enum and is slow.
_handler_of = getattr(signal, "_signal", signal).getsignal


def undisturbed(step: Callable[..., None]) -> Callable[..., None]:
    """Keep `torch.autocast` and other threads out of a step.

    Threads that share an optimizer step one after another.
    """

    @functools.wraps(step)
    def run(self: Any, *args: Any, **options: Any) -> None:  # an optimizer, and the arguments of its step
        with self._lock:
            enabled = [*filter(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps"))]
            if not enabled:
                step(self, *args, **options)
                return
            with contextlib.ExitStack() as blocks:
                for device_type in enabled:
                    blocks.enter_context(torch.autocast(device_type, enabled=False))
                step(self, *args, **options)

    return run


def between_steps(call: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Keep steps of other threads out of a call that reads or sets weights or state of its optimizers."""

    @functools.wraps(call)
    def run(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Returned:
        with contextlib.ExitStack() as held:
            for lock in _locks((*args, *options.values())):
                held.enter_context(lock)
            return call(*args, **options)

    return run


def _locks(arguments: Iterable[object]) -> Iterator[Any]:  # of optimizers, also inside wrappers
    for x in arguments:
        x = unwrapped(x)
        if isinstance(x, torch.optim.Optimizer) and hasattr(x, "_lock"):
            yield getattr(x, "_lock", None)


def unwrapped(optimizer: object) -> object:
    """Return the optimizer inside a wrapper of accelerate or Lightning, or another object unchanged."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def call_untraced(step: Callable[[], _Returned]) -> _Returned:
    """Call a step without autograd and outside of Dynamo."""
    grad_mode = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(False)
        # This is a graph break in a compiled training step, because Dynamo must not trace NumPy on the host.
        # Disabling Dynamo imports it, which takes seconds, and nothing is traced before the import.
        untraced = torch.compiler.disable(step) if "torch._dynamo" in sys.modules else step
        return untraced()  # pyright: ignore
    finally:
        # Twice, because a signal handler may raise in the first. `torch.no_grad` would leave gradients off.
        try:
            torch.set_grad_enabled(grad_mode)
        finally:
            torch.set_grad_enabled(grad_mode)


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph, which must not wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class SignalsWait:
    """A context that delays signals to its end. A second signal of the same kind is handled at once.

    Python runs handlers between any two instructions, only in the main thread. So the SIGINT handler may
    raise KeyboardInterrupt between two arrays of a parameter, or between its weights and its count.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: dict[int, FrameType | None] = {}
        self._over = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in zip(_ALL, map(_handler_of, _ALL), strict=True):
                if callable(handler):
                    self._handlers[number] = handler
            try:
                for number in self._handlers:
                    signal.signal(number, self._keep)
            except BaseException:  # raised by a signal handler before it is delayed
                self.__exit__()
                raise

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if self._over or number in self._came:
            self._handlers[number](number, frame)
        else:
            self._came[number] = frame

    def __exit__(self, *_: object) -> None:
        self._over = True  # from here on handlers run at once
        try:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        finally:
            if self._came:
                self._handle_kept()

    def _handle_kept(self) -> None:
        """Run the handlers of all delayed signals, oldest first, even if one raises."""
        number = next(iter(self._came))
        frame = self._came.pop(number)
        try:
            self._handlers[number](number, frame)
        finally:
            if self._came:
                self._handle_kept()
