"""What must not interfere with a step: autograd, Dynamo, `torch.autocast`, other threads, signals."""

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
# Without the wrapper that makes an enum of each, and takes longer than all the rest.
_handler_of = getattr(signal, "_signal", signal).getsignal


def undisturbed(step: Callable[..., None]) -> Callable[..., None]:
    """Keep `torch.autocast` and other threads out of a step.

    Threads that share an optimizer take their steps one after the other.
    """

    @functools.wraps(step)
    def run(self: Any, *args: Any, **options: Any) -> None:  # an optimizer, and what its step takes
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
    """Return the optimizer inside a wrapper, as that of accelerate or Lightning; anything else as it is."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def call_untraced(step: Callable[[], _Returned]) -> _Returned:
    """Call a step without autograd and outside of Dynamo."""
    grad_mode = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(False)
        # Inside a compiled training step this is a graph break: Dynamo must not trace NumPy on the host. To
        # disable it imports it, which takes seconds, and nobody traces before it is imported.
        untraced = torch.compiler.disable(step) if "torch._dynamo" in sys.modules else step
        return untraced()  # pyright: ignore
    finally:
        # Twice: the handler of a signal may raise in the first. `torch.no_grad` would leave them off.
        try:
            torch.set_grad_enabled(grad_mode)
        finally:
            torch.set_grad_enabled(grad_mode)


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph, in which nothing may wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class SignalsWait:
    """A context that delays signals to its end; a second signal of one kind is handled at once.

    Python runs handlers between any two of its instructions, in the main thread alone. The handler of SIGINT
    raises KeyboardInterrupt there: between two arrays of a parameter, or between its weights and its count.
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
            except BaseException:  # raised by the handler of a signal that comes before it is told to wait
                self.__exit__()
                raise

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if self._over or number in self._came:
            self._handlers[number](number, frame)
        else:
            self._came[number] = frame

    def __exit__(self, *_: object) -> None:
        self._over = True  # whatever happens from here on, the handlers run
        try:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        finally:
            if self._came:
                self._handle_kept()

    def _handle_kept(self) -> None:
        """Run the handlers of delayed signals, oldest first; all of them, even if one raises."""
        number = next(iter(self._came))
        frame = self._came.pop(number)
        try:
            self._handlers[number](number, frame)
        finally:
            if self._came:
                self._handle_kept()
