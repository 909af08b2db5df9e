"""Whole runs through a real scheduler and API server, with an engine that needs no model."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from airflow_batchinfer.run.commit import Commit
from tests.integration.runs import StoredRun, job_fields, write_input

pytestmark = pytest.mark.airflow_env

EVIL = ["{{ 7*7 }}", "{% raw %}", "{{ var.value.x }}", "a\u0000b", "😀 שלום", "  ", "<b>& 'quoted' \"text\""]
TEMPLATE = "{% if text %}Q{{ 'x' * 0 }}: {{ text }}{% endif %}"
"""Holds what Airflow's own Jinja would swallow or refuse."""


@pytest.fixture(scope="module")
def whole(airflow, airflow_store, tmp_path_factory):
    """A finished run over four shards: (run id, what the store holds, texts)."""
    texts = [*EVIL, *(f"ticket number {i}" for i in range(40 - len(EVIL)))]
    source = write_input(tmp_path_factory.mktemp("input") / "rows.jsonl", texts)
    fields = job_fields(
        airflow_store, "whole", source, prompt={"template": TEMPLATE}, failure={"max_dead_fraction": 0.1}
    )
    run_id = airflow.trigger("any_job", {"spec": fields})
    assert airflow.wait("any_job", run_id) == "success", airflow.states("any_job", run_id)
    return run_id, StoredRun(airflow_store, "whole", run_id), texts


def test_every_row_is_accounted_for(whole):
    _, run, texts = whole
    assert len(run.plan.shards) == 4
    assert run.ledger["complete"]
    assert run.ledger["rows"] == len(texts) == sum(run.ledger["counts"].values())
    assert run.ledger["counts"]["rejected"] == 1, "the blank text"
    assert sorted(row for shard in range(4) for row in run.rows_in_parts(shard)) == list(range(len(texts)))
    assert len(run.results()) == len(texts) - 1
    assert [(row["row_id"], row["reason"]) for row in run.dead_letters()] == [
        (EVIL.index("  "), "empty_input")
    ]


def test_text_and_template_arrive_verbatim(whole):
    """No Jinja but the sandbox's sees the user's template, and none sees the rows (fact A9)."""
    _, run, texts = whole
    assert run.plan.spec.prompt.template == TEMPLATE
    for row in run.results():
        text = texts[row["row_id"]]
        assert row["text"] == text
        assert row["output"].endswith(f"to {('Q: ' + text)[-40:]}")


def test_mapped_tasks_read_as_shards(airflow, whole):
    run_id, _, _ = whole
    labels = [t["rendered_map_index"] for t in airflow.tasks("any_job", run_id) if t["task_id"] == "infer"]
    assert len(labels) == 4
    for shard, label in enumerate(sorted(labels)):
        assert re.fullmatch(rf"shard {shard:04d} · 10 rows · 1\.\dk tokens", label)


def test_xcom_carries_addresses_and_counts_only(airflow, whole):
    run_id, run, texts = whole
    bundles = airflow.xcom("any_job", run_id, "split")
    assert [(b["shards"], b["rows"], b["folder"]) for b in bundles] == [
        ([i], 10, run.plan.folder) for i in range(4)
    ]
    told = str(
        [bundles, *(airflow.xcom("any_job", run_id, t) for t in ("reconcile", "validate", "merge", "gate"))]
    )
    assert not [text for text in texts if text.strip() and text in told]


def test_logs_tell_counts_and_where_the_report_is(airflow, whole):
    run_id, run, _ = whole
    assert "shard 0003 committed by" in airflow.log("any_job", run_id, "infer", 3)
    report = run.folder / "report.html"
    assert str(report) in airflow.log("any_job", run_id, "report")
    assert report.stat().st_size > 1000


def test_a_commit_newer_than_the_ledger_means_clear_reconcile(airflow, whole):
    """Merge must not publish from a ledger that other readers would no longer write."""
    run_id, run, texts = whole
    epoch = next((run.folder / "shards" / "00000").glob("*/commit.json")).parent.name
    earlier = "20000101T000000000Z" + epoch[epoch.index("-") :]
    commit = Commit.read(run.store, run.layout.commit(0, epoch))
    commit.model_copy(update={"epoch": earlier}).write(run.store, run.layout.commit(0, earlier))
    airflow.clear("any_job", run_id, ["merge"], only_failed=False)
    assert airflow.wait("any_job", run_id) == "failed"
    assert "clear reconcile with its downstream tasks" in airflow.log("any_job", run_id, "merge")
    assert airflow.states("any_job", run_id)["gate"] == "failed"
    airflow.clear("any_job", run_id, ["reconcile"], only_failed=False)
    assert airflow.wait("any_job", run_id) == "success"
    assert len(run.results()) == len(texts) - 1


