"""`ReportOperator`: write the report, whatever became of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_batchinfer.operators.base import RunOperator
from airflow_batchinfer.operators.links import ReportLink, page_address
from airflow_batchinfer.run.layout import RunLayout

if TYPE_CHECKING:
    from airflow.sdk import Context


class ReportOperator(RunOperator):
    """Write `report.html` and `report.json`, then fail if the run is not published.

    Run it with trigger rule `all_done`: a failed run needs its report most. It fails with the run so
    that "clear failed" clears it, and the report is written again once the run is whole.
    """

    operator_extra_links = (ReportLink(),)

    def execute(self, context: Context) -> str:
        """The report's address. Raises what keeps the run from being published."""
        from airflow_batchinfer.pipeline.gate import check_run
        from airflow_batchinfer.pipeline.report import write_report

        store, folder = self.open_run(context)
        write_report(store, folder)
        address = store.uri_of(RunLayout(folder).report("html"))
        self.log.info("report: %s", address)
        page = page_address(store, RunLayout(folder).report("html"))
        context["ti"].xcom_push(key=ReportLink.address_key, value=page)
        check_run(store, folder)
        return address
