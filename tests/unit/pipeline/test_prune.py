"""Pruning takes old runs out of the tables, and none that another run still asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.cli import main
from airflow_batchinfer.errors import SpecError, StaleLedgerError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.prune import prune_tables
from airflow_batchinfer.pipeline.replay import prepare_replay
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.pipeline.standing import standing_of
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store
from tests.unit.pipeline.runs import job, publish_run, table_rows, write_input

pytestmark = pytest.mark.airflow_env


def planned(folder: Path, store: Store, run_id: str, **fields: Any) -> Plan:
    write_input(folder, [{"id": f"k{i}", "text": f"text {i}"} for i in range(20)])
    given = {"path": str(folder / "in"), "id_column": "id"}
    return split(store, job(folder, **({"input": given} | fields)), run_id)


def published(folder: Path, store: Store, run_id: str, **fields: Any) -> Plan:
    plan = planned(folder, store, run_id, **fields)
    publish_run(store, plan, dead=lambda i: Reason.TIMED_OUT if i < 3 else None)
    return plan


def runs_in(store: Store, table: str = "job/results") -> set[str]:
    return {row["run_id"] for row in table_rows(store, table)}


def test_the_newest_runs_stay(tmp_path: Path, store: Store) -> None:
    for run_id in ("z", "y's", "x", "w"):  # planned in this order
        published(tmp_path, store, run_id)
    published(tmp_path, store, "z", name="another")
    would = prune_tables(store, "job", 2, dry_run=True)
    assert (would.runs, would.results, would.dead_letters, would.held) == (["z", "y's"], 34, 6, {})
    assert runs_in(store) == {"z", "y's", "x", "w"}
    assert prune_tables(store, "job", 2) == would
    assert runs_in(store) == {"x", "w"}
    letters = {(row["job"], row["run_id"]) for row in table_rows(store, "dead_letters")}
    assert letters == {("job", "x"), ("job", "w"), ("another", "z")}
    assert runs_in(store, "another/results") == {"z"}
    assert prune_tables(store, "job", 2).runs == []
    assert prune_tables(store, "no job", 1).runs == []


def test_one_run_stays_always(tmp_path: Path, store: Store) -> None:
    published(tmp_path, store, "one")
    with pytest.raises(SpecError, match=r"keep_runs: keep at least 1 run.*got 0"):
        prune_tables(store, "job", 0)
    assert prune_tables(store, "job", 1).runs == []


def test_a_pruned_run_is_as_one_that_was_never_published(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    one = published(tmp_path, store, "one")
    replay = prepare_replay(store, one.folder, "again")
    publish_run(store, replay, dead=lambda i: Reason.TIMED_OUT if i < 1 else None)
    published(tmp_path, store, "two")
    assert prune_tables(store, "job", 1).runs == ["one"]
    assert main(["runs", "job", "--store", store.uri]) == 0
    assert "pruned" in capsys.readouterr().out
    with pytest.raises(
        StaleLedgerError,
        match=f"'one' was pruned from the tables: clear the merge of {one.folder}, then of {replay.folder}",
    ):
        prepare_replay(store, one.folder, "once more")
    with pytest.raises(StaleLedgerError, match="is not published yet"):
        merge(store, replay.folder)
    assert runs_in(store) == {"two"}

    assert merge(store, one.folder).results == 17
    standing = standing_of(store, one)
    assert (standing.succeeded, standing.resolved, standing.dead) == (17, 0, 3)
    # What the first replay has answered and paid for is not in the table yet.
    with pytest.raises(StaleLedgerError, match=f"clear the merge of {replay.folder}, which"):
        prepare_replay(store, one.folder, "once more")
    merge(store, replay.folder)
    standing = standing_of(store, one)
    assert (standing.succeeded, standing.resolved, standing.dead) == (17, 2, 1)
    prepare_replay(store, one.folder, "once more")


def test_a_run_whose_rows_an_incremental_run_is_about_to_keep_stays(tmp_path: Path, store: Store) -> None:
    one = published(tmp_path, store, "one", incremental=True)
    two = planned(tmp_path, store, "two", incremental=True)
    assert two.kept is not None
    published(tmp_path, store, "three")
    pruned = prune_tables(store, "job", 1)
    assert (pruned.runs, pruned.held) == ([], {"one": two.folder})
    assert merge_of(store, two) == 17 + 3
    # An incremental run that stays may be merged again, and asks for the same rows then.
    assert prune_tables(store, "job", 2, dry_run=True).held == {"one": two.folder}
    assert prune_tables(store, "job", 1).runs == ["one", "two"]
    assert prune_tables(store, "job", 1).held == {}
    assert merge(store, one.folder).results == 17


def test_a_run_that_a_replay_is_about_to_repair_stays(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    one = published(tmp_path, store, "one")
    replay = prepare_replay(store, one.folder, "again")
    published(tmp_path, store, "two")
    assert main(["prune", "job", "--keep-runs", "1", "--store", store.uri]) == 0
    assert f"one stays: {replay.folder} still needs its rows" in capsys.readouterr().out
    publish_run(store, replay)
    assert standing_of(store, one).dead == 0
    assert prune_tables(store, "job", 1).runs == ["one"]


def merge_of(store: Store, plan: Plan) -> int:
    result = publish_run(store, plan)
    return result.results + result.kept
