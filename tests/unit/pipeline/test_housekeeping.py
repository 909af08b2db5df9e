"""Housekeeping takes what nobody needs, and nothing else."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

from airflow_batchinfer.cli import main
from airflow_batchinfer.errors import ExitCode
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.pipeline.housekeeping import delete_orphans, delete_runs, vacuum_tables
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.pipeline.replay import prepare_replay
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.pipeline.standing import standing_of
from airflow_batchinfer.pipeline.tables import table_dataset
from airflow_batchinfer.run.layout import RunLayout, runs_dir
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store
from tests.releases import rewrite_as_other_release
from tests.unit.pipeline.runs import commit_shard, job, publish_run, table_rows, write_input

pytestmark = pytest.mark.airflow_env

DAY = timedelta(days=1)


@pytest.fixture
def plan(tmp_path: Path, store: Store) -> Plan:
    write_input(tmp_path, [{"text": f"text {i}"} for i in range(40)])
    return split(store, job(tmp_path, sharding={"max_rows": 20}), "run")


def age(store: Store, prefix: str, days: float) -> None:
    then = time.time() - days * 86_400
    for info in list(store.list(prefix)):
        os.utime(store.uri_of(info.key), (then, then))


def test_old_runs_go_and_tables_stay(tmp_path: Path, store: Store, plan: Plan) -> None:
    publish_run(store, plan)
    age(store, plan.folder, 10)
    young = split(store, job(tmp_path), "young")
    assert delete_runs(store, "job", timedelta(days=20)).runs == []
    would = delete_runs(store, "job", timedelta(days=5), dry_run=True)
    assert (would.runs, store.exists(RunLayout(plan.folder).plan)) == ([plan.folder], True)
    assert delete_runs(store, "job", timedelta(days=5)) == would
    assert list(store.list(plan.folder)) == []
    assert store.exists(RunLayout(young.folder).plan)
    assert len(table_rows(store, "job/results")) == 40


def test_a_run_that_still_writes_is_not_old(store: Store, plan: Plan) -> None:
    age(store, plan.folder, 10)
    commit_shard(store, plan, plan.shards[0])
    assert delete_runs(store, "job", timedelta(days=5)).runs == []


def test_a_slip_of_the_sign_deletes_nothing(
    store: Store, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["delete", "job", "--store", plan.spec.store, "--older-than-days", "-5"]
    assert main(arguments) == ExitCode.BAD_SPEC
    assert "not negative (got -5 days" in capsys.readouterr().err
    assert store.exists(RunLayout(plan.folder).plan)


def test_generations_go_together(tmp_path: Path, store: Store, plan: Plan) -> None:
    """With the first alone gone, the second would not be found, and be planned and paid again."""
    spec = job(tmp_path, prompt={"template": "New: {{ text }}"}, on_changed_spec="restart")
    second = split(store, spec, "run")
    publish_run(store, second)
    age(store, plan.folder, 10)
    assert delete_runs(store, "job", timedelta(days=5)).runs == []
    assert split(store, spec, "run") == second
    age(store, second.folder, 10)
    assert delete_runs(store, "job", timedelta(days=5)).runs == [second.folder, plan.folder]
    assert list(store.list(runs_dir("job"))) == []


def test_replays_stay_and_go_with_their_run(store: Store, plan: Plan) -> None:
    publish_run(store, plan, dead=lambda i: Reason.OVER_LONG if i < 4 else None)
    age(store, plan.folder, 10)
    first = prepare_replay(store, plan.folder, "first")
    assert delete_runs(store, "job", timedelta(days=5)).runs == []  # the replay could not be merged
    publish_run(store, first, dead=lambda i: Reason.TIMED_OUT if i < 2 else None)
    age(store, first.folder, 10)
    assert delete_runs(store, "job", timedelta(days=5)).runs == []  # its letters are wanted by the next
    second = prepare_replay(store, plan.folder, "second")
    publish_run(store, second, dead=lambda i: Reason.TIMED_OUT if i < 1 else None)
    letters = {r["row_id"]: r for r in table_rows(store, "dead_letters")}
    assert [letters[i]["status"] for i in range(4)] == ["replayed", *["resolved"] * 3]
    assert letters[0]["replays"] == 2
    for folder in (plan.folder, first.folder, second.folder):
        age(store, folder, 10)
    assert len(delete_runs(store, "job", timedelta(days=5)).runs) == 3


def test_a_replay_deleted_by_hand_holds_up_no_other(store: Store, plan: Plan) -> None:
    publish_run(store, plan, dead=lambda i: Reason.OVER_LONG if i < 4 else None)
    first = prepare_replay(store, plan.folder, "first")
    publish_run(store, first, dead=lambda i: Reason.TIMED_OUT if i < 2 else None)
    for info in list(store.list(first.folder)):
        store.delete(info.key)
    publish_run(store, prepare_replay(store, plan.folder, "second"))
    assert [r["row_id"] for r in table_rows(store, "job/results")] == list(range(40))
    assert {r["status"] for r in table_rows(store, "dead_letters")} == {"resolved"}
    assert standing_of(store, plan).resolved == 4


def test_orphans(store: Store, plan: Plan) -> None:
    layout = RunLayout(plan.folder)
    named = commit_shard(store, plan, plan.shards[0])
    orphan = layout.part(0, "20260101T000000000Z-00000000", 0)
    resumable = layout.part(1, "20260101T000000000Z-00000000", 0)
    overtaken = layout.rows(0, "20260101T000000000Z-00000000")
    for key in (orphan, resumable, overtaken):
        store.write_bytes(key, b"x")
    assert delete_orphans(store, "job").objects == 0  # too young: its writer may be at work
    age(store, plan.folder, 2)
    assert delete_orphans(store, "job").objects == 2
    assert not store.exists(orphan)
    assert not store.exists(overtaken)
    assert store.exists(resumable)
    assert all(store.exists(part.key) for part in named.parts)
    commit_shard(store, plan, plan.shards[1])
    assert reconcile(store, plan.folder).complete


@pytest.mark.parametrize("document", ["plan", "validation", "commit"])
def test_a_run_that_cannot_be_read_is_left_alone_and_holds_up_no_other(
    tmp_path: Path, store: Store, plan: Plan, document: str
) -> None:
    publish_run(store, plan)
    other = split(store, job(tmp_path), "other")
    left = [RunLayout(p.folder).rows(0, "20260101T000000000Z-00000000") for p in (plan, other)]
    for key in left:
        store.write_bytes(key, b"overtaken")
    if document == "validation":
        store.write_bytes(RunLayout(plan.folder).validation, b"{}")
    else:
        keys = [i.key for i in store.list(plan.folder) if i.key.endswith(f"/{document}.json")]
        rewrite_as_other_release(store, keys[0], speed="fast")
    age(store, "job", 2)
    assert delete_orphans(store, "job").objects == 1
    assert [store.exists(key) for key in left] == [True, False]


def test_a_replay_that_cannot_be_read_still_keeps_its_run(store: Store, plan: Plan) -> None:
    publish_run(store, plan, dead=lambda i: Reason.OVER_LONG if i < 4 else None)
    age(store, plan.folder, 10)
    replay = prepare_replay(store, plan.folder, "first")
    rewrite_as_other_release(store, RunLayout(replay.folder).plan, speed="fast")
    assert delete_runs(store, "job", timedelta(days=5)).runs == []


def test_vacuum_keeps_the_current_version(store: Store, plan: Plan) -> None:
    publish_run(store, plan)
    store.delete(RunLayout(plan.folder).merge)
    merge(store, plan.folder)
    before = table_rows(store, "job/results")
    assert vacuum_tables(store, "job").objects == 0
    assert vacuum_tables(store, "job", timedelta(0), dry_run=True).objects >= 1
    assert vacuum_tables(store, "job", timedelta(0)).objects >= 1
    assert table_rows(store, "job/results") == before


@pytest.mark.parametrize("run_id", ["run", "manual__2026-01-01T00:00:00+00:00"])
def test_vacuum_keeps_old_files_that_were_replaced_just_now(
    tmp_path: Path, store: Store, run_id: str
) -> None:
    """Somebody may be reading them."""
    write_input(tmp_path, [{"text": f"text {i}"} for i in range(40)])
    plan = split(store, job(tmp_path), run_id)
    publish_run(store, plan)
    age(store, "job/results", 8)
    reader = table_dataset(store, "job/results")
    store.delete(RunLayout(plan.folder).merge)
    merge(store, plan.folder)
    assert vacuum_tables(store, "job").objects == 0
    assert reader.to_table().num_rows == 40
    assert vacuum_tables(store, "job", timedelta(0)).objects == 1
    assert vacuum_tables(store, "job", timedelta(0)).objects == 0
    assert len(table_rows(store, "job/results")) == 40


def test_vacuum_takes_what_a_killed_merge_has_left(store: Store, plan: Plan) -> None:
    publish_run(store, plan)
    left = "job/results/run_id=run/merged_by=run/part-of-no-commit.parquet"
    store.write_bytes(left, b"x")
    assert vacuum_tables(store, "job").objects == 0  # too young: its merge may be at work
    age(store, "job/results", 8)
    assert vacuum_tables(store, "job").objects == 1
    assert not store.exists(left)
    assert len(table_rows(store, "job/results")) == 40


def test_commands(store: Store, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", plan.folder, "--store", store.uri]) == ExitCode.BAD_INPUT
    assert "has no ledger yet: reconcile writes it" in capsys.readouterr().err
    publish_run(store, plan)
    assert main(["account", plan.folder, "--store", store.uri]) == 0
    assert "succeeded            40" in capsys.readouterr().out
    assert main(["sweep", "job", "--store", store.uri, "--dry-run"]) == 0
    assert main(["delete", "job", "--store", store.uri, "--older-than-days", "0", "--dry-run"]) == 0
    assert plan.folder in capsys.readouterr().out
    assert store.exists(RunLayout(plan.folder).plan)


def test_the_operator_prunes_if_it_is_told_to(tmp_path: Path, store: Store, plan: Plan) -> None:
    from airflow_batchinfer.operators.housekeeping import HousekeepingOperator

    publish_run(store, plan)
    publish_run(store, split(store, job(tmp_path), "next"))
    arguments = {"task_id": "housekeeping", "job": "job", "store": store.uri}
    assert HousekeepingOperator(**arguments).execute({})["pruned"] == []
    assert HousekeepingOperator(**arguments, keep_runs=1).execute({})["pruned"] == ["run"]
    assert {r["run_id"] for r in table_rows(store, "job/results")} == {"next"}


def test_the_operator_does_all_of_it(store: Store, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_batchinfer.operators.housekeeping import HousekeepingOperator

    publish_run(store, plan)
    leftover = Path(store.uri_of(f"{plan.folder}/shards/00000/.tmp-0123"))
    leftover.write_bytes(b"ha")
    os.utime(leftover, (0, 0))
    store.write_bytes(RunLayout(plan.folder).rows(0, "20260101T000000000Z-00000000"), b"overtaken")
    age(store, plan.folder, 2)
    arguments = {"task_id": "housekeeping", "job": "job"}

    done = HousekeepingOperator(**arguments, store=store.uri).execute({})
    assert done == {"pruned": [], "runs": [], "orphans": 1, "table_files": 0, "unfinished": 1}
    assert not leftover.exists()
    monkeypatch.setenv("AIRFLOW__BATCHINFER__STORE", store.uri)
    done = HousekeepingOperator(**arguments, delete_runs_after=DAY, keep_runs=1).execute({})
    assert done == {"pruned": [], "runs": [plan.folder], "orphans": 0, "table_files": 0, "unfinished": 0}
    assert len(table_rows(store, "job/results")) == 40
