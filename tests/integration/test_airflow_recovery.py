"""Killing, clearing and lying: what a real scheduler makes of it, and what the store keeps."""

from __future__ import annotations

import os
import signal

import pytest
import yaml

from tests.integration.runs import (
    StoredRun,
    job_fields,
    paid,
    parent_of,
    wait_for_parts,
    wait_until,
    worker_of,
    write_input,
)

pytestmark = pytest.mark.airflow_env

IN_FLIGHT = 2
SLOW = {"delay_seconds": 0.5, "max_in_flight": IN_FLIGHT}
"""About four rows a second: long enough to be caught half-way."""
PART_ROWS = 2
SHARD_ROWS, ROWS = 28, 56


@pytest.fixture
def slow_job(airflow_store, tmp_path):
    """Make (fields, log of paid rows) of a job over two shards of `SHARD_ROWS`."""

    def make(name, **overrides):
        source = write_input(tmp_path / "rows.jsonl", [f"ticket {i}" for i in range(ROWS)])
        log = tmp_path / "paid.log"
        fields = job_fields(
            airflow_store,
            name,
            source,
            model={"engine": {**SLOW, "paid_log": str(log)}},
            sharding={"max_rows": SHARD_ROWS, "max_parallel_shards": 2},
            checkpoint={"rows": PART_ROWS, "grace_seconds": 2},
            **overrides,
        )
        return fields, log

    return make


def assert_each_row_once(run):
    for shard in run.plan.shards:
        assert set(run.rows_in_parts(shard.shard).values()) == {1}
    assert [row["row_id"] for row in run.results()] == list(range(ROWS))


def test_clearing_what_failed_resumes_from_the_parts(airflow, airflow_store, slow_job):
    fields, log = slow_job("killed")
    run_id = airflow.trigger("any_job", {"spec": fields})
    run = StoredRun(airflow_store, "killed", run_id)
    os.kill(wait_for_parts(run, 1), signal.SIGKILL)
    assert airflow.wait("any_job", run_id) == "failed"
    states = airflow.states("any_job", run_id)
    assert states == {
        "split": "success",
        "infer[0]": "success",
        "infer[1]": "failed",
        "reconcile": "failed",
        "validate": "upstream_failed",
        "merge": "upstream_failed",
        "report": "failed",
        "gate": "failed",
    }
    assert "the worker was killed by SIGKILL" in airflow.log("any_job", run_id, "infer", 1)
    durable = run.rows_in_parts(1)
    assert 0 < len(durable) < SHARD_ROWS
    assert "shard 1: no commit; the last attempt" in airflow.log("any_job", run_id, "reconcile")
    assert (run.folder / "report.html").exists(), "a failed run needs its report most"
    failed = next(t for t in airflow.tasks("any_job", run_id) if t["map_index"] == 1)
    assert failed["rendered_map_index"].startswith(f"shard 0001 · {SHARD_ROWS} rows · ")
    assert failed["rendered_map_index"].endswith("tokens · worker lost")

    cleared = airflow.clear("any_job", run_id)
    assert "infer[0]" not in cleared
    assert {"infer[1]", "reconcile", "validate", "merge", "report", "gate"} <= set(cleared)
    assert airflow.wait("any_job", run_id) == "success"
    assert_each_row_once(run)
    times = paid(log)
    assert all(times[row] == 1 for row in durable), "nothing in a part is paid twice"
    assert sum(times.values()) - ROWS <= PART_ROWS + IN_FLIGHT, "only what no part held yet is paid again"
    commit = run.commit_of(1)
    assert commit["attempts"] == 2
    assert "resumed" in airflow.log("any_job", run_id, "infer", 1)


