"""`ValidateOperator`: check the outputs before they are published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_batchinfer.operators.base import RunOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class ValidateOperator(RunOperator):
    """Write the verdict on the outputs; fail when it holds the results back."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Whether all checks passed, how many there were, and rows taken out. Raises `GateError`."""
        from airflow_batchinfer.pipeline.validate import validate

        store, folder = self.open_run(context)
        verdict = validate(store, folder)
        self.log.info(verdict.message)
        return {
            "success": verdict.success,
            "checks": len(verdict.checks),
            "dead_lettered": verdict.quarantine.rows,
        }
