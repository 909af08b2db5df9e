"""What passes between the store and a worker at work: reasons to leave in, progress out.

In a thread of its own, as a store may keep a caller waiting for minutes, and neither the engine nor a signal
may wait for that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from airflow_batchinfer.errors import ExitCode, StoreError
from airflow_batchinfer.run.integrity import sound_commit
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.progress import silent_after
from airflow_batchinfer.run.stop import read_stop
from airflow_batchinfer.store import Store
from airflow_batchinfer.worker.control import Control
from airflow_batchinfer.worker.suspension import Suspensions, boot_seconds
from airflow_batchinfer.worker.work import ShardRun

log = logging.getLogger(__name__)

_FAILED_SECONDS = 5.0
"""Longest wait after a look that has failed."""

_FAILED_LOOKS = 10
"""So many in a row, and the store counts as lost."""


class Reporter:
    """Looks for reasons to leave and writes progress, every `checkpoint.progress_seconds` until closed."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        shards: Sequence[ShardRun],
        control: Control,
        write_progress: Callable[[], None],
    ) -> None:
        """Set up; `start` begins.

        Args:
            store: where stop marker and commits would be.
            plan: the run's plan.
            shards: all shard runs of the worker.
            control: where the order to leave goes.
            write_progress: writes the progress as it is.
        """
        self._store = store
        self._plan = plan
        self._layout = RunLayout(plan.folder)
        self._shards = shards
        self._checkpoint = plan.spec.checkpoint
        self._control = control
        self._write_progress = write_progress
        self._suspensions = Suspensions()
        self._doubted_at = boot_seconds()
        self._looked = (self._doubted_at, self._doubted_at)
        """When the last look that went well began, and when it was over."""
        self._failed_looks = 0
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._suspensions.start()
        self._thread.start()

    def close(self) -> None:
        """End the thread; what it is writing is written first."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        self._suspensions.close()

    def look(self) -> None:
        """Look for a stop marker and for commits of other attempts, and give the order if there is one."""
        began = boot_seconds()
        try:
            stop = read_stop(self._store, self._plan.folder)
            for shard in self._shards:
                self._look_for_commit(shard)
        except Exception as error:  # of whatever kind: nothing is known, and that may not go on for ever
            self._failed_looks += 1
            log.warning("cannot look for a reason to leave: %s: %s", type(error).__name__, error)
            return
        self._failed_looks, self._looked = 0, (began, boot_seconds())
        if stop is not None:
            advice = stop.advice(self._plan.folder)
            self._control.leave(ExitCode.STOPPED, advice, self._checkpoint.grace_seconds)

    def up_to_date(self) -> bool:
        """Whether the last look is young enough for rows to be sent.

        A worker that was suspended, or cut off from the store, may have been replaced: its rows may be
        durable and committed by now. After a suspension only a look that began later counts, and no look
        counts for longer than others take to give a worker up. That is from its end: a store that is slow
        to answer is no store that is cut off.

        Raises:
            StoreError: one look after another has failed.
        """
        doubted_at = self._suspensions.over_at
        if doubted_at > self._doubted_at:
            self._doubted_at = doubted_at
            self._wake.set()
        began, finished = self._looked
        patience = silent_after(self._checkpoint.progress_seconds)
        if began >= doubted_at and finished >= boot_seconds() - patience:
            return True
        if self._failed_looks >= _FAILED_LOOKS:
            raise StoreError(f"{self._store.uri} cannot be read, so nothing is known of other attempts")
        return False

    def _look_for_commit(self, shard: ShardRun) -> None:
        """Leave if another attempt has committed a shard: it is at work on whatever this one has left."""
        if not shard.started or shard.committed:  # a shard that is not begun takes over all that is durable
            return
        commit = sound_commit(self._store, self._layout, shard.shard, self._plan.fingerprint)
        if commit is not None and commit.epoch != shard.epoch:
            shard.overtaken = True
            message = f"attempt {commit.epoch} has committed shard {shard.shard:04d}"
            log.warning("%s: leaving", message)
            self._control.leave(ExitCode.RECLAIMED, message, 0.0)

    def _run(self) -> None:
        while True:
            seconds = self._checkpoint.progress_seconds
            self._wake.wait(min(seconds, _FAILED_SECONDS) if self._failed_looks else seconds)
            self._wake.clear()
            if self._closed:
                return
            try:
                if not self._control.leaving:
                    self.look()
                self._write_progress()
            except Exception:  # no report is worth the work it reports on; the next one may go through
                log.exception("the reporter failed")
