"""`ReconcileOperator`: prove from plan and commits that every row has one outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_batchinfer.operators.base import RunOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class ReconcileOperator(RunOperator):
    """Write the run's ledger; fail when a shard is incomplete, so that "clear failed" clears this too.

    Run it with trigger rule `all_done`: the state of the infer tasks is no proof either way.
    """

    def execute(self, context: Context) -> dict[str, Any]:
        """The ledger's counts. Raises `IncompleteRunError` naming shards, rows and what to clear."""
        from airflow_batchinfer.pipeline.reconcile import reconcile

        store, folder = self.open_run(context)
        ledger = reconcile(store, folder)
        return {"rows": ledger.rows, "counts": ledger.counts, "reasons": ledger.reasons}