def test_bad_input_fails_in_split_with_one_message(airflow, airflow_store, tmp_path):
    source = write_input(tmp_path / "rows.jsonl", ["a", "b"])
    fields = job_fields(airflow_store, "bad", source, prompt={"template": "{{ txet }}"})
    run_id = airflow.trigger("any_job", {"spec": fields})
    assert airflow.wait("any_job", run_id) == "failed"
    states = airflow.states("any_job", run_id)
    assert states["split"] == "failed"
    assert {name for name, state in states.items() if state == "success"} == set()
    log = airflow.log("any_job", run_id, "split")
    assert "names the column `txet`, which the input does not have; did you mean `text`?" in log
    assert "has not succeeded in this run" in airflow.log("any_job", run_id, "gate")


def test_unknown_conf_keys_are_refused(airflow):
    """Airflow takes them silently and would run with the default."""
    run_id = airflow.trigger("batch_inference", {"modle": "x"})
    assert airflow.wait("batch_inference", run_id) == "failed"
    log = airflow.log("batch_inference", run_id, "split")
    assert "unknown key `modle`; did you mean `model`?" in log


def test_the_form_has_sections_and_is_checked_by_the_server(airflow):
    params = airflow.call("GET", "/dags/batch_inference/details")["params"]
    assert [params[name]["schema"]["section"] for name in ("input", "template", "task", "advanced")] == [
        "Data",
        "Prompt",
        "Answer",
        "Other fields",
    ]
    assert params["template"]["schema"]["format"] == "multiline"
    assert "{{" in params["template"]["value"]
    assert params["task"]["schema"]["enum"] == ["generate", "choice", "json", "regex", "embed"]
    with pytest.raises(httpx.HTTPStatusError, match="temperature"):
        airflow.trigger("batch_inference", {"temperature": 5})


def test_airflow_knows_the_provider_and_the_nightly_dag(airflow):
    providers = airflow.call("GET", "/providers?limit=200")["providers"]
    assert "airflow-provider-batchinfer" in {provider["package_name"] for provider in providers}
    airflow.wait_for_dag("nightly_tickets")
    nightly = airflow.call("GET", "/dags/nightly_tickets/details")
    assert nightly["is_paused"], "it costs money: a person switches it on"
    assert nightly["timetable_summary"] == "0 2 * * *"
    assert not airflow.call("GET", "/importErrors")["import_errors"]


def test_a_run_by_the_form(airflow, airflow_store, tmp_path):
    source = write_input(tmp_path / "rows.jsonl", [f"ticket {i}" for i in range(6)])
    conf = {
        "name": "by_form",
        "input": str(source),
        "id_column": "ticket",
        "carry": [],
        "truth": None,
        "system": None,
        "template": "Kind of {{ text }}?",
        "task": "choice",
        "labels": ["good", "bad"],
        "output_column": "output",
        "advanced": "model: {backend: 'tests.engines:InstantEngine'}",
    }
    run_id = airflow.trigger("batch_inference", conf)
    assert airflow.wait("batch_inference", run_id) == "success", airflow.states("batch_inference", run_id)
    rows = StoredRun(airflow_store, "by_form", run_id).results()
    assert [row["custom_id"] for row in rows] == [f"T{i}" for i in range(6)]
    assert {row["output"] for row in rows} <= {"good", "bad"}


def test_a_task_group_in_somebodys_dag(airflow, airflow_store, tmp_path):
    source = write_input(tmp_path / "rows.jsonl", [f"ticket {i}" for i in range(12)])
    run_id = airflow.trigger("somebodys_own", {"spec": job_fields(airflow_store, "grouped", source)})
    assert airflow.wait("somebodys_own", run_id) == "success", airflow.states("somebodys_own", run_id)
    states = airflow.states("somebodys_own", run_id)
    assert {"before", "inference.infer[1]", "inference.gate", "after"} <= states.keys()
    assert airflow.xcom("somebodys_own", run_id, "after") == 12


def test_a_task_group_that_a_branch_skips(airflow):
    run_id = airflow.trigger("somebodys_own", {"spec": {}})
    assert airflow.wait("somebodys_own", run_id) == "success", airflow.states("somebodys_own", run_id)
    states = airflow.states("somebodys_own", run_id)
    assert states.pop("before") == "success"
    assert {"inference.split", "inference.gate", "after"} <= states.keys()
    assert set(states.values()) == {"skipped"}


def test_a_days_partition(airflow, airflow_store, tmp_path):
    """The day is the run's, whenever it is cleared."""
    write_input(tmp_path / "2026-03-01.jsonl", ["a", "b"])
    fields = job_fields(airflow_store, "dated", tmp_path / "{day}.jsonl")
    body = {"logical_date": "2026-03-01T02:00:00Z", "conf": {"spec": fields}}
    airflow.wait_for_dag("dated_job")
    run_id = airflow.call("POST", "/dags/dated_job/dagRuns", json=body)["dag_run_id"]
    assert airflow.wait("dated_job", run_id) == "success", airflow.states("dated_job", run_id)
    run = StoredRun(airflow_store, "dated", run_id)
    plan = run.plan
    assert [Path(file.uri).name for file in plan.input.files] == ["2026-03-01.jsonl"]
    assert airflow.clear("dated_job", run_id, ["split"], only_failed=False)
    assert airflow.wait("dated_job", run_id) == "success", airflow.states("dated_job", run_id)
    assert run.plan.epoch == plan.epoch, "the same plan, not another"
