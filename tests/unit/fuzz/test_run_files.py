"""A run's files under damage: the tables come out right, or no tables and an error of ours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_batchinfer.errors import BatchInferError, InputError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import LocalStore
from airflow_batchinfer.worker.checkpoint import encode_part
from airflow_batchinfer.worker.reader import read_rows
from airflow_batchinfer.worker.resume import part_metadata, resume
from airflow_batchinfer.worker.work import Result
from tests.unit.fuzz.damage import damaged, flipped, fuzzed
from tests.unit.pipeline.runs import commit_run, job, table_rows, write_input

pytestmark = pytest.mark.airflow_env

_EPOCH = "20260101T000000000Z-00000000"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run with copies, carried columns, ids and dead rows, committed but not published."""
    folder = tmp_path_factory.mktemp("made")
    rows = [{"id": f"k{i}", "text": f"text {i % 17}", "carried": f"carried {i}"} for i in range(30)]
    write_input(folder, rows)
    given_ = {"path": str(folder / "in"), "id_column": "id", "carry": ["carried"]}
    spec = job(folder, input=given_, sharding={"max_rows": 9}, failure={"max_dead_fraction": 1.0})
    store = LocalStore(spec.store)
    plan = split(store, spec, "run")
    commit_run(store, plan, dead=lambda i: Reason.EMPTY_OUTPUT if i % 5 == 0 else None)
    return Path(spec.store)


def _published(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    store = LocalStore(folder)
    reconcile(store, "job/runs/run")
    merge(store, "job/runs/run")
    results = table_rows(store, "job/results")
    return results, table_rows(store, "dead_letters")


@pytest.fixture(scope="module")
def right(made: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return _published(shutil.copytree(made, tmp_path_factory.mktemp("right") / "store"))


@pytest.mark.parametrize("name", ["plan.json", "commit.json", "rows-", "copies-", "part-"])
@fuzzed(10)
@given(data=st.data())
def test_tables_are_right_or_there_are_none(
    name: str, data: st.DataObject, made: Path, right: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = shutil.copytree(made, tmp_path_factory.mktemp("damaged") / "store")
    files = [path for path in sorted(folder.rglob("*")) if name in path.name and path.is_file()]
    path = data.draw(st.sampled_from(files))
    path.write_bytes(data.draw(st.one_of(flipped(path.read_bytes()), damaged(path.read_bytes()))))
    try:
        found = _published(folder)
    except BatchInferError:
        found = right
    assert found == right
    shutil.rmtree(folder.parent)


@fuzzed(50)
@given(data=st.data())
def test_a_worker_takes_the_rows_that_were_frozen_or_none(
    data: st.DataObject, made: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("rows"))
    planned = Plan.read(LocalStore(made), "job/runs/run/plan.json").shards[0]
    written = (made / planned.rows_key).read_bytes()
    injured = data.draw(damaged(written))
    store.write_bytes(planned.rows_key, injured)
    try:
        rows = pa.Table.from_batches(read_rows(store, planned, 4)).num_rows
    except InputError as error:
        message = str(error)
    else:
        assert (injured, rows) == (written, planned.sent)
        return
    assert planned.rows_key in message


@fuzzed(80)
@given(data=st.data())
def test_a_worker_resumes_what_a_part_held_or_sets_it_aside(
    data: st.DataObject, made: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("part"))
    plan = Plan.read(LocalStore(made), "job/runs/run/plan.json")
    planned, layout = plan.shards[0], RunLayout(plan.folder)
    results = [_result(row_id) for row_id in range(20)]
    written = encode_part(results, part_metadata(plan.fingerprint, _EPOCH, planned))
    key = layout.part(0, _EPOCH, 0)
    store.write_bytes(key, data.draw(st.one_of(flipped(written), damaged(written))))
    found = resume(store, layout, planned, plan.fingerprint, "another")
    assert set(found.done) in (set(), set(range(20)))
    if found.done:
        assert set(found.by_reason[Reason.EMPTY_OUTPUT]) == {0, 7, 14}
        assert (found.tokens.prompt, found.parts[0].rows) == (100, 20)
    elif found.warnings:
        assert key in found.warnings[0]


def _result(row_id: int) -> Result:
    dead = row_id % 7 == 0
    return Result(
        row_id=row_id,
        outcome="invalid" if dead else "succeeded",
        reason="empty_output" if dead else None,
        message=None,
        output=f"answer {row_id}",
        vector=None,
        finish_reason="stop",
        prompt_tokens=5,
        output_tokens=2,
        cached_tokens=0,
        attempts=1,
        finished_at=1_780_000_000_000,
    )