def test_a_task_state_is_no_proof(airflow, airflow_store, slow_job):
    """Marked as success by hand, a shard without a commit still keeps the run red (facts A1, A2)."""
    fields, _ = slow_job("forged")
    run_id = airflow.trigger("any_job", {"spec": fields})
    run = StoredRun(airflow_store, "forged", run_id)
    os.kill(parent_of(wait_for_parts(run, 1)), signal.SIGKILL)
    assert airflow.wait("any_job", run_id) == "failed"
    wait_until(
        lambda: worker_of(run.layout.folder, 1) is None,
        "the worker leaves when Airflow's task is gone (fact A11)",
    )
    airflow.set_state("any_job", run_id, "infer", "success", map_index=1)
    cleared = airflow.clear("any_job", run_id)
    assert "infer[1]" not in cleared
    assert airflow.wait("any_job", run_id) == "failed"
    states = airflow.states("any_job", run_id)
    assert (states["infer[1]"], states["reconcile"], states["gate"]) == ("success", "failed", "failed")
    remedy = "clear the `infer` task whose label names shard 0001, with its downstream tasks"
    assert remedy in airflow.log("any_job", run_id, "reconcile")
    (problem,) = run.ledger["problems"]
    assert problem.startswith("shard 1: no commit")

    airflow.clear("any_job", run_id, [["infer", 1]], only_failed=False)
    assert airflow.wait("any_job", run_id) == "success"
    assert_each_row_once(run)


def test_terminated_tasks_never_succeed_and_reclaims_cost_no_retry(airflow, airflow_store, slow_job):
    """SIGTERM to Airflow's task (fact A1) is a failure with a reason; to the worker alone, a reclaim."""
    fields, log = slow_job("terminated")
    run_id = airflow.trigger("retried_job", {"spec": fields})
    run = StoredRun(airflow_store, "terminated", run_id)
    os.kill(wait_for_parts(run, 0), signal.SIGTERM)
    os.kill(parent_of(wait_for_parts(run, 1)), signal.SIGTERM)
    assert airflow.wait("retried_job", run_id) == "success"
    tries = {
        t["map_index"]: t["try_number"]
        for t in airflow.tasks("retried_job", run_id)
        if t["task_id"] == "infer"
    }
    assert tries == {0: 1, 1: 2}
    assert "the worker was reclaimed" in airflow.log("retried_job", run_id, "infer", 0)
    first = airflow.log("retried_job", run_id, "infer", 1, attempt=1)
    assert "reason=worker lost: Airflow ended this task" in first
    assert_each_row_once(run)
    assert max(paid(log).values()) <= 2


def test_a_changed_job_is_named_and_restart_begins_anew(airflow, airflow_store, tmp_path):
    source = write_input(tmp_path / "rows.jsonl", [f"ticket {i}" for i in range(4)])
    fields = job_fields(airflow_store, "changing", source)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(fields))
    run_id = airflow.trigger("any_job", {"file": str(file)})
    assert airflow.wait("any_job", run_id) == "success"
    first = StoredRun(airflow_store, "changing", run_id)
    plan = first.plan

    airflow.clear("any_job", run_id, ["split"], only_failed=False)
    assert airflow.wait("any_job", run_id) == "success"
    assert first.plan == plan, "clearing split gives the same plan"

    file.write_text(yaml.safe_dump(fields | {"prompt": {"template": "Reply: {{ text }}"}}))
    airflow.clear("any_job", run_id, ["split"], only_failed=False)
    assert airflow.wait("any_job", run_id) == "failed"
    assert "prompt.template" in airflow.log("any_job", run_id, "split")
    assert airflow.states("any_job", run_id)["gate"] == "failed"

    changed = {"prompt": {"template": "Reply: {{ text }}"}, "on_changed_spec": "restart"}
    file.write_text(yaml.safe_dump(fields | changed))
    airflow.clear("any_job", run_id)
    assert airflow.wait("any_job", run_id) == "success"
    second = StoredRun(airflow_store, "changing", run_id, generation=2)
    assert second.ledger["complete"]
    assert first.plan == plan, "the old generation stays on disk"
    assert [row["output"].split(" to ")[1] for row in second.results()] == [
        f"Reply: ticket {i}" for i in range(4)
    ]
