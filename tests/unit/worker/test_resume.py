"""Kills, resumption and what was paid: the engine's own log is the witness."""

from __future__ import annotations

import signal
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_batchinfer.errors import ExitCode
from airflow_batchinfer.run.epoch import new_epoch
from airflow_batchinfer.worker import resume
from tests.releases import OTHER, rewrite_as_other_release
from tests.unit.worker.conftest import Run, assert_sums, texts

SLOW = {"delay_seconds": 0.1, "max_in_flight": 8}
SMALL_PARTS = {"rows": 20, "seconds": 60, "progress_seconds": 0.1}


def test_every_row_ends_once_and_is_paid_once(run: Run) -> None:
    run.plan(texts(300), options={"max_in_flight": 16}, checkpoint={"rows": 50})
    assert run.work()[0] == ExitCode.COMMITTED
    results = run.results()
    assert set(results) == set(range(300))
    assert set(run.paid().values()) == {1}
    assert run.outcomes() == {"succeeded": 300}
    assert results[7]["output"].endswith("to Answer: row 7")
    commit = run.commit()
    assert_sums(commit)
    assert commit.tokens.total == run.paid_tokens()
    assert len(commit.parts) == 6
    assert commit.overlapping_rows == 0
    assert run.progress().state == "committed"
    assert not run.files("suspects.json")


def test_three_kills_cost_only_what_was_not_yet_in_a_part(run: Run) -> None:
    run.plan(texts(400), options=SLOW, checkpoint=SMALL_PARTS)
    unflushed: set[int] = set()
    for more in (3, 5, 5):
        wanted = len(run.parts()) + more
        worker = run.start()
        run.kill_when(worker, lambda wanted=wanted: len(run.parts()) >= wanted)  # type: ignore[misc]
        unflushed |= set(run.paid()) - run.durable()
    assert run.work()[0] == ExitCode.COMMITTED
    paid = run.paid()
    assert set(run.results()) == set(range(400)) == set(paid)
    assert {row for row, times in paid.items() if times > 1} <= unflushed
    commit = run.commit()
    assert_sums(commit)
    assert commit.attempts == 4
    assert commit.tokens.total <= run.paid_tokens()


def test_a_commit_is_final(run: Run) -> None:
    run.plan(texts(10), checkpoint={"rows": 5})
    assert run.work()[0] == 0
    first = run.commit()
    assert run.work()[0] == 0
    assert run.commit() == first
    assert set(run.paid().values()) == {1}
    assert len(run.files("commit.json")) == 1


def test_all_rows_durable_but_no_commit_needs_no_engine(run: Run) -> None:
    run.plan(texts(30), checkpoint={"rows": 10}, copies={4: 3})
    assert run.work()[0] == 0
    before = run.commit()
    run.store.delete(run.files("commit.json")[0])
    assert run.work()[0] == 0
    after = run.commit()
    assert sum(run.paid().values()) == 30
    assert after.engine == {}
    assert (after.counts, after.tokens, after.parts) == (before.counts, before.tokens, before.parts)
    assert after.counts == {"succeeded": 33}


