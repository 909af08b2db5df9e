"""Buttons of a task in Airflow's UI: the pages that it left in the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink, conf

from airflow_batchinfer.operators.job import CONFIG_SECTION

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

    from airflow_batchinfer.store import Store


def page_address(store: Store, key: str) -> str:
    """Where to open a page of the store.

    Below `[batchinfer] store_url`, if it is set. Else the page's own address, which a browser cannot open
    from here, but a person can read: `s3://...`, or `file://...` of the machine that ran the task.
    """
    base = conf.get(CONFIG_SECTION, "store_url", fallback="")
    if base:
        return f"{base.rstrip('/')}/{key}"
    address = store.uri_of(key)
    return address if "://" in address else Path(address).absolute().as_uri()


class PageLink(BaseOperatorLink):
    """Base of links to a page whose address the task has pushed as XCom."""

    address_key: str
    """XCom key of the address."""

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address; empty if the task has not come so far."""
        from airflow.sdk.execution_time.xcom import XCom

        return XCom.get_value(key=self.address_key, ti_key=ti_key) or ""


class DataDocsLink(PageLink):
    """Great Expectations' page of the run."""

    name = "Data docs"
    address_key = "data_docs"


class ReportLink(PageLink):
    """The run's report."""

    name = "Report"
    address_key = "report"
