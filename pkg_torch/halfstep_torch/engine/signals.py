"""Signals that come while weights change: their handlers run when the step is whole."""

import signal
import threading
from typing import Any

_ALL = sorted(signal.valid_signals())
# Without the wrapper that makes an enum of each, and takes longer than all the rest.
_handler_of = getattr(signal, "_signal", signal).getsignal


class SignalsWait:
    """A context that lets signals wait until its end; a second one of a kind is handled at once.

    Python runs handlers between any two of its instructions, in the main thread alone. The handler of SIGINT
    raises KeyboardInterrupt there: between two arrays of a parameter, or between its weights and its count.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: dict[int, Any] = {}
        self._over = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            found = zip(_ALL, map(_handler_of, _ALL), strict=True)
            self._handlers = {number: handler for number, handler in found if callable(handler)}
            try:
                for number in self._handlers:
                    signal.signal(number, self._keep)
            except BaseException:  # raised by the handler of a signal that comes before it is told to wait
                self.__exit__()
                raise

    def _keep(self, number: int, frame: Any) -> None:
        if self._over or number in self._came:
            self._handlers[number](number, frame)
        else:
            self._came[number] = frame

    def __exit__(self, *_: Any) -> None:
        self._over = True  # whatever happens from here on, the handlers run
        try:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        finally:
            if self._came:
                self._handle_kept()

    def _handle_kept(self) -> None:
        """Run the handlers of the signals that came, oldest first: each, also where one raises."""
        number = next(iter(self._came))
        frame = self._came.pop(number)
        try:
            self._handlers[number](number, frame)
        finally:
            if self._came:
                self._handle_kept()
