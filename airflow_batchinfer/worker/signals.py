"""Signals: noticed at once, whatever the main thread is doing, and turned into orders elsewhere."""

from __future__ import annotations

import os
import signal
from types import FrameType

HEEDED = (signal.SIGTERM, signal.SIGINT)
"""Signals that tell the worker to leave."""


class SignalPipe:
    """Signals as bytes in a pipe, for another thread to wait on.

    Python runs a handler only between two steps of the main thread, which may be deep in an engine's
    own code. The interpreter writes to this pipe from within the signal itself.
    """

    def __init__(self) -> None:
        """Take over the signals; from the main thread only."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in HEEDED:
            signal.signal(number, _noticed)

    def fileno(self) -> int:
        """The end to wait on."""
        return self._read

    def received(self) -> list[signal.Signals]:
        """Heeded signals since the last call."""
        try:
            data = os.read(self._read, 512)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in data if number in HEEDED]


def _noticed(number: int, frame: FrameType | None) -> None:
    """Do nothing: the byte in the pipe says it all."""
