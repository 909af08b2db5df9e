"""Great Expectations' page of a run: it stands alone, and what the data says stays text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.errors import GateError
from airflow_batchinfer.pipeline.report import write_report
from airflow_batchinfer.pipeline.validate import validate
from airflow_batchinfer.pipeline.verdict import Verdict
from tests.unit.quality.runs import make_run, make_spec, tickets

pytestmark = pytest.mark.airflow_env

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


class Tags(HTMLParser):
    """Tags of a page, and the addresses that it loads from."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "srcset", "data")]


def page_of(root: Path, **made: Any) -> str:
    run = make_run(root, tickets(30), **made)
    run.reconcile()
    try:
        verdict = validate(run.store, run.folder)
    except GateError:
        verdict = Verdict.read(run.store, run.layout.validation)
    assert verdict.data_docs == run.layout.data_docs
    return run.store.read_bytes(run.layout.data_docs).decode()


def visible(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.split("<body>")[1]))


def test_counts_are_summed_over_shards(root: Path) -> None:
    text = visible(page_of(root, answer=lambda r: {"output": "spam" if r["id"] == "T17" else r["label"]}))
    assert "values must belong to this set: billing bug praise ." in text
    assert "1 unexpected values found. ≈3.333% of 30 total rows." in text
    assert "Unsuccessful Expectations 1" in text


def test_the_page_needs_nothing_else_and_runs_nothing(root: Path) -> None:
    own = [
        {"type": kind, "kwargs": {"column": "output", "value_set": [EVIL]}}
        for kind in (
            "expect_column_values_to_be_in_set",
            "expect_column_distinct_values_to_be_in_set",
            "expect_column_most_common_value_to_be_in_set",
        )
    ] + [{"type": "expect_column_mean_to_be_between", "kwargs": {"column": "output", "max_value": 1}}]
    spec = make_spec(root, task={"type": "generate"}, validation={"expectations": own})
    page = page_of(root, spec=spec, answer=lambda r: {"output": f"{EVIL} {r['id']}"})
    parsed = Tags()
    parsed.feed(page)
    assert not parsed.tags & {"script", "img", "link", "iframe", "object"}
    assert parsed.loads == []
    assert "default-src 'none'" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page, "it shows what the rows say"
    assert "could not render" not in page


def test_keys_of_objects_are_text_too(root: Path) -> None:
    refresh = "<meta http-equiv=refresh content='0;url=//elsewhere'>"
    own = {
        "type": "expect_column_values_to_be_in_set",
        "kwargs": {"column": "output.about", "value_set": ["x"]},
    }
    task = {"type": "json", "schema": {"type": "object", "properties": {"about": {"type": "object"}}}}
    spec = make_spec(root, task=task, validation={"expectations": [own]})
    page = page_of(root, spec=spec, answer=lambda r: {"output": json.dumps({"about": {refresh: [r["id"]]}})})
    assert "<meta http-equiv=refresh" not in page
    assert "&lt;meta http-equiv=refresh" in page


def test_the_report_links_it(root: Path) -> None:
    run = make_run(root, tickets(9))
    run.reconcile()
    validate(run.store, run.folder)
    report = write_report(run.store, run.folder)
    assert report.places["data docs"] == run.store.uri_of(run.layout.data_docs)
    assert '<a href="validation/data_docs.html">' in run.store.read_bytes(run.layout.report("html")).decode()


def test_without_expectations_there_is_none(root: Path) -> None:
    run = make_run(root, tickets(9), spec=make_spec(root, validation={"enabled": False}))
    run.reconcile()
    assert validate(run.store, run.folder).data_docs is None
    assert not run.store.exists(run.layout.data_docs)
