from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.errors import GateError
from airflow_batchinfer.pipeline.gate import check_run
from airflow_batchinfer.pipeline.pilot import judge_pilot
from airflow_batchinfer.pipeline.report import Report, charts, write_report
from airflow_batchinfer.pipeline.validate import validate
from airflow_batchinfer.run.commit import Tokens
from airflow_batchinfer.run.stop import set_stop
from tests.unit.quality.runs import MadeRun, make_run, make_spec, tickets, truthful

pytestmark = pytest.mark.airflow_env


def some_dead(row: dict[str, Any]) -> dict[str, Any]:
    i = int(row["id"][1:])
    if i % 10 == 4:
        return {"reason": "over_long", "message": f"{i} is too long"}
    if i % 10 == 7:
        return {"reason": "empty_output", "output": ""}
    return {"output": row["label"]}


def test_counts_add_up_to_the_input_with_copies(root: Path) -> None:
    run = make_run(root, tickets(60), some_dead, copies_of={1: 0, 2: 0, 34: 33})
    run.reconcile()
    report = write_report(run.store, run.folder)
    assert report.rows == 60
    assert sum(report.counts.values()) == 60
    assert report.counts == {"succeeded": 49, "invalid": 6, "rejected": 5}
    assert report.reasons == {"empty_output": 6, "over_long": 5}
    assert report.dedup_rows == 3
    assert report.tokens_saved == 3 * 33
    assert (report.tokens.prompt, report.tokens.output) == (30 * 52, 3 * 52)
    assert report.problems == []


def test_lost_tokens_were_paid_too(root: Path) -> None:
    prices = {"per_million_output_tokens": 1e6, "per_million_prompt_tokens": 2e6}
    run = make_run(root, tickets(12), spec=make_spec(root, cost=prices))
    run.lose_attempt(1, Tokens(prompt=500, output=7))
    report = write_report(run.store, run.folder)
    assert report.tokens == Tokens(prompt=12 * 30, output=12 * 3, cached=12 * 10)
    assert report.tokens_lost == 507
    assert report.cost == (12 * 30 - 12 * 10 + 500) * 2 + 12 * 3 + 7


def test_a_confusion_matrix_of_many_labels_shows_those_that_are_mistaken(root: Path) -> None:
    labels = [f"label {i:03d}" for i in range(300)]
    rows = [{**t, "label": labels[i]} for i, t in enumerate(tickets(300))]
    spec = make_spec(root, task={"type": "choice", "labels": labels})

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return {"output": "label 201" if row["label"] == "label 120" else row["label"]}

    run = make_run(root, rows, answer, spec=spec)
    run.reconcile()
    validate(run.store, run.folder)
    write_report(run.store, run.folder)
    html = run.store.read_bytes(run.layout.report("html")).decode()
    assert html.count("<title>true label ") == charts.MOST_LABELS**2
    assert "<title>true label 120, answered label 201: 1 (100%)</title>" in html
    assert "The 40 labels that were most often mistaken, of 300; the table and report.json have all." in html
    assert "<td>label 299</td>" in html


def test_report_is_stored_as_returned(root: Path) -> None:
    run = make_run(root, tickets(12))
    report = write_report(run.store, run.folder)
    assert Report.read(run.store, run.layout.report("json")) == report


def test_status_follows_the_documents(root: Path, publish: Callable[[MadeRun], None]) -> None:
    run = make_run(root, tickets(12))
    assert write_report(run.store, run.folder).status == "incomplete"
    run.reconcile()
    assert write_report(run.store, run.folder).status == "not published"
    publish(run)
    report = write_report(run.store, run.folder)
    assert report.status == "published"
    assert report.headline == "Published: 12 of 12 rows succeeded, 0 are dead letters."


def test_incomplete_run_says_so_on_top(root: Path) -> None:
    run = make_run(root, tickets(30), uncommitted=[1])
    run.reconcile()
    report = write_report(run.store, run.folder)
    assert report.status == "incomplete"
    assert report.counts == {"succeeded": 25, "unprocessed": 5}
    assert report.headline == (
        "Incomplete: 1 of 3 shards have no commit; 25 of 30 rows have an outcome, 5 are left."
    )
    html = run.store.read_bytes(run.layout.report("html")).decode()
    assert html.index(report.headline) < html.index("What became of the rows")
    line = report.shards[1]
    assert (line.state, line.attempts, line.reclaims, line.held_seconds) == ("reclaimed", 1, 1, 40.0)


def test_parts_that_disagree_with_the_ledger_are_a_problem(root: Path) -> None:
    run = make_run(root, tickets(12))
    ledger = run.reconcile()
    ledger.model_copy(update={"counts": {"succeeded": 11, "failed": 1}}).write(run.store, run.layout.ledger)
    assert "disagree" in write_report(run.store, run.folder).problems[0]


def test_row_text_is_data(root: Path) -> None:
    evil = "<script>alert(1)</script> {{ 7*7 }} {% raw %}"
    rows = tickets(6)
    rows[2]["text"] = evil
    run = make_run(root, rows, lambda row: {**truthful(row), "output": row["text"]}, spec=_generate(root))
    report = write_report(run.store, run.folder)
    html = run.store.read_bytes(run.layout.report("html")).decode()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; {{ 7*7 }} {% raw %}" in html
    shown = next(row for row in report.samples if row.row_id == 2)
    assert shown.prompt == [
        {"role": "system", "content": "You sort tickets."},
        {"role": "user", "content": f"Ticket: {evil}"},
    ]


