"""The plan: repeatable, balanced, and never more shards than Airflow maps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.errors import CorruptError, InputError, PlanChangedError, SpecError, StoreError
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.pilot import judge_pilot
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.pipeline.report import write_report
from airflow_batchinfer.pipeline.split import load_plan, split
from airflow_batchinfer.pipeline.validate import validate
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.spec import OutputSpec
from airflow_batchinfer.store import Store
from tests.unit.pipeline.runs import frozen_copies, frozen_rows, job, publish_run, read, write_input

pytestmark = pytest.mark.airflow_env


def rows_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"text": f"{i:04d}" + "x" * n} for i, n in enumerate(lengths)]


def test_second_call_returns_the_same_plan(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, rows_of([10] * 20))
    first = split(store, job(tmp_path), "manual__2026-01-01T00:00:00+00:00")
    write_input(tmp_path, rows_of([10] * 5))  # the snapshot is frozen, whatever becomes of the input
    assert split(store, job(tmp_path), "manual__2026-01-01T00:00:00+00:00") == first
    assert load_plan(store, first.folder) == first


@pytest.mark.parametrize("step", [judge_pilot, reconcile, validate, merge, write_report])
def test_no_step_is_tried_again_without_a_plan(store: Store, step: Callable[[Store, str], object]) -> None:
    """Other errors than ours Airflow retries."""
    with pytest.raises(InputError, match="has no plan"):
        step(store, "job/runs/none")


def test_two_splits_of_one_input_freeze_the_same_bytes(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, rows_of([i % 97 for i in range(3000)]))
    fields = {"sharding": {"max_rows": 500}}
    one, two = (split(store, job(tmp_path, **fields), run_id) for run_id in ("one", "two"))
    assert [s.rows_sha256 for s in one.shards] == [s.rows_sha256 for s in two.shards]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": {"template": "New: {{ text }}"}}, "prompt.template"),
        ({"sampling": {"max_tokens": 5}}, "sampling.max_tokens"),
        ({"sharding": {"max_rows": 7}}, "sharding.max_rows"),
        ({"output": {"column": "label"}}, "output.column"),
    ],
)
def test_changed_job_is_refused_or_restarted(
    tmp_path: Path, store: Store, fields: dict[str, Any], name: str
) -> None:
    write_input(tmp_path, rows_of([10] * 20))
    first = split(store, job(tmp_path), "r")
    with pytest.raises(PlanChangedError, match=name):
        split(store, job(tmp_path, **fields), "r")
    again = split(store, job(tmp_path, on_changed_spec="restart", **fields), "r")
    assert (again.generation, again.folder) == (2, "job/runs/r~2")
    assert load_plan(store, first.folder) == first
    assert split(store, job(tmp_path, on_changed_spec="restart", **fields), "r") == again


def test_what_decides_nothing_is_adopted(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, rows_of([10] * 20))
    first = split(store, job(tmp_path), "r")
    fields: dict[str, Any] = {
        "failure": {"max_dead_fraction": 0.5},
        "checkpoint": {"rows": 3},
        "retry": {"invalid_attempts": 5},
        "export": [{"format": "csv", "path": "x.csv"}],
    }
    again = split(store, job(tmp_path, **fields), "r")
    assert again.shards == first.shards
    assert again.spec == job(tmp_path, **fields)
    assert load_plan(store, first.folder) == again


def test_two_run_ids_with_one_folder(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, rows_of([10]))
    split(store, job(tmp_path), "a:b")
    with pytest.raises(SpecError, match="'a:b'"):
        split(store, job(tmp_path), "a+b")


@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_a_damaged_shard_is_noticed(tmp_path: Path, store: Store, damage: str) -> None:
    write_input(tmp_path, rows_of([10] * 20))
    plan = split(store, job(tmp_path, sharding={"max_rows": 5}), "r")
    key = plan.shards[2].rows_key
    data = store.read_bytes(key)
    store.delete(key)
    if damage == "truncate":
        store.write_bytes(key, data[:-1])
    with pytest.raises(CorruptError, match="rows-"):
        split(store, job(tmp_path, sharding={"max_rows": 5}), "r")
    again = split(store, job(tmp_path, sharding={"max_rows": 5}, on_changed_spec="restart"), "r")
    assert again.generation == 2


def test_shards_have_equal_work_and_the_same_mix(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, rows_of([(i * i) % 4000 for i in range(2000)]))
    plan = split(store, job(tmp_path, sharding={"max_rows": 250}), "r")
    work = [s.predicted_tokens for s in plan.shards]
    assert max(work) < 1.05 * min(work)
    assert max(s.sent for s in plan.shards) <= 250
    for shard in plan.shards:
        lengths = [len(r["input"]["text"]) for r in read(store, shard.rows_key).to_pylist()]
        assert [n // 4 for n in lengths] == sorted((n // 4 for n in lengths), reverse=True)


def test_rows_with_a_common_start_stand_together(tmp_path: Path, store: Store) -> None:
    rows = [{"doc": f"doc {i % 20}" * 50, "text": f"question {i}"} for i in range(400)]
    rows += [{"doc": f"single {i}", "text": "question"} for i in range(100)]
    write_input(tmp_path, rows)
    spec = job(tmp_path, prompt={"template": "{{ doc }} {{ text }}"}, sharding={"max_rows": 100})
    plan = split(store, spec, "r")
    seen = [
        [r["input"]["doc"] for r in read(store, s.rows_key).to_pylist() if "single" not in r["input"]["doc"]]
        for s in plan.shards
    ]
    for docs in seen:
        stretches = [doc for i, doc in enumerate(docs) if i == 0 or docs[i - 1] != doc]
        assert len(stretches) == len(set(stretches))
    spread = [sum(doc in docs for docs in seen) for doc in {d for docs in seen for d in docs}]
    assert sum(n > 1 for n in spread) < len(plan.shards)


def test_never_more_shards_than_allowed(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, rows_of([10] * 500))
    plan = split(store, job(tmp_path, sharding={"max_rows": 1, "max_shards": 7}), "r")
    assert len(plan.shards) == 7
    assert [s.shard for s in plan.shards] == list(range(7))
    assert "max_shards is 7: shards grow to up to 72 rows" in plan.warnings[0]


def test_overlong_rows_get_shards_of_their_own(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, rows_of([40] * 60 + [4000] * 6))
    engine = {"name": "none", "backend": "tests.engines:InstantEngine", "engine": {"max_model_len": 500}}
    plan = split(store, job(tmp_path, model=engine, sharding={"max_rows": 30}), "r")
    by_shard = {
        s.shard: max(len(r["input"]["text"]) for r in read(store, s.rows_key).to_pylist())
        for s in plan.shards
    }
    assert [s.sent for s in plan.shards] == [30, 30, 6]
    assert by_shard[2] > 4000 > by_shard[0]


def test_copies_are_sent_once_and_keep_their_own_columns(tmp_path: Path, store: Store) -> None:
    rows = [{"id": i, "text": f"t{i % 10}", "who": f"w{i}"} for i in range(100)]
    write_input(tmp_path, rows)
    given = {"path": str(tmp_path / "in"), "id_column": "id", "carry": ["who", "text"]}
    plan = split(store, job(tmp_path, input=given, sharding={"max_rows": 4}), "r")
    sent, copies = frozen_rows(store, plan), frozen_copies(store, plan)
    assert (len(sent), len(copies), plan.rows) == (10, 90, 100)
    home = {r["row_id"]: r for r in sent}
    for copy in copies:
        original = home[copy["copy_of"]]
        assert original["shard"] == copy["shard"]
        assert original["input"]["text"] == rows[copy["row_id"]]["text"]
        assert copy["carry"] == {"who": f"w{copy['row_id']}"}
        assert copy["custom_id"] == str(copy["row_id"])
    assert sum(r["copies"] for r in sent) == 90


def test_without_dedup_everything_is_sent(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, [{"text": "same"}] * 30)
    plan = split(store, job(tmp_path, sharding={"dedup": False}), "r")
    assert (plan.shards[0].sent, plan.shards[0].copies_key) == (30, None)


def test_columns_framed_so_that_values_cannot_run_together(tmp_path: Path, store: Store) -> None:
    write_input(
        tmp_path, [{"a": "x", "b": "yz"}, {"a": "xy", "b": "z"}, {"a": None, "b": "-"}, {"a": "-", "b": None}]
    )
    plan = split(store, job(tmp_path, prompt={"template": "{{ a }}{{ b }}"}), "r")
    assert plan.shards[0].sent == 4


def test_table_with_another_output_type_is_found_before_spending(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, rows_of([10] * 3))
    publish_run(store, split(store, job(tmp_path), "one"))
    with pytest.raises(StoreError, match=r"column `output` of the table is string.*output\.column"):
        split(store, job(tmp_path, task={"type": "embed"}), "two")


def test_table_with_another_type_of_a_carried_column_is_found_before_spending(
    tmp_path: Path, store: Store
) -> None:
    given = {"path": str(tmp_path / "in"), "carry": ["score"]}
    spec = job(tmp_path, input=given, output={"carry_prefix": "in_"})
    write_input(tmp_path, [{"text": "a", "score": 1}])
    publish_run(store, split(store, spec, "one"))
    write_input(tmp_path, [{"text": "a", "score": 1.5}])
    with pytest.raises(StoreError, match=r"column `in_score` of the table is int64, and this run's is d"):
        split(store, spec, "two")
    with pytest.raises(StoreError, match="the table has a column `in_score`, and this run's is `IN_score`"):
        split(store, spec.model_copy(update={"output": OutputSpec(carry_prefix="IN_")}), "two")
    write_input(tmp_path, [{"text": "a", "score": 2}])
    split(store, spec, "two")


def test_plan_is_written_last(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_batchinfer.pipeline import freeze

    write_input(tmp_path, rows_of([10] * 30))
    monkeypatch.setattr(freeze, "file_sha256", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        split(store, job(tmp_path), "r")
    assert not store.exists(RunLayout("job/runs/r").plan)
    monkeypatch.undo()
    assert split(store, job(tmp_path), "r").generation == 1
