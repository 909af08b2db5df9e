"""`GateOperator`: the last word on a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_batchinfer.operators.base import RunOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class GateOperator(RunOperator):
    """Fail unless the store shows a complete, published run with a current report.

    Run it last, with trigger rule `all_done`: an Airflow run takes its state from its last tasks, so
    this one must run, and fail, whatever happened before.
    """

    def execute(self, context: Context) -> dict[str, Any]:
        """What was found. Raises `IncompleteRunError` or `GateError`."""
        from airflow_batchinfer.pipeline.gate import check_run

        store, folder = self.open_run(context)
        return check_run(store, folder)
