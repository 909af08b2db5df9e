"""What passes between the store and a worker at work: the stop marker in, progress out.

In a thread of its own, as a store may keep a caller waiting for minutes, and neither the engine nor a signal
may wait for that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from airflow_batchinfer.errors import BatchInferError, ExitCode
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.stop import read_stop
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store
from airflow_batchinfer.worker.control import Control

log = logging.getLogger(__name__)


class Reporter:
    """Looks for the stop marker and writes progress, every `checkpoint.progress_seconds` until closed."""

    def __init__(
        self,
        store: Store,
        layout: RunLayout,
        spec: JobSpec,
        control: Control,
        write_progress: Callable[[], None],
    ) -> None:
        """Set up; `start` begins.

        Args:
            store: where the stop marker would be.
            layout: the run's keys.
            spec: the job.
            control: where the order to leave goes.
            write_progress: writes the progress as it is.
        """
        self._store = store
        self._folder = layout.folder
        self._checkpoint = spec.checkpoint
        self._control = control
        self._write_progress = write_progress
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; what it is writing is written first."""
        self._closed.set()
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

    def _run(self) -> None:
        while not self._closed.wait(self._checkpoint.progress_seconds):
            try:
                if not self._control.leaving:
                    self.stop_marker_exists()
                self._write_progress()
            except Exception:  # no report is worth the work it reports on; the next one may go through
                log.exception("the reporter failed")