def test_a_half_written_part_is_set_aside_and_its_rows_run_again(run: Run) -> None:
    run.plan(texts(60), checkpoint={"rows": 20})
    assert run.work()[0] == 0
    run.store.delete(run.files("commit.json")[0])
    torn, flipped, whole = run.parts()
    run.store.write_bytes(torn, run.store.read_bytes(torn)[:-40])
    data = bytearray(run.store.read_bytes(flipped))
    data[len(data) // 4] ^= 0xFF
    run.store.write_bytes(flipped, bytes(data))
    kept = set(run.read_part(whole)["row_id"].to_pylist())
    worker = run.start()
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert said.count("is set aside") == 2
    assert torn in said
    paid = run.paid()
    assert {row for row, times in paid.items() if times == 2} == set(range(60)) - kept
    assert whole in [part.key for part in run.commit().parts]
    assert torn not in [part.key for part in run.commit().parts]
    assert set(run.results()) == set(range(60))


def test_a_part_that_does_not_fit_into_memory_now_is_no_damaged_part(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.plan(texts(10))
    assert run.work()[0] == 0
    monkeypatch.setattr(resume, "_checked", lambda *_: pa.allocate_buffer(1 << 60))
    planned, fingerprint = run.planned.shards[0], run.planned.fingerprint
    with pytest.raises(MemoryError, match=r"not enough memory to read .*part-00000\.parquet"):
        resume.resume(run.store, run.layout, planned, fingerprint, new_epoch())


def test_parts_with_another_fingerprint_do_not_count(run: Run) -> None:
    run.plan(texts(20))
    assert run.work()[0] == 0
    plan = run.planned.model_copy(update={"fingerprint": "0" * 16})
    plan.write(run.store, run.layout.plan)
    run.planned = plan
    assert run.work()[0] == 0
    assert set(run.paid().values()) == {2}
    assert run.commit().attempts == 1


def test_parts_that_overlap_are_counted_and_the_first_wins(run: Run) -> None:
    run.plan(texts(40), checkpoint={"rows": 10})
    assert run.work()[0] == 0
    run.store.delete(run.files("commit.json")[0])
    parts = run.parts()
    # A second attempt's part over rows of two of the first's parts, as a zombie would leave it.
    epoch = new_epoch()
    table = run.read_part(parts[0])
    other = run.read_part(parts[1])
    metadata = {**table.schema.metadata, b"batchinfer.epoch": epoch.encode()}
    mixed = pa.concat_tables([table.slice(5), other.slice(0, 5)]).replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    pq.write_table(mixed, sink)
    run.store.delete(parts[1])
    run.store.write_bytes(run.layout.part(0, epoch, 0), sink.getvalue().to_pybytes())
    assert run.work()[0] == 0
    commit = run.commit()
    assert commit.overlapping_rows == 5
    assert_sums(commit)
    assert set(run.results()) == set(range(40))
    assert sum(run.paid().values()) == 45


def test_two_attempts_at_once_both_finish_and_readers_choose_one(run: Run) -> None:
    run.plan(texts(200), options=SLOW, checkpoint=SMALL_PARTS)
    workers = [run.start(), run.start()]
    assert [run.end_of(worker)[0] for worker in workers] == [0, 0]
    assert run.files("commit.json")
    assert set(run.results()) == set(range(200))
    assert_sums(run.commit())


def test_an_older_attempt_that_wakes_up_after_the_commit_pays_for_no_more(run: Run) -> None:
    """It looks at the store before it sends a row, though by its interval it need not look for long."""
    run.plan(texts(300), options=SLOW, checkpoint={**SMALL_PARTS, "progress_seconds": 600})
    older = run.start()
    run.wait_until(lambda: len(run.parts()) >= 1, older)
    older.send_signal(signal.SIGSTOP)
    suspended = time.monotonic()
    assert run.work()[0] == 0
    first = {row: result["output"] for row, result in run.results().items()}
    paid = run.paid().total()
    time.sleep(max(0.0, suspended + 1.5 - time.monotonic()))
    older.send_signal(signal.SIGCONT)
    assert run.end_of(older)[0] == 0
    assert run.paid().total() - paid <= SLOW["max_in_flight"]
    assert len(run.files("commit.json")) == 1
    assert {row: result["output"] for row, result in run.results().items()} == first


def test_a_worker_of_several_shards_leaves_them_to_the_attempt_that_has_committed_one(run: Run) -> None:
    run.plan(texts(300), texts(300, first=300), options=SLOW, checkpoint=SMALL_PARTS)
    older = run.start("0,1")
    run.wait_until(lambda: len(run.parts()) >= 1, older)
    older.send_signal(signal.SIGSTOP)
    assert run.work("0")[0] == 0
    older.send_signal(signal.SIGCONT)
    code, said = run.end_of(older)
    assert code == ExitCode.RECLAIMED
    assert said == f"batchinfer: attempt {run.commit().epoch} has committed shard 0000"
    assert run.work("0,1")[0] == 0
    assert run.outcomes(1) == {"succeeded": 300}


def test_parts_come_by_time_as_well(run: Run) -> None:
    run.plan(texts(40), options={"delay_seconds": 0.05, "max_in_flight": 2}, checkpoint={"seconds": 0.2})
    assert run.work()[0] == 0
    assert len(run.commit().parts) > 2


def _with_a_column_of_another_release(run: Run, key: str, release: str) -> None:
    table = run.read_part(key)
    metadata = {**table.schema.metadata, b"batchinfer.written_by": release.encode()}
    table = table.append_column("speed", pa.nulls(table.num_rows, pa.string()))
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(metadata), sink)
    run.store.write_bytes(key, sink.getvalue().to_pybytes())


def test_a_part_that_another_release_wrote_is_not_paid_for_again(run: Run) -> None:
    run.plan(texts(20))
    assert run.work()[0] == 0
    run.store.delete(run.files("commit.json")[0])
    _with_a_column_of_another_release(run, run.parts()[0], OTHER)
    code, said = run.work()
    assert code == ExitCode.OTHER_RELEASE
    assert f"holds rows that are paid for, but was written by airflow_batchinfer {OTHER}" in said
    assert set(run.paid().values()) == {1}


@pytest.mark.parametrize("document", ["plan", "commit"])
def test_a_document_that_another_release_wrote_ends_the_worker_before_it_pays(
    run: Run, document: str
) -> None:
    run.plan(texts(20))
    assert run.work()[0] == 0
    key = run.layout.plan if document == "plan" else run.files("commit.json")[0]
    rewrite_as_other_release(run.store, key, speed="fast")
    code, said = run.work()
    assert code == ExitCode.OTHER_RELEASE
    assert f"{document}.json is whole, but was written by airflow_batchinfer {OTHER}" in said
    assert set(run.paid().values()) == {1}
