"""Writes the report of a run: `report.json` and a page that needs nothing else to be read."""

from __future__ import annotations

from itertools import takewhile

import jinja2
from markupsafe import Markup

from airflow_batchinfer.pipeline import words
from airflow_batchinfer.pipeline.accounting import read_account
from airflow_batchinfer.pipeline.eyes import write_sheet
from airflow_batchinfer.pipeline.report import charts
from airflow_batchinfer.pipeline.report.build import build_report
from airflow_batchinfer.pipeline.report.model import Report
from airflow_batchinfer.pipeline.split import load_plan
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.store import Store


def write_report(store: Store, folder: str) -> Report:
    """Write `report.html`, then `report.json`, from what the run at `folder` left so far.

    A complete run gets its review sheet too, unless it has one.

    Raises:
        InputError: the run has no plan.
        CorruptError: a document or part cannot be read, naming it.
        StoreError: the store cannot be read or written.
    """
    layout = RunLayout(folder)
    plan = load_plan(store, folder)
    account = read_account(store, folder)
    report = build_report(store, plan, account)
    if account is not None and report.status not in ("incomplete", "stopped"):
        write_sheet(store, plan, account.quarantine)
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
    environment.globals.update(charts=charts, words=words)
    environment.filters.update(number=words.amount, duration=words.duration, share=words.share, code=_code)
    return environment.get_template("report.html.j2").render(r=report, shared=_shared_messages(report))


def _shared_messages(report: Report) -> list[dict[str, str]]:
    """Messages with which every prompt of the page begins (a system prompt, examples): shown once."""
    prompts = [row.prompt for rows in (report.samples, *report.dead_letters.values()) for row in rows]
    if len(prompts) < 2:
        return []
    shared = list(takewhile(lambda same: all(m == same[0] for m in same), zip(*prompts, strict=False)))
    return [messages[0] for messages in shared]


def _code(text: str) -> Markup:
    """Text with what stands between backticks set as code."""
    pieces = (Markup("<code>{}</code>" if i % 2 else "{}").format(p) for i, p in enumerate(text.split("`")))
    return Markup("").join(pieces)
