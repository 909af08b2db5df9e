"""What the worker was told from outside: to leave, and how soon. Written by one thread, read by another."""

from __future__ import annotations

import threading
import time

from airflow_batchinfer.errors import ExitCode


class Control:
    """Orders from outside. The first reason to leave stands; a later deadline never replaces an earlier."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reason: ExitCode | None = None
        """`RECLAIMED` or `STOPPED` once the worker has to leave."""
        self.message = ""
        self._deadline = float("inf")

    @property
    def leaving(self) -> bool:
        """Whether no new row may enter the engine."""
        return self.reason is not None

    @property
    def overdue(self) -> bool:
        """Whether what is still in the engine has to be aborted."""
        return time.monotonic() >= self._deadline

    @property
    def overdue_seconds(self) -> float:
        """Seconds since the deadline passed; negative before."""
        return time.monotonic() - self._deadline

    def leave(self, reason: ExitCode, message: str, within: float) -> None:
        """Leave, and let rows in flight finish for `within` seconds."""
        with self._lock:
            if self.reason is None:
                self.reason, self.message = reason, message
            self._deadline = min(self._deadline, time.monotonic() + within)
