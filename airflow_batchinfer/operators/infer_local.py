"""`InferLocalOperator`: run a bundle of shards in a worker process on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import conf

from airflow_batchinfer.errors import ExitCode, WorkerLostError
from airflow_batchinfer.operators.base import BatchInferOperator
from airflow_batchinfer.operators.bundle import Bundle
from airflow_batchinfer.operators.job import CONFIG_SECTION
from airflow_batchinfer.operators.local_worker import LocalWorker
from airflow_batchinfer.operators.shard_work import ShardWork, worker_error
from airflow_batchinfer.operators.task_label import labelled

if TYPE_CHECKING:
    from airflow.sdk import Context

_EXTRA_GRACE_SECONDS = 30.0
"""A worker told to go gets its own grace and this much more for its last part; then it is killed."""


class InferLocalOperator(BatchInferOperator):
    """Run one worker process until each shard of the bundle has a commit.

    Success needs the commits, not the worker's exit status. A worker that was reclaimed is started
    again at once, without using up a retry of the task, `retry.reclaims` times at most.

    Args:
        bundle: which shards, from split's list.
        worker_python: interpreter of the worker's environment; default `[batchinfer] worker_python`,
            else the one that runs Airflow's task.
        worker_env: environment variables for the worker, over those of Airflow's task.
    """

    def __init__(
        self,
        *,
        bundle: Bundle,
        worker_python: str | None = None,
        worker_env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.bundle = bundle
        self.worker_python = worker_python
        self.worker_env = dict(worker_env or {})
        self._worker: LocalWorker | None = None
        self._told_to_go = False

    def execute(self, context: Context) -> None:
        """Run the bundle. Raises what `worker_error` gives, with the worker's own message."""
        with labelled(context, self.bundle):
            self.use_store_connection()
            work = ShardWork.open(self.bundle)
            self._run_to_commit(work)
        for line in work.summary():
            self.log.info(line)

    def on_kill(self) -> None:
        """Pass SIGTERM on; `execute` goes on until the worker has checkpointed."""
        self._told_to_go = True
        if self._worker is not None:
            self._worker.terminate()

    def _run_to_commit(self, work: ShardWork) -> None:
        launches_left = 1 + work.plan.spec.retry.reclaims
        while shards := work.open_shards():
            if self._told_to_go:
                raise WorkerLostError("Airflow ended this task; finished rows are in the store's parts")
            if not launches_left:
                raise WorkerLostError(
                    f"reclaimed {work.plan.spec.retry.reclaims} times, the limit of `retry.reclaims`"
                )
            launches_left -= 1
            code, message = self._run_worker(work, shards)
            if code == ExitCode.COMMITTED:
                work.check_committed()
            elif code == ExitCode.RECLAIMED:
                self.log.warning("the worker was reclaimed (%s); %d launches left", message, launches_left)
            elif work.open_shards():
                raise worker_error(code, message)

    def _run_worker(self, work: ShardWork, shards: list[int]) -> tuple[int, str | None]:
        """One worker from start to end; its exit status and last word."""
        command = [
            self._python(),
            *("-m", "airflow_batchinfer.worker"),
            *work.worker_arguments(shards),
            "--die-with-parent",
        ]
        self.log.info("worker: %s", " ".join(command))
        checkpoint = work.plan.spec.checkpoint
        grace = checkpoint.grace_seconds + _EXTRA_GRACE_SECONDS
        deadline: float | None = None
        next_news = 0.0
        with LocalWorker(command, self._environment(), self.log.info, grace_seconds=grace) as worker:
            self._worker = worker
            try:
                while (code := worker.wait(0.5)) is None:
                    now = time.monotonic()
                    if self._told_to_go and deadline is None:
                        worker.terminate()
                        deadline = now + grace
                    if deadline is not None and now > deadline:
                        worker.kill()
                    if now >= next_news:
                        next_news = now + checkpoint.progress_seconds
                        self._tell_progress(work)
            finally:
                self._worker = None
            self._tell_progress(work)
            return code, worker.message

    def _tell_progress(self, work: ShardWork) -> None:
        for line in work.progress_news():
            self.log.info(line)

    def _python(self) -> str:
        return self.worker_python or conf.get(CONFIG_SECTION, "worker_python", fallback="") or sys.executable

    def _environment(self) -> dict[str, str]:
        """Airflow's own variables stay out: they hold its database's address and its secrets."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW_", "_AIRFLOW_"))}
        return inherited | self.worker_env
