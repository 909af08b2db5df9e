"""Publishing: atomic, repeatable, typed; a clear error or a right table, never a wrong one."""

from __future__ import annotations

import csv
import json
import threading
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_batchinfer.errors import BatchInferError, CorruptError, GateError, StaleLedgerError, StoreError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.pipeline import tables
from airflow_batchinfer.pipeline.accounting import answered_of_run, current_account
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.run.commit import chosen_commit
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store
from tests.unit.pipeline.runs import commit_run, commit_shard, job, publish_run, table_rows, write_input

pytestmark = pytest.mark.airflow_env


def planned(folder: Path, store: Store, run_id: str = "run", **fields: Any) -> Plan:
    write_input(folder, [{"text": f"text {i}"} for i in range(100)])
    return split(store, job(folder, **({"sharding": {"max_rows": 20}} | fields)), run_id)


def versions(store: Store) -> tuple[int, int]:
    found = [tables.open_table(store, key) for key in ("job/results", "dead_letters")]
    return tuple(-1 if t is None else int(t.version()) for t in found)  # type: ignore[return-value]


def test_second_merge_changes_nothing(tmp_path: Path, store: Store) -> None:
    plan = planned(tmp_path, store)
    first = publish_run(store, plan)
    before, rows = versions(store), table_rows(store, "job/results")
    assert merge(store, plan.folder) == first
    assert versions(store) == before
    store.delete(RunLayout(plan.folder).merge)  # as if killed between the tables and the note
    assert merge(store, plan.folder).results == 100
    assert table_rows(store, "job/results") == rows


def test_runs_of_a_job_stand_side_by_side(tmp_path: Path, store: Store) -> None:
    for run_id in ("one", "two's"):
        publish_run(
            store, planned(tmp_path, store, run_id), dead=lambda i: Reason.TIMED_OUT if i < 3 else None
        )
    for run_id in ("one", "two's"):
        assert len(table_rows(store, "job/results", run_id=run_id)) == 97
        assert len(table_rows(store, "dead_letters", run_id=run_id)) == 3


def test_a_restarted_run_replaces_its_first_generation(tmp_path: Path, store: Store) -> None:
    publish_run(store, planned(tmp_path, store))
    again = planned(tmp_path, store, prompt={"template": "New {{ text }}"}, on_changed_spec="restart")
    publish_run(store, again, dead=lambda i: Reason.TIMED_OUT if i < 10 else None)
    rows = table_rows(store, "job/results")
    assert (len(rows), {r["generation"] for r in rows}) == (90, {2})
    assert len(table_rows(store, "dead_letters")) == 10


def test_stale_ledgers(tmp_path: Path, store: Store) -> None:
    plan = planned(tmp_path, store)
    with pytest.raises(StaleLedgerError, match="no ledger: clear reconcile"):
        merge(store, plan.folder)
    late = commit_shard(store, plan, plan.shards[0])
    commit_run(store, plan)
    reconcile(store, plan.folder)
    account = current_account(store, plan)
    store.delete(RunLayout(plan.folder).commit(0, late.epoch))
    for read in (
        lambda: merge(store, plan.folder),
        lambda: next(answered_of_run(store, plan, account)),  # as when a commit comes during merge
    ):
        with pytest.raises(StaleLedgerError, match=r"shard 0 .* now has the commit .*clear reconcile"):
            read()
    reconcile(store, plan.folder)
    plan.model_copy(update={"warnings": ["changed"]}).write(store, RunLayout(plan.folder).plan)
    with pytest.raises(StaleLedgerError, match="another plan"):
        merge(store, plan.folder)
    assert versions(store) == (-1, -1)


def test_incomplete_ledger(tmp_path: Path, store: Store) -> None:
    plan = planned(tmp_path, store)
    with pytest.raises(BatchInferError):
        reconcile(store, plan.folder)
    with pytest.raises(StaleLedgerError, match="not complete"):
        merge(store, plan.folder)


def test_verdict_is_obeyed(tmp_path: Path, store: Store) -> None:
    from airflow_batchinfer.pipeline.validate import validate

    plan = planned(tmp_path, store)
    commit_run(store, plan, dead=lambda i: Reason.TIMED_OUT if i % 2 else None)
    reconcile(store, plan.folder)
    with pytest.raises(GateError):
        validate(store, plan.folder)
    with pytest.raises(GateError):
        merge(store, plan.folder)
    assert versions(store) == (-1, -1)


def test_part_damaged_after_reconcile_publishes_nothing(tmp_path: Path, store: Store) -> None:
    plan = planned(tmp_path, store)
    commit_run(store, plan)
    reconcile(store, plan.folder)
    commit = chosen_commit(store, RunLayout(plan.folder), 3, plan.fingerprint)
    assert commit is not None
    store.delete(commit.parts[0].key)
    with pytest.raises(CorruptError, match="part-00000"):
        merge(store, plan.folder)
    assert table_rows(store, "job/results") == []
    assert not store.exists(RunLayout(plan.folder).merge)


