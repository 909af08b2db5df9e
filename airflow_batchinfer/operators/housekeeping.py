"""`HousekeepingOperator`: delete a job's old runs, what nobody names any more, and half-written leftovers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow_batchinfer.operators.base import BatchInferOperator
from airflow_batchinfer.operators.job import needed_store
from airflow_batchinfer.store import open_store

if TYPE_CHECKING:
    from airflow.sdk import Context


class HousekeepingOperator(BatchInferOperator):
    """Keep a store from growing without bound. Tables lose no row, unless `keep_runs` says so.

    Args:
        job: the job's name.
        store: the store's address; default: `[batchinfer] store`.
        storage_options: options of an S3 store; never credentials.
        delete_runs_after: delete runs in whose folder, and those of their replays, nothing was written for
            so long; none keeps them.
        keep_runs: take all published runs but so many, the newest, out of the tables; none keeps them.
    """

    def __init__(
        self,
        *,
        job: str,
        store: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        delete_runs_after: timedelta | None = None,
        keep_runs: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job = job
        self.store = store
        self.storage_options = dict(storage_options or {})
        self.delete_runs_after = delete_runs_after
        self.keep_runs = keep_runs

    def execute(self, context: Context) -> dict[str, Any]:
        """What was deleted. Raises `StoreError`, `SpecError`."""
        from airflow_batchinfer.pipeline.housekeeping import (
            delete_orphans,
            delete_runs,
            delete_unfinished,
            vacuum_tables,
        )
        from airflow_batchinfer.pipeline.prune import prune_tables

        self.use_store_connection()
        store = open_store(self.store or needed_store(), self.storage_options)
        pruned: list[str] = []
        if self.keep_runs is not None:
            pruned = prune_tables(store, self.job, self.keep_runs).runs
        runs: list[str] = []
        if self.delete_runs_after is not None:
            runs = delete_runs(store, self.job, self.delete_runs_after).runs
        return {
            "pruned": pruned,
            "runs": runs,
            "orphans": delete_orphans(store, self.job).objects,
            "table_files": vacuum_tables(store, self.job).objects,
            "unfinished": delete_unfinished(store, self.job).objects,
        }
