"""The second pair of eyes: a thread that heeds signals and the engine's deadlines.

It waits for nothing but its own clock: no store, and no engine but for a second before it kills one.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable

from airflow_batchinfer.errors import ExitCode
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.worker.control import Control
from airflow_batchinfer.worker.guard import GuardedEngine
from airflow_batchinfer.worker.signals import SignalPipe

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_ABORT_SECONDS = 5.0
"""An engine that does not abort what is in flight for so long is killed."""


class Watchdog:
    """Watches over one worker until it is closed."""

    def __init__(
        self,
        spec: JobSpec,
        control: Control,
        engine: GuardedEngine,
        signals: SignalPipe,
        give_up: Callable[[str], None],
    ) -> None:
        """Set up; `start` begins.

        Args:
            spec: the job.
            control: where orders go.
            engine: the engine to inspect.
            signals: where signals come from.
            give_up: ends the process; called when even a killed engine holds the loop.
        """
        self._grace_seconds = spec.checkpoint.grace_seconds
        self._control = control
        self._engine = engine
        self._signals = signals
        self._give_up = give_up
        self._signalled = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.is_set():
            if select.select([self._signals], [], [], _TICK_SECONDS)[0]:
                self._heed()
            self._inspect()

    def _heed(self) -> None:
        for received in self._signals.received():
            grace = 0.0 if self._signalled else self._grace_seconds
            self._signalled = True
            log.warning("%s: leaving within %.1f s", received.name, grace)
            self._control.leave(ExitCode.RECLAIMED, f"told to leave by {received.name}", grace)

    def _inspect(self) -> None:
        engine, control = self._engine, self._control
        if control.leaving:
            engine.kill("the worker has to leave", only_starting=True)
        if control.overdue_seconds > _ABORT_SECONDS:
            engine.kill("the worker has to leave, and the engine does not answer")
        if (why := engine.inspect()) is not None:
            self._give_up(why)