def test_rows_that_do_not_add_up_publish_nothing(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_batchinfer.pipeline import accounting as module

    plan = planned(tmp_path, store)
    publish_run(store, plan)
    before = table_rows(store, "job/results")
    store.delete(RunLayout(plan.folder).merge)
    real = module.answered_rows
    monkeypatch.setattr(module, "answered_rows", lambda *a: list(real(*a))[:0])
    with pytest.raises(CorruptError, match="nothing was published"):
        merge(store, plan.folder)
    assert table_rows(store, "job/results") == before


@pytest.mark.parametrize("at", ["results", "letters", "note"])
def test_killed_anywhere_and_run_again(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    from airflow_batchinfer.pipeline import merge as module

    class Killed(BaseException):
        pass

    plan = planned(tmp_path, store)
    commit_run(store, plan, dead=lambda i: Reason.OVER_LONG if i % 9 == 0 else None)
    reconcile(store, plan.folder)
    real = module.publish
    calls = []

    def die(*arguments: Any) -> int:
        calls.append(1)
        if (at, len(calls)) in {("results", 1), ("letters", 2)}:
            raise Killed
        version = real(*arguments)
        if at == "note" and len(calls) == 2:
            raise Killed
        return version

    monkeypatch.setattr(module, "publish", die)
    with pytest.raises(Killed):
        merge(store, plan.folder)
    monkeypatch.undo()
    merge(store, plan.folder)
    ids = [r["row_id"] for r in table_rows(store, "job/results")]
    dead = [r["row_id"] for r in table_rows(store, "dead_letters")]
    assert sorted(ids + dead) == list(range(100))


@pytest.mark.parametrize("there_before", [False, True])
def test_merges_at_once(tmp_path: Path, store: Store, there_before: bool) -> None:
    if there_before:
        publish_run(store, planned(tmp_path, store, name="job"), dead=lambda _: None)
    plan = planned(tmp_path, store, "at once")
    commit_run(store, plan, dead=lambda i: Reason.OVER_LONG if i % 9 == 0 else None)
    reconcile(store, plan.folder)
    errors: list[BaseException] = []

    def go() -> None:
        try:
            merge(store, plan.folder)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(e, StoreError) for e in errors), errors
    ids = [r["row_id"] for r in table_rows(store, "job/results", run_id="at once")]
    dead = [r["row_id"] for r in table_rows(store, "dead_letters", run_id="at once")]
    assert sorted(ids + dead) == list(range(100))


def test_full_disk(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_batchinfer.pipeline import shuffle

    export = [{"format": "jsonl", "path": str(tmp_path / "out.jsonl")}]
    plan = planned(tmp_path, store, export=export)
    commit_run(store, plan)
    reconcile(store, plan.folder)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shuffle.pa, "OSFile", full)
    with pytest.raises(StoreError, match=r"the disk is full .*BATCHINFER_SCRATCH"):
        merge(store, plan.folder)
    assert not (tmp_path / "out.jsonl").exists()


def test_json_answers_become_structs(tmp_path: Path, store: Store) -> None:
    schema = {
        "type": "object",
        "properties": {
            "sentiment": {"type": "string", "enum": ["good", "bad"]},
            "score": {"type": "integer"},
            "share": {"type": "number"},
            "urgent": {"type": ["boolean", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "person": {"$ref": "#/$defs/person"},
            "free": {},
        },
        "$defs": {"person": {"type": "object", "properties": {"name": {"type": "string"}}}},
    }
    plan = planned(tmp_path, store, task={"type": "json", "schema": schema})
    value = {
        "sentiment": "good",
        "score": 7,
        "share": 0.5,
        "urgent": None,
        "tags": ["a", "b"],
        "person": {"name": "שלום 😀"},
        "free": {"x": [1]},
    }
    huge = {**value, "score": 10**30}

    def answer(row: dict[str, Any]) -> str:
        return json.dumps(huge if row["row_id"] == 5 else value)

    publish_run(store, plan, answer=answer)
    rows = table_rows(store, "job/results")
    assert rows[0]["output"] == {**value, "free": '{"x":[1]}'}
    assert rows[5]["output"] is None
    assert json.loads(rows[5]["output_json"])["score"] == 10**30


def test_vectors_and_labels(tmp_path: Path, store: Store) -> None:
    publish_run(store, planned(tmp_path, store, task={"type": "embed"}), answer=lambda _: [0.5, -1.0])
    assert table_rows(store, "job/results")[0]["output"] == [0.5, -1.0]
    plan = planned(tmp_path, store, task={"type": "choice", "labels": ["a", "b"]}, name="labels")
    publish_run(store, plan, answer=lambda _: "b")
    assert table_rows(store, "labels/results")[0]["output"] == "b"


CARRIED = pa.table(
    {
        "text": ["a", "b", "c"],
        "word": pa.array(["x", None, "y"]).dictionary_encode(),
        "long": pa.array(["l", "m", None], pa.large_string()),
        "money": pa.array([Decimal("1.50"), None, Decimal("-3.25")], pa.decimal128(10, 2)),
        "when": pa.array(
            [datetime(2026, 1, 1, 12, tzinfo=UTC), None, None], pa.timestamp("us", "Europe/Berlin")
        ),
        "nanos": pa.array([1_000_000_001, 2, None], pa.timestamp("ns")),
        "count": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "tags": pa.array([["a"], [], None], pa.list_(pa.string())),
        "deep": pa.array([{"a": {"b": [1]}}, None, {"a": None}]),
        "raw": pa.array([b"\x00\xff", None, b""]),
    }
)


def test_carried_types_come_back(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, CARRIED)
    names = CARRIED.column_names[1:]
    export = [{"format": "parquet", "path": str(tmp_path / "{job}-{run_id}.parquet")}]
    given = {"path": str(tmp_path / "in"), "carry": names}
    plan = split(store, job(tmp_path, input=given, export=export), "run")
    publish_run(store, plan)
    exported = pq.read_table(tmp_path / "job-run.parquet")
    for name in names:
        assert exported.schema.field(name).type == CARRIED.schema.field(name).type, name
        assert exported[name].to_pylist() == CARRIED[name].to_pylist(), name
    rows = table_rows(store, "job/results")
    for name in set(names) - {"nanos"}:
        assert [r[name] for r in rows] == CARRIED[name].to_pylist(), name
    split(store, plan.spec, "the next night")  # the table takes these types again


def test_exports_are_in_input_order(tmp_path: Path, store: Store) -> None:
    formats = ("parquet", "jsonl", "csv")
    write_input(tmp_path, [{"text": f'text, "{i}"\n', "tags": [str(i)]} for i in range(300)])
    export = [{"format": f, "path": str(tmp_path / f"out.{f}")} for f in formats]
    given = {"path": str(tmp_path / "in"), "carry": ["text", "tags"]}
    spec = job(tmp_path, input=given, export=export, sharding={"max_rows": 50})
    publish_run(store, split(store, spec, "run"), dead=lambda i: Reason.OVER_LONG if i == 7 else None)
    wanted = [i for i in range(300) if i != 7]
    lines = [json.loads(x) for x in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [x["row_id"] for x in lines] == wanted
    assert lines[0]["tags"] == ["0"]
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [int(x["row_id"]) for x in table] == wanted
    assert table[3]["text"] == 'text, "3"\n'
    assert pq.read_table(tmp_path / "out.parquet")["row_id"].to_pylist() == wanted


ODD = pa.table(
    {
        "text": pa.array(["a", "b"], pa.string_view()),
        "my col, x": ["1", "2"],
        "duration": pa.array([1, 2], pa.duration("ns")),
        "time": pa.array([1, 2], pa.time64("ns")),
        "wide": pa.array([Decimal(1), None], pa.decimal256(60, 2)),
        "half": pa.array([1.0, 2.0], pa.float16()),
        "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
        "nothing": pa.nulls(2),
        "pair": pa.array([[1, 2], None], pa.list_(pa.int32(), 2)),
        "nested": pa.array([[{"a": [{"b": "c\0"}]}], None]),
    }
)


def test_odd_types_and_names_go_through(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, ODD)
    carried = ODD.column_names[1:]
    template = "".join(f'{{{{ row["{name}"] }}}}' for name in ODD.column_names)
    spec = job(
        tmp_path,
        input={"path": str(tmp_path / "in"), "carry": carried},
        prompt={"template": template},
        export=[{"format": f, "path": str(tmp_path / f"out.{f}")} for f in ("parquet", "jsonl", "csv")],
    )
    publish_run(store, split(store, spec, "run"), dead=lambda i: Reason.OVER_LONG if i == 0 else None)
    exported = pq.read_table(tmp_path / "out.parquet").select(carried)
    assert exported.to_pylist() == ODD.select(carried).slice(1).to_pylist()
    (letter,) = table_rows(store, "dead_letters")
    assert json.loads(letter["input"])["my col, x"] == "1"
    split(store, spec, "the next night")  # the table takes these types again


@pytest.mark.parametrize("names", [["text", "Text"], ["Output"], ["ROW_ID"]])
def test_columns_that_differ_in_case_only(tmp_path: Path, store: Store, names: list[str]) -> None:
    from airflow_batchinfer.errors import SpecError

    write_input(tmp_path, [{"text": "a", **dict.fromkeys(names, "b")}])
    with pytest.raises(SpecError, match=r"cannot have both .* set `output\.carry_prefix`"):
        split(store, job(tmp_path, input={"path": str(tmp_path / "in"), "carry": names}), "run")
