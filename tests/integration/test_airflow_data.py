"""Replay and nightly increments through a real scheduler and API server."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.integration.runs import StoredRun, job_fields, write_input

pytestmark = pytest.mark.airflow_env


def run(airflow, dag_id, conf):
    run_id = airflow.trigger(dag_id, conf)
    assert airflow.wait(dag_id, run_id) == "success", airflow.states(dag_id, run_id)
    return run_id


def test_replay_merges_back_in_place_and_a_second_one_changes_nothing(airflow, airflow_store, tmp_path):
    texts = [f"ticket {i}" if i % 6 else "  " for i in range(18)]
    source = write_input(tmp_path / "rows.jsonl", texts)
    fields = job_fields(airflow_store, "replayed", source, failure={"max_dead_fraction": 1.0})
    home = run(airflow, "any_job", {"spec": fields})
    stored = StoredRun(airflow_store, "replayed", home)
    assert [(r["row_id"], r["status"]) for r in stored.dead_letters()] == [
        (0, "open"),
        (6, "open"),
        (12, "open"),
    ]
    ledger = stored.ledger

    # The blank text was rejected; with the ticket's text carried along it still is, with its id it is not.
    conf = {
        "job": "replayed",
        "store": str(airflow_store),
        "reasons": ["empty_input"],
        "template": "Ticket {{ ticket }}: {{ text }}",
    }
    again = run(airflow, "replay", conf)
    assert [r["status"] for r in stored.dead_letters()] == ["resolved"] * 3
    results = stored.results()
    assert [r["row_id"] for r in results] == list(range(18))
    assert [r["row_id"] for r in results if r["answered_in"] == again] == [0, 6, 12]
    assert {r["run_id"] for r in results} == {home}
    assert stored.ledger == ledger

    run(airflow, "replay", conf)
    assert stored.results() == results


def test_second_night_runs_what_changed(airflow, airflow_store, tmp_path):
    texts = [f"ticket {i}" for i in range(20)]
    source = write_input(tmp_path / "rows.jsonl", texts)
    fields = job_fields(airflow_store, "nightly", source, incremental=True)
    first = run(airflow, "any_job", {"spec": fields})
    write_input(source, ["edited", *texts[1:], "added"])
    second = run(airflow, "any_job", {"spec": fields})
    third = run(airflow, "any_job", {"spec": fields})
    found = {
        run_id: Counter(
            (r["change"], r["answered_in"])
            for r in StoredRun(airflow_store, "nightly", run_id).results()
            if r["run_id"] == run_id
        )
        for run_id in (second, third)
    }
    assert found[second] == {("changed", second): 1, ("new", second): 1, ("unchanged", first): 19}
    assert found[third] == {("unchanged", first): 19, ("unchanged", second): 2}
