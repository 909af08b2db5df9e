"""Writes the report of a run: `report.json` and a page that needs nothing else to be read."""

from __future__ import annotations

import jinja2

from airflow_batchinfer.pipeline.report import charts
from airflow_batchinfer.pipeline.report.build import build_report
from airflow_batchinfer.pipeline.report.model import Report
from airflow_batchinfer.pipeline.words import duration
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store


def write_report(store: Store, folder: str) -> Report:
    """Write `report.html`, then `report.json`, from what the run at `folder` left so far.

    Raises:
        FileNotFoundError: the run has no plan.
        CorruptError: a document or part cannot be read, naming it.
        StoreError: the store cannot be read or written.
    """
    layout = RunLayout(folder)
    report = build_report(store, Plan.read(store, layout.plan))
    store.write_bytes(layout.report("html"), render_html(report).encode())
    report.write(store, layout.report("json"))
    return report


def render_html(report: Report) -> str:
    """The page. Everything that comes from data is escaped, and no script or outside asset is used."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("airflow_batchinfer.pipeline.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(charts=charts)
    environment.filters.update(number=_number, duration=duration, share=_share)
    return environment.get_template("report.html.j2").render(r=report)


def _number(value: float) -> str:
    """`12,345`, `12.3`, `0.012`: as many digits as are worth reading."""
    if isinstance(value, int) or value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _share(part: float, whole: float) -> str:
    """`12.3 %`; a share that is not nothing never reads `0.0 %`."""
    if not whole or not part:
        return "0 %"
    percent = 100 * part / whole
    return f"{percent:.1f} %" if percent >= 0.1 else "< 0.1 %"
