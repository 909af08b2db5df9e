"""`MergeOperator`: publish the run's results and dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_batchinfer.operators.base import RunOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class MergeOperator(RunOperator):
    """Write the results table, the dead-letter table and the exports."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Addresses and counts. Raises `StaleLedgerError` if a commit is newer than the ledger."""
        from airflow_batchinfer.pipeline.merge import merge

        store, folder = self.open_run(context)
        return merge(store, folder).model_dump(mode="json")
