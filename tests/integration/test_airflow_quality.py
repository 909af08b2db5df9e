"""Gates through a real scheduler: the pilot, a person's approval, the stopped line, drift."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import yaml

from airflow_batchinfer.run.stop import clear_stop, read_stop
from tests.integration.runs import StoredRun, job_fields, paid, write_input

pytestmark = pytest.mark.airflow_env

LABELS = ["yes", "no"]


@pytest.fixture
def gated_job(airflow_store, tmp_path):
    """Make (fields, log of paid rows) of a `choice` job over 40 rows, 8 of them the pilot."""

    def make(name, texts=None, *, pilot=True, **overrides):
        source = write_input(tmp_path / "rows.jsonl", texts or [f"ticket {i}" for i in range(40)])
        log = tmp_path / "paid.log"
        engine = {"paid_log": str(log), "max_in_flight": 4, **overrides.pop("engine", {})}
        fields = job_fields(
            airflow_store,
            name,
            source,
            task={"type": "choice", "labels": LABELS},
            model={"backend": "tests.engines:FaultyEngine", "engine": engine},
            sharding={"max_rows": 16, "max_parallel_shards": 1},
            retry={"invalid_attempts": 1},
            **({"pilot": {"rows": 8}} if pilot else {}),
            **overrides,
        )
        return fields, log

    return make


def test_a_broken_job_is_caught_by_the_pilot(airflow, airflow_store, gated_job):
    fields, log = gated_job("broken", engine={"answer": "Sure! Here is the label you asked for:"})
    run_id = airflow.trigger("piloted_job", {"spec": fields})
    assert airflow.wait("piloted_job", run_id) == "failed"
    states = airflow.states("piloted_job", run_id)
    assert (states["pilot[0]"], states["judge_pilot"], states["infer"]) == (
        "success",
        "failed",
        "upstream_failed",
    )
    told = airflow.log("piloted_job", run_id, "judge_pilot")
    events = airflow.log_events("piloted_job", run_id, "judge_pilot")
    assert [e["error_detail"][0]["exc_type"] for e in events if e.get("error_detail")] == ["GateError"]
    assert "8 of 8" in told
    assert "mostly invalid_output (8)" in told
    assert "prompt 'Answer: ticket" in told
    assert "The pilot failed" in airflow.log("piloted_job", run_id, "gate")
    assert sum(paid(log).values()) == 8, "only the pilot was paid for"
    run = StoredRun(airflow_store, "broken", run_id)
    report = run.document(run.layout.report("json"))
    assert report["status"] == "stopped"
    assert report["pilot"]["forecast"]["tokens"]["expected"] > 4 * report["pilot"]["spent_tokens"]


def test_the_fleet_waits_for_a_persons_approval(airflow, airflow_store, gated_job):
    fields, log = gated_job(
        "approved", [f"{{{{ 7*7 }}}} {i}" for i in range(40)], gate={"approval": "required"}
    )
    run_id = airflow.trigger("piloted_job", {"spec": fields})
    airflow.wait_for_task("piloted_job", run_id, "judge_pilot", ["awaiting_input", "deferred"])
    request = airflow.request("piloted_job", run_id, "judge_pilot")
    assert "The pilot passed: 8 of 8 rows succeeded; forecast for the run" in request["body"]
    assert "{{ 7*7 }}" in request["body"], "row text is never rendered"
    assert sum(paid(log).values()) == 8

    airflow.respond("piloted_job", run_id, "judge_pilot", "Approve")
    assert airflow.wait("piloted_job", run_id) == "success", airflow.states("piloted_job", run_id)
    run = StoredRun(airflow_store, "approved", run_id)
    assert [row["row_id"] for row in run.results()] == list(range(40))
    assert set(paid(log).values()) == {1}, "the pilot's rows are not paid again"


def test_a_rejected_pilot_ends_the_run_and_what_was_asked_is_not_asked_of_another(
    airflow, gated_job, tmp_path
):
    fields, log = gated_job("rejected", gate={"approval": "required"})
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(fields))
    run_id = airflow.trigger("piloted_job", {"file": str(file)})
    airflow.wait_for_task("piloted_job", run_id, "judge_pilot", ["awaiting_input", "deferred"])
    airflow.respond("piloted_job", run_id, "judge_pilot", "Reject")
    assert airflow.wait("piloted_job", run_id) == "failed"
    assert airflow.state_mismatches("piloted_job", run_id, "judge_pilot") == {}
    assert sum(paid(log).values()) == 8

    changed = {"prompt": {"template": "Reply: {{ text }}"}, "on_changed_spec": "restart"}
    file.write_text(yaml.safe_dump(fields | changed))
    airflow.clear("piloted_job", run_id, ["split"], only_failed=False)
    assert airflow.wait("piloted_job", run_id) == "failed"
    assert "an earlier request with other figures" in airflow.log("piloted_job", run_id, "judge_pilot")
    assert sum(paid(log).values()) == 16, "another pilot"


def test_no_pilot_a_judge_and_failing_rows_as_dead_letters(airflow, airflow_store, gated_job, tmp_path):
    judged_log = tmp_path / "judged.log"
    judge = {
        "rows": 12,
        "prompt": {"template": "{{ text }} was answered with {{ output }}. Right?"},
        "model": {
            "name": "none",
            "backend": "tests.engines:InstantEngine",
            "engine": {"paid_log": str(judged_log)},
        },
        "task": {"type": "choice", "labels": ["right", "wrong"]},
        "passing": ["right", "wrong"],
    }
    expected = {
        "type": "expect_column_values_to_be_in_set",
        "kwargs": {"column": "output", "value_set": ["yes"]},
        "on_failure": "dead_letter",
    }
    fields, _ = gated_job(
        "unpiloted",
        pilot=False,
        validation={"expectations": [expected]},
        failure={"max_dead_fraction": 0.9},
        judge=judge,
        gate={"min_judge_pass": 1.0},
    )
    run_id = airflow.trigger("piloted_job", {"spec": fields})
    assert airflow.wait("piloted_job", run_id) == "success", airflow.states("piloted_job", run_id)
    run = StoredRun(airflow_store, "unpiloted", run_id)
    results, letters = run.results(), run.dead_letters()
    assert {row["output"] for row in results} == {"yes"}
    assert {(row["outcome"], row["reason"]) for row in letters} == {("invalid", "expectation_failed")}
    assert sorted(row["row_id"] for row in [*results, *letters]) == list(range(40))
    assert run.ledger["counts"]["succeeded"] == 40, "what the workers answered stays as it was proven"
    report = run.document(run.layout.report("json"))
    assert report["counts"] == {"succeeded": len(results), "invalid": len(letters)}
    told = airflow.log("piloted_job", run_id, "validate")
    assert f"{len(letters)} rows fail an expectation and are dead letters" in told
    pages = {"validate": ("Data docs", run.layout.data_docs), "report": ("Report", run.layout.report("html"))}
    for task, (name, key) in pages.items():
        address = (airflow_store / key).as_uri()
        path = f"/dags/piloted_job/dagRuns/{run_id}/taskInstances/{task}/links"
        assert airflow.call("GET", path)["extra_links"] == {name: address}
    scores = report["verdict"]["judge"]
    assert (
        scores["judged"]
        == scores["passed"]
        == len(set(paid(judged_log)) - {row["row_id"] for row in letters})
    )
    assert airflow.clear("piloted_job", run_id, ["prepare_judge"], only_failed=False)
    assert airflow.wait("piloted_job", run_id) == "success", airflow.states("piloted_job", run_id)
    assert Counter(paid(judged_log).values()) == {1: 12}, "a clear pays the judge no second time"
    assert f"data docs: {(airflow_store / run.layout.data_docs).as_uri()}" in told


def test_a_run_that_turns_bad_is_stopped_and_resumes(airflow, airflow_store, gated_job):
    # Three or four bad rows in each shard, sent first as they are the longest.
    texts = [f"ticket {i}" for i in range(30)] + [f"<<invalid 9>> {i}" for i in range(10)]
    fields, log = gated_job(
        "stopped",
        texts,
        pilot=False,
        line={"window": 8, "min_rows": 8, "max_dead": 0.25},
        failure={"max_dead_fraction": 0.5},
    )
    run_id = airflow.trigger("any_job", {"spec": fields})
    assert airflow.wait("any_job", run_id) == "failed"
    run = StoredRun(airflow_store, "stopped", run_id)
    stop = read_stop(run.store, run.plan.folder)
    assert stop is not None
    assert "of the last 8 rows did not succeed" in stop.reason
    failed = [name for name, state in airflow.states("any_job", run_id).items() if state == "failed"]
    # Workers of two shards may stop the line at the same moment; the marker names one of them.
    infer = [int(name[6:-1]) for name in failed if name.startswith("infer[")]
    assert any(f"stopped by {stop.by}" in airflow.log("any_job", run_id, "infer", i) for i in infer)
    assert "airflow_batchinfer resume" in airflow.log("any_job", run_id, "gate")
    assert run.document(run.layout.report("json"))["status"] == "stopped"
    kept = {row for shard in run.plan.shards for row in run.rows_in_parts(shard.shard)}
    assert kept

    clear_stop(run.store, run.plan.folder)
    while airflow.clear("any_job", run_id) and airflow.wait("any_job", run_id) == "failed":
        assert clear_stop(run.store, run.plan.folder), airflow.states("any_job", run_id)
    assert run.ledger["counts"] == {"succeeded": 30, "invalid": 10} | dict.fromkeys(
        run.ledger["counts"].keys() - {"succeeded", "invalid"}, 0
    )
    times = paid(log)
    assert all(times[row] == 1 for row in kept)


def test_drift_against_the_run_before_is_told(airflow, airflow_store, gated_job):
    texts = [f"ticket {i}" for i in range(40)]
    for answer in LABELS:
        fields, _ = gated_job("drifting", texts, pilot=False, engine={"answer": answer})
        run_id = airflow.trigger("any_job", {"spec": fields})
        assert airflow.wait("any_job", run_id) == "success", airflow.states("any_job", run_id)
    told = airflow.log("any_job", run_id, "validate")
    assert "drift of labels: found `no` 0.0% before, 100.0% now" in told
    run = StoredRun(airflow_store, "drifting", run_id)
    assert "drift of labels" in json.dumps(run.document(run.layout.validation))
