"""Several shards in one worker, and inputs that are not what the plan says."""

from __future__ import annotations

import time

import pytest

from airflow_batchinfer.errors import ExitCode
from tests.unit.worker.conftest import Run, assert_sums, texts


def test_one_worker_commits_each_of_its_shards(run: Run) -> None:
    run.plan(texts(30), texts(20, first=30), texts(10, first=50), options={"max_in_flight": 8})
    began = time.monotonic()
    assert run.work("0,2,1")[0] == 0
    process_seconds = time.monotonic() - began
    for shard, rows in enumerate((30, 20, 10)):
        commit = run.commit(shard)
        assert_sums(commit)
        assert commit.sent == rows
        assert run.outcomes(shard) == {"succeeded": rows}
    assert set(run.paid().values()) == {1}
    held = [run.commit(shard).held_seconds for shard in range(3)]
    assert 0 < sum(held) <= process_seconds  # shared out among the shards, not told three times


def test_the_next_shard_enters_while_the_last_one_drains(run: Run) -> None:
    """The last row of shard 0 takes long; shard 1 must not wait for it."""
    run.plan(
        texts(5, {4: "<<hang>>"}),
        texts(40, first=5),
        engine="FaultyEngine",
        options={"max_in_flight": 4, "delay_seconds": 0.01},
        retry={"row_timeout_seconds": 3, "engine_attempts": 1},
    )
    assert run.work("0,1")[0] == 0
    assert run.commit(1).created_at < run.commit(0).created_at
    assert run.outcomes(0) == {"succeeded": 4, "failed": 1}


def test_a_shard_with_a_commit_is_skipped(run: Run) -> None:
    run.plan(texts(10), texts(10, first=10))
    assert run.work("0")[0] == 0
    assert run.work("0,1")[0] == 0
    assert set(run.paid().values()) == {1}
    assert len(run.files("commit.json", 0)) == len(run.files("commit.json", 1)) == 1


def test_an_empty_shard_has_a_commit_too(run: Run) -> None:
    run.plan([])
    assert run.work()[0] == 0
    assert run.commit().counts == {}


def test_rows_that_are_decided_without_the_engine_start_none(run: Run) -> None:
    """Blank rows and rows that do not render, over more than one block: parts as always, and no engine."""
    log = run.folder / "starts"
    rows = [None if i % 2 else "not a number" for i in range(3000)]
    run.plan(
        rows,
        options={"starts_log": str(log)},
        prompt={"template": "{{ 100 // (text | int) }}"},
        checkpoint={"rows": 500},
    )
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.commit().reasons == {"empty_input": 1500, "render_error": 1500}
    assert_sums(run.commit())
    assert len(run.parts()) >= 3
    assert log.read_text().split() == ["preload"]


def test_the_first_row_that_needs_the_engine_starts_it(run: Run) -> None:
    log = run.folder / "starts"
    run.plan([None] * 2000, [None] * 300 + ["row"], options={"starts_log": str(log)})
    assert run.work("0,1")[0] == ExitCode.COMMITTED
    assert run.outcomes(0) == {"rejected": 2000}
    assert run.outcomes(1) == {"rejected": 300, "succeeded": 1}
    assert log.read_text().split() == ["preload", "start"]


def test_rows_that_earlier_attempts_made_durable_start_none(run: Run) -> None:
    log = run.folder / "starts"
    run.plan(texts(50), options={"starts_log": str(log)})
    assert run.work()[0] == 0
    for key in run.files("commit.json"):
        run.store.delete(key)
    assert run.work()[0] == 0
    assert log.read_text().split() == ["preload", "start", "preload"]
    assert set(run.paid().values()) == {1}


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_rows_file_is_bad_input_and_names_the_file(run: Run, damage: str) -> None:
    run.plan(texts(50))
    key = run.planned.shards[0].rows_key
    data = bytearray(run.store.read_bytes(key))
    if damage == "gone":
        run.store.delete(key)
    else:
        data[len(data) // 2] ^= 1
        run.store.write_bytes(key, bytes(data if damage == "flip" else data[:-1]))
    code, said = run.work()
    assert code == ExitCode.BAD_INPUT
    assert key in said
    assert "clear `split`" in said


def test_bad_input_of_one_shard_keeps_what_the_shard_before_it_has_paid(run: Run) -> None:
    run.plan(texts(30), texts(10, first=30), options={"delay_seconds": 0.2, "max_in_flight": 64})
    run.store.delete(run.planned.shards[1].rows_key)
    assert run.work("0,1")[0] == ExitCode.BAD_INPUT
    assert run.outcomes(0) == {"succeeded": 30}
    assert set(run.paid().values()) == {1}
    assert not run.files("suspects.json"), (
        "a damaged file says nothing against the rows that were in the engine"
    )


def test_a_shard_that_the_plan_does_not_have(run: Run) -> None:
    run.plan(texts(3))
    assert run.work("7") == (
        ExitCode.BAD_SPEC,
        "batchinfer: --shards: the plan has no shard 7; it has 0 to 0",
    )


def test_a_run_that_was_never_planned(run: Run) -> None:
    run.plan(texts(3))
    run.store.delete(run.layout.plan)
    code, said = run.work()
    assert code == ExitCode.BAD_INPUT
    assert "give the folder of a planned run" in said


@pytest.mark.parametrize("arguments", [["--store-option", "nonsense"], ["--shards", "1-3"]])
def test_arguments_that_cannot_be_read(run: Run, arguments: list[str]) -> None:
    run.plan(texts(3))
    code, said = run.work("0", *arguments)
    assert code == ExitCode.BAD_SPEC
    assert said.startswith(f"batchinfer: {arguments[0]}: ")
