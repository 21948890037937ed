"""Signals that end the command: what is at work is told, saves and ends first."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STANDARD = (1, 2)


class Ended(KeyboardInterrupt):
    """A signal ends the command.

    Attributes:
        signal: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


class EndingSignals:
    """SIGINT, SIGTERM and SIGHUP while it is entered: the first of them raises `Ended`, or is waited for.

    A signal that is ignored already stays so: `nohup` does that.

    Attributes:
        received: the signals so far, in their order.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._awaited = False
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> "EndingSignals":
        if threading.current_thread() is threading.main_thread():
            self._terminals = [descriptor for descriptor in _STANDARD if os.isatty(descriptor)]
            handled = [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    @property
    def came(self) -> bool:
        """Whether a signal has come."""
        return bool(self.received)

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Inside, signals are noted and raise nothing: whoever has started processes asks for them, often."""
        self._awaited = True
        try:
            yield
        finally:
            self._awaited = False

    def check(self) -> None:
        """End the command if a signal has come.

        Raises:
            Ended: one has.
        """
        if self.received:
            raise Ended(self.received[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            # The terminal has gone: what is printed would raise an error.
            self._silence()
        self.received.append(number)
        if not self._awaited:
            raise Ended(self.received[0])

    def _silence(self) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:
            os.dup2(nothing, descriptor)
        os.close(nothing)


@contextlib.contextmanager
def hangup_blocked() -> Iterator[None]:
    """Processes that are started inside get no SIGHUP, which a terminal that closes sends to all of them at once.

    A training would die of it; this process hears it and lets them save.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
