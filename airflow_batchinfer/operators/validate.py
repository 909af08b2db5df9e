"""`ValidateOperator`: check the outputs before they are published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_batchinfer.operators.base import RunOperator
from airflow_batchinfer.operators.links import DataDocsLink, page_address
from airflow_batchinfer.run.layout import RunLayout

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_batchinfer.store import Store


class ValidateOperator(RunOperator):
    """Write the verdict on the outputs; fail when it holds the results back.

    The link "Data docs" leads to Great Expectations' page of the run.
    """

    operator_extra_links = (DataDocsLink(),)

    def execute(self, context: Context) -> dict[str, Any]:
        """Whether all checks passed, how many there were, and rows taken out. Raises `GateError`."""
        from airflow_batchinfer.pipeline.validate import validate

        store, folder = self.open_run(context)
        try:
            verdict = validate(store, folder)
        finally:
            address = self._show_data_docs(context, store, folder)
        self.log.info(verdict.message)
        return {
            "success": verdict.success,
            "checks": len(verdict.checks),
            "dead_lettered": verdict.quarantine.rows,
            "data_docs": address,
        }

    def _show_data_docs(self, context: Context, store: Store, folder: str) -> str | None:
        """Log and push the page's address, of a run that is held back too; none without expectations."""
        key = RunLayout(folder).data_docs
        if not store.exists(key):
            return None
        address = page_address(store, key)
        self.log.info("data docs: %s", address)
        context["ti"].xcom_push(key=DataDocsLink.address_key, value=address)
        return address
