"""Data docs: a run's validation as Great Expectations shows it, one page that needs nothing else.

GX's own renderer makes the sections. Its page around them is not used: it loads styles and scripts from
six other hosts, and does not escape the values it shows. Here the values are escaped, the styles stand in
the page, and its policy forbids scripts and anything from outside. What falls away is what GX's scripts do:
sorting and filtering tables, folding, charts.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from airflow_batchinfer.pipeline.gx import render_sections


def data_docs(suite: str, run_id: str, time: str, results: Sequence[Mapping[str, Any]]) -> str:
    """The page.

    Args:
        suite: what the expectations are for, as the page's title.
        run_id: the run.
        time: when it was validated, ISO 8601.
        results: one an expectation, as Great Expectations' JSON values.
    """
    try:
        sections = render_sections(suite, run_id, time, [_safe(result) for result in results])
    except Exception as error:  # its renderer's; a page that cannot be drawn is no reason to fail a run
        sections = [f"<p>Great Expectations could not render the results: {html.escape(repr(error))}</p>"]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("airflow_batchinfer.pipeline", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    template = environment.get_template("data_docs.html.j2")
    return template.render(suite=suite, run_id=run_id, sections=[Markup(s) for s in sections])


def _safe(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result as plain JSON values. GX escapes an expectation's arguments, but no value from the data."""
    plain: dict[str, Any] = json.loads(json.dumps(result, default=_number_or_text))
    return plain | {name: _escaped(plain.get(name)) for name in ("result", "exception_info")}


def _number_or_text(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return html.escape(value)
    if isinstance(value, list):
        return [_escaped(v) for v in value]
    if isinstance(value, dict):
        return {html.escape(name): _escaped(v) for name, v in value.items()}
    return value
