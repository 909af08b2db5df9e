"""The second pair of eyes: a thread that heeds signals, the stop marker and the engine's deadlines."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable

from airflow_batchinfer.errors import BatchInferError, ExitCode
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.stop import read_stop
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store
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
        store: Store,
        layout: RunLayout,
        spec: JobSpec,
        control: Control,
        signals: SignalPipe,
        give_up: Callable[[str], None],
    ) -> None:
        """Set up; `start` begins.

        Args:
            store: where the stop marker would be.
            layout: the run's keys.
            spec: the job.
            control: where orders go.
            signals: where signals come from.
            give_up: ends the process; called when even a killed engine holds the loop.
        """
        self._store = store
        self._folder = layout.folder
        self._checkpoint = spec.checkpoint
        self._control = control
        self._signals = signals
        self._give_up = give_up
        self._on_tick: Callable[[], None] = lambda: None
        self._engine: GuardedEngine | None = None
        self._signalled = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self, engine: GuardedEngine, on_tick: Callable[[], None]) -> None:
        """Begin.

        Args:
            engine: the engine to inspect.
            on_tick: called every `progress_seconds`, to write progress.
        """
        self._engine, self._on_tick = engine, on_tick
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def stop_marker_exists(self) -> bool:
        """Look for the stop marker, and give the order if it is there."""
        try:
            stop = read_stop(self._store, self._folder)
        except BatchInferError as error:
            log.warning("cannot look for the stop marker: %s", error)
            return False
        if stop is not None:
            self._control.leave(ExitCode.STOPPED, stop.advice(self._folder), self._checkpoint.grace_seconds)
        return stop is not None

    def _watch(self) -> None:
        due = time.monotonic() + self._checkpoint.progress_seconds
        while not self._closed.is_set():
            tick = min(_TICK_SECONDS, max(0.0, due - time.monotonic()))
            if select.select([self._signals], [], [], tick)[0]:
                self._heed()
            self._inspect()
            if time.monotonic() >= due:
                due = time.monotonic() + self._checkpoint.progress_seconds
                if not self._control.leaving:
                    self.stop_marker_exists()
                self._on_tick()

    def _heed(self) -> None:
        for received in self._signals.received():
            grace = 0.0 if self._signalled else self._checkpoint.grace_seconds
            self._signalled = True
            log.warning("%s: leaving within %.1f s", received.name, grace)
            self._control.leave(ExitCode.RECLAIMED, f"told to leave by {received.name}", grace)

    def _inspect(self) -> None:
        engine, control = self._engine, self._control
        assert engine is not None
        if control.leaving:
            engine.kill("the worker has to leave", only_starting=True)
        if control.overdue_seconds > _ABORT_SECONDS:
            engine.kill("the worker has to leave, and the engine does not answer")
        if (why := engine.inspect()) is not None:
            self._give_up(why)