def test_page_needs_nothing_from_outside(root: Path) -> None:
    run = make_run(root, tickets(12), some_dead)
    write_report(run.store, run.folder)
    html = run.store.read_bytes(run.layout.report("html")).decode()
    assert "http://" not in html
    assert "https://" not in html
    assert "src=" not in html
    assert html.count("<svg") >= 4


def test_sample_is_seeded_and_does_not_depend_on_shards(root: Path, tmp_path: Path) -> None:
    spec = make_spec(root, report={"samples": 5})
    few = make_run(root, tickets(90), spec=spec, shards=2)
    many = make_run(tmp_path / "other", tickets(90), spec=spec, shards=9)
    first = {row.row_id for row in write_report(few.store, few.folder).samples}
    second = {row.row_id for row in write_report(many.store, many.folder).samples}
    assert first == second
    assert len(first) == 5
    reseeded = make_spec(root, report={"samples": 5, "seed": 1})
    third = make_run(tmp_path / "third", tickets(90), spec=reseeded, shards=2)
    assert {row.row_id for row in write_report(third.store, third.folder).samples} != first


def test_dead_letters_are_shown_by_reason(root: Path) -> None:
    run = make_run(root, tickets(100), some_dead)
    report = write_report(run.store, run.folder)
    assert {reason: len(rows) for reason, rows in report.dead_letters.items()} == {
        "empty_output": 5,
        "over_long": 5,
    }
    assert all(row.message == f"{row.row_id} is too long" for row in report.dead_letters["over_long"])


def test_long_texts_are_cut_and_say_so(root: Path) -> None:
    rows = tickets(3)
    rows[1]["text"] = "x" * 9000
    run = make_run(root, rows)
    report = write_report(run.store, run.folder)
    text = next(row for row in report.samples if row.row_id == 1).prompt[1]["content"]
    assert text.endswith("… [5,008 more characters]")


def test_embeddings_are_described(root: Path) -> None:
    spec = make_spec(root, task={"type": "embed"}, input={"path": "x.parquet"})
    run = make_run(root, tickets(6), lambda _: {"vector": [0.6, 0.8]}, spec=spec)
    report = write_report(run.store, run.folder)
    assert report.samples[0].output == "[0.6000, 0.8000, …] · 2 numbers · length 1.0000"


def _generate(root: Path) -> Any:
    return make_spec(root, task={"type": "generate"})


def test_forecast_is_set_against_what_came(root: Path, publish: Callable[[MadeRun], None]) -> None:
    spec = make_spec(root, pilot={"rows": 20}, cost={"per_hour": 2.0, "currency": "EUR"})
    run = make_run(
        root,
        tickets(100),
        lambda row: {"output": row["label"], "at": 40 + int(row["id"][1:])},
        spec=spec,
        shards=5,
        pilot=True,
    )
    judge_pilot(run.store, run.folder)
    run.reconcile()
    publish(run)
    report = write_report(run.store, run.folder)
    assert report.cost == pytest.approx(2.0 * 200 / 3600)
    html = run.store.read_bytes(run.layout.report("html")).decode()
    section = html[html.index("<h2>Pilot</h2>") : html.index("<h2>Checks</h2>")]
    assert "3,000" in section
    assert section.count("inside") + section.count("outside") == 5
    assert "cost in EUR" in section


def test_failed_pilot_is_the_headline(root: Path) -> None:
    spec = make_spec(root, pilot={"rows": 20})
    run = make_run(
        root,
        tickets(100),
        lambda _: {"reason": "invalid_output", "output": "?"},
        spec=spec,
        shards=5,
        pilot=True,
        uncommitted=range(1, 5),
    )
    with pytest.raises(GateError):
        judge_pilot(run.store, run.folder)
    run.reconcile()
    report = write_report(run.store, run.folder)
    assert report.status == "stopped"
    assert report.headline.startswith("The pilot failed, so the fleet was not started")
    with pytest.raises(GateError, match="The pilot failed"):
        check_run(run.store, run.folder)


def test_stopped_line_is_the_headline_until_the_run_is_complete(root: Path) -> None:
    run = make_run(root, tickets(30), uncommitted=[1])
    run.reconcile()
    set_stop(run.store, run.folder, "60 of the last 60 rows did not succeed", by="worker of shard 0001")
    report = write_report(run.store, run.folder)
    assert report.status == "stopped"
    assert report.headline == (
        "Stopped by worker of shard 0001: 60 of the last 60 rows did not succeed. "
        "25 of 30 rows have an outcome, which is kept."
    )
    with pytest.raises(GateError, match=r"stopped by worker of shard 0001.*airflow_batchinfer resume"):
        check_run(run.store, run.folder)


def test_what_all_prompts_begin_with_is_shown_once(root: Path) -> None:
    run = make_run(root, tickets(30), some_dead)
    write_report(run.store, run.folder)
    html = run.store.read_bytes(run.layout.report("html")).decode()
    assert html.count("You sort tickets.") == 1
    assert html.count("Ticket: ticket ") == 20 + 6
