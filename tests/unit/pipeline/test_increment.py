"""Incremental runs: what changed runs, what did not keeps its result, what is gone is marked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_batchinfer.errors import CorruptError, SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.pipeline import buckets
from airflow_batchinfer.pipeline.replay import prepare_replay
from airflow_batchinfer.pipeline.scratch import SCRATCH_VARIABLE
from airflow_batchinfer.pipeline.split import load_plan, newest_plan, split
from airflow_batchinfer.pipeline.standing import standing_of
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store
from tests.releases import rewrite_as_other_release
from tests.unit.pipeline.runs import frozen_copies, frozen_rows, job, publish_run, table_rows, write_input

pytestmark = pytest.mark.airflow_env

Rows = dict[str, dict[str, Any]]


def first_night() -> Rows:
    return {f"k{i}": {"text": f"text {i}", "who": f"w{i}"} for i in range(60)}


def spec(folder: Path, **fields: Any) -> JobSpec:
    given = {"path": str(folder / "in"), "id_column": "id", "carry": ["who"]}
    return job(folder, **({"input": given, "incremental": True, "sharding": {"max_rows": 25}} | fields))


def night(
    folder: Path,
    store: Store,
    name: str,
    rows: Rows,
    *,
    dead: Any = lambda _: None,
    answer: Any = None,
    **fields: Any,
) -> Plan:
    """One run over `rows`, whose answers name the night by default."""
    write_input(folder, [{"id": k, **v} for k, v in rows.items()])
    plan = split(store, spec(folder, **fields), name)
    publish_run(store, plan, answer=answer or (lambda r: f"{name}: {r['input']['text']}"), dead=dead)
    assert standing_of(store, plan).rows == plan.rows
    return plan


def results(store: Store, name: str) -> Rows:
    return {r["custom_id"]: r for r in table_rows(store, "job/results", run_id=name)}


def test_only_changed_and_new_rows_run(tmp_path: Path, store: Store) -> None:
    rows = first_night()
    assert night(tmp_path, store, "one", rows).changes == {"new": 60}
    rows["k3"]["text"] = "edited"
    rows["k4"]["who"] = "somebody else"  # carried only: no reason to pay
    del rows["k5"]
    rows = dict(reversed(rows.items())) | {"new": {"text": "added", "who": "me"}}
    plan = night(tmp_path, store, "two", rows)
    assert plan.changes == {"changed": 1, "new": 1, "unchanged": 58}
    assert plan.kept is not None
    assert (plan.kept.rows, plan.kept.removed, plan.rows) == (58, 1, 2)
    sent = [*frozen_rows(store, plan), *frozen_copies(store, plan)]
    assert {(r["custom_id"], r["change"]) for r in sent} == {("k3", "changed"), ("new", "new")}
    found = results(store, "two")
    assert found["k3"]["output"] == "two: edited"
    assert found["k4"]["output"] == "one: text 4"
    assert found["k4"]["who"] == "somebody else"
    assert (found["k4"]["answered_in"], found["k4"]["change"]) == ("one", "unchanged")
    assert found["k4"]["row_id"] == list(rows).index("k4")
    assert (found["k5"]["change"], found["k5"]["output"]) == ("removed", None)
    assert found["k5"]["row_id"] < 0
    assert set(found) == set(rows) | {"k5"}
    assert len(results(store, "one")) == 60


def test_kept_rows_too_big_for_one_bucket(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 20_000)
    rows = {k: {**row, "who": str(i) * 5_000} for i, (k, row) in enumerate(first_night().items())}
    export = [{"format": "parquet", "path": str(tmp_path / "{run_id}.parquet")}]
    night(tmp_path, store, "one", rows)
    plan = night(tmp_path, store, "two", dict(reversed(rows.items())), export=export)
    assert plan.changes == {"unchanged": 60}
    found = results(store, "two")
    assert {k: (r["output"], r["who"]) for k, r in found.items()} == {
        k: (f"one: {row['text']}", row["who"]) for k, row in rows.items()
    }
    assert pq.read_table(tmp_path / "two.parquet")["custom_id"].to_pylist() == list(reversed(rows))


def test_scratch_files_may_stand_anywhere(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path / "the team's [own] 100%"))
    rows = first_night()
    night(tmp_path, store, "one", rows)
    del rows["k5"]
    plan = night(
        tmp_path, store, "two", rows, export=[{"format": "csv", "path": str(tmp_path / "{run_id}.csv")}]
    )
    assert plan.changes == {"unchanged": 59}
    assert len(results(store, "two")) == 60


def test_nothing_changed_sends_nothing(tmp_path: Path, store: Store) -> None:
    night(tmp_path, store, "one", first_night())
    plan = night(tmp_path, store, "two", first_night())
    assert (plan.rows, plan.shards, plan.changes) == (0, [], {"unchanged": 60})
    assert {r["output"][:3] for r in results(store, "two").values()} == {"one"}


@pytest.mark.parametrize("kind", [pa.int32(), pa.uint64(), pa.decimal128(20, 0), pa.large_string()])
def test_ids_of_every_type_are_known_again(tmp_path: Path, store: Store, kind: pa.DataType) -> None:
    rows = pa.table({"id": pa.array(["1", "20"]).cast(kind), "text": ["a", "b"], "who": ["x", "y"]})
    for name in ("one", "two"):
        write_input(tmp_path, rows)
        plan = split(store, spec(tmp_path), name)
        publish_run(store, plan)
    assert plan.changes == {"unchanged": 2}


def test_rows_are_known_again_on_a_machine_in_another_time_zone(tmp_path: Path, store: Store) -> None:
    at = pa.array([datetime(2026, 7, 1, 12, tzinfo=UTC)] * 2)
    rows = {"id": ["1", "2"], "text": ["a", "b"], "at": at, "who": [{"at": t} for t in at.to_pylist()]}
    write_input(tmp_path, pa.table(rows))
    dated = spec(tmp_path, prompt={"template": "{{ text }} {{ at }} {{ who }}"})
    publish_run(store, split(store, dated, "one"))
    (tmp_path / "job.json").write_text(json.dumps(dated.dump()))
    elsewhere = (
        "import json, sys; from airflow_batchinfer.pipeline.split import split; "
        "from airflow_batchinfer.spec import JobSpec; from airflow_batchinfer.store import LocalStore; "
        "split(LocalStore(sys.argv[1]), JobSpec(**json.load(open(sys.argv[2]))), 'two')"
    )
    subprocess.run(
        [sys.executable, "-c", elsewhere, str(tmp_path / "store"), str(tmp_path / "job.json")],
        env=os.environ | {"TZ": "America/New_York"},
        check=True,
    )
    plan = newest_plan(store, "job", "two")
    assert plan is not None
    assert plan.changes == {"unchanged": 2}


def test_changed_template_runs_everything_and_says_so_first(tmp_path: Path, store: Store) -> None:
    night(tmp_path, store, "one", first_night())
    plan = night(tmp_path, store, "two", first_night(), prompt={"template": "New: {{ text }}"})
    assert plan.changes == {"template changed": 60}
    assert "since run 'one' in prompt.template: 60 rows that had a result run again" in plan.warnings[0]
    plan = night(tmp_path, store, "three", first_night(), prompt={"template": "New: {{ text }}"})
    assert plan.changes == {"unchanged": 60}


def test_what_changed_is_named_though_another_release_wrote_the_last_plan(
    tmp_path: Path, store: Store
) -> None:
    """It had a field that this one has not, and another default of one that both have."""
    one = night(tmp_path, store, "one", first_night())
    dump = one.spec.dump()
    dump["sampling"] |= {"speed": "fast", "max_tokens": 99}
    del dump["overlong"]["separator"]
    rewrite_as_other_release(store, RunLayout(one.folder).plan, spec=dump)
    plan = night(tmp_path, store, "two", first_night(), prompt={"template": "New: {{ text }}"})
    assert plan.changes == {"job changed": 60}
    assert "in prompt.template, sampling.max_tokens, sampling.speed: 60 rows" in plan.warnings[0]


def test_a_release_with_other_defaults_runs_everything_and_says_so(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    night(tmp_path, store, "one", first_night())
    monkeypatch.setattr("airflow_batchinfer.run.fingerprint.DEFAULTS", 0)
    plan = night(tmp_path, store, "two", first_night())
    assert plan.changes == {"job changed": 60}
    assert "in the way in which fingerprints are made: 60 rows" in plan.warnings[0]


def test_dead_rows_run_again(tmp_path: Path, store: Store) -> None:
    night(tmp_path, store, "one", first_night(), dead=lambda i: Reason.TIMED_OUT if i < 5 else None)
    plan = night(tmp_path, store, "two", first_night())
    assert plan.changes == {"failed before": 5, "unchanged": 55}
    assert len(results(store, "two")) == 60


def test_replayed_rows_keep_their_result(tmp_path: Path, store: Store) -> None:
    home = night(tmp_path, store, "one", first_night(), dead=lambda i: Reason.TIMED_OUT if i < 5 else None)
    replay = prepare_replay(store, home.folder, "again", overrides={"sampling": {"max_tokens": 3}})
    publish_run(store, replay, answer=lambda _: "replayed")
    plan = night(tmp_path, store, "two", first_night())
    assert plan.changes == {"unchanged": 60}
    assert Counter(r["output"] for r in results(store, "two").values())["replayed"] == 5


def test_input_columns_named_as_ours_are_replayed_as_they_are(tmp_path: Path, store: Store) -> None:
    rows = {k: {**row, "change": f"of {k}", "input_digest": 7} for k, row in first_night().items()}
    prompt = {"template": "{{ text }} {{ change }} {{ input_digest }}"}
    home = night(
        tmp_path, store, "one", rows, dead=lambda i: Reason.TIMED_OUT if i < 5 else None, prompt=prompt
    )
    replay = prepare_replay(store, home.folder, "again")
    sent = frozen_rows(store, replay)
    assert {row["row_id"]: row["input"] for row in sent} == {
        i: {"text": f"text {i}", "change": f"of k{i}", "input_digest": 7} for i in range(5)
    }
    assert {row["change"] for row in sent} == {"new"}
    publish_run(store, replay)
    assert night(tmp_path, store, "two", rows, prompt=prompt).changes == {"unchanged": 60}


@pytest.mark.parametrize(
    ("policy", "outputs"), [("tombstone", [None, None]), ("keep", [None, "one: text 7"])]
)
def test_removed_rows_over_several_nights(
    tmp_path: Path, store: Store, policy: str, outputs: list[Any]
) -> None:
    rows = first_night()
    night(tmp_path, store, "one", rows, removed_rows=policy)
    gone = rows.pop("k7")
    night(tmp_path, store, "two", rows, removed_rows=policy)
    assert results(store, "two")["k7"]["output"] == outputs[1]
    night(tmp_path, store, "three", rows, removed_rows=policy)
    assert ("k7" in results(store, "three")) == (policy == "keep")
    plan = night(tmp_path, store, "four", {**rows, "k7": gone}, removed_rows=policy)
    assert plan.changes == ({"unchanged": 60} if policy == "keep" else {"new": 1, "unchanged": 59})
    assert results(store, "four")["k7"]["output"] is not None


def test_a_removed_row_that_comes_back_under_another_job_runs_again(tmp_path: Path, store: Store) -> None:
    rows = first_night()
    new = {"prompt": {"template": "New: {{ text }}"}, "removed_rows": "keep"}
    night(tmp_path, store, "one", rows, removed_rows="keep")
    gone = rows.pop("k7")
    night(tmp_path, store, "two", rows, **new)
    assert results(store, "two")["k7"]["output"] == "one: text 7"
    plan = night(tmp_path, store, "three", {**rows, "k7": gone}, **new)
    assert results(store, "three")["k7"]["output"] == "three: text 7"
    assert plan.changes == {"job changed": 1, "unchanged": 59}


SCHEMA = {"type": "object", "properties": {"says": {"type": "string"}}}


@pytest.mark.parametrize("task", [{"type": "generate"}, {"type": "json", "schema": SCHEMA}])
def test_answers_move_to_a_renamed_output_column(tmp_path: Path, store: Store, task: Any) -> None:
    rows = first_night()
    fields: dict[str, Any] = {"task": task, "removed_rows": "keep"}

    def answer(row: dict[str, Any]) -> str:
        text = row["input"]["text"]
        return text if task["type"] == "generate" else f'{{"says": "{text}"}}'

    night(tmp_path, store, "one", rows, answer=answer, **fields)
    rows["k3"]["text"] = "edited"
    del rows["k5"]
    plan = night(tmp_path, store, "two", rows, answer=answer, output={"column": "label"}, **fields)
    assert plan.changes == {"changed": 1, "unchanged": 58}
    found = results(store, "two")
    given = {k: v["text"] for k, v in rows.items()} | {"k5": "text 5"}
    if task["type"] == "json":
        assert {k: r["label_json"] for k, r in found.items()} == {
            k: f'{{"says": "{v}"}}' for k, v in given.items()
        }
        assert {k: r["label"] for k, r in found.items()} == {k: {"says": v} for k, v in given.items()}
    else:
        assert {k: r["label"] for k, r in found.items()} == given


@pytest.mark.parametrize("column", ["not in the table", "of an older run"])
def test_answers_that_cannot_be_found_again_are_no_reason_to_pay_first(
    tmp_path: Path, store: Store, column: str
) -> None:
    """The earlier run's folder, which would tell the column's old name, is gone."""
    renamed = {"output": {"column": "label"}}
    if column == "of an older run":
        night(tmp_path, store, "zero", first_night(), incremental=False, **renamed)
    one = night(tmp_path, store, "one", first_night())
    for info in list(store.list(one.folder)):
        store.delete(info.key)
    with pytest.raises(SpecError, match=r"output\.column: run 'one', whose answers .* has none in `label`"):
        split(store, spec(tmp_path, **renamed), "two")
    assert split(store, spec(tmp_path), "two").changes == {"unchanged": 60}


def test_a_row_never_keeps_an_answer_that_is_not_there(tmp_path: Path, store: Store) -> None:
    night(tmp_path, store, "one", first_night())
    plan = split(store, spec(tmp_path, output={"column": "label"}), "two")
    assert plan.kept is not None
    kept = plan.kept.model_copy(update={"prior_output": None})
    plan.model_copy(update={"kept": kept}).write(store, RunLayout(plan.folder).plan)
    with pytest.raises(CorruptError, match="60 rows that were to keep the answer of run 'one' have none in"):
        publish_run(store, load_plan(store, plan.folder))
    assert not results(store, "two")


def test_removed_rows_cannot_be_kept_in_a_column_of_another_type(tmp_path: Path, store: Store) -> None:
    rows = first_night()
    night(tmp_path, store, "one", rows)
    del rows["k5"]
    fields: dict[str, Any] = {"task": {"type": "embed"}, "output": {"column": "vector"}}
    with pytest.raises(SpecError, match=r"the 1 rows .* have string in `output`, .*removed_rows: tombstone"):
        night(tmp_path, store, "two", rows, removed_rows="keep", **fields)
    night(tmp_path, store, "three", rows, answer=lambda _: [0.5], removed_rows="tombstone", **fields)
    assert results(store, "three")["k5"]["vector"] is None


def test_kept_rows_come_from_the_plan_that_they_were_compared_with(tmp_path: Path, store: Store) -> None:
    """The earlier run is begun anew, with its rows in another order, before the later one is merged."""
    rows = first_night()
    night(tmp_path, store, "one", rows)
    two = split(store, spec(tmp_path), "two")
    assert two.changes == {"unchanged": 60}
    fields: dict[str, Any] = {"prompt": {"template": "New: {{ text }}"}, "on_changed_spec": "restart"}
    night(tmp_path, store, "one", dict(reversed(rows.items())), **fields)
    with pytest.raises(CorruptError, match="as they were when this run was split are gone"):
        publish_run(store, two)
    assert not results(store, "two")


def test_copies_and_exports(tmp_path: Path, store: Store) -> None:
    import json

    export = [{"format": "jsonl", "path": str(tmp_path / "{run_id}.jsonl")}]
    rows = {f"k{i}": {"text": f"text {i % 10}", "who": ""} for i in range(40)}
    night(tmp_path, store, "one", rows, export=export)
    rows["k12"]["text"] = rows["k13"]["text"] = "both"
    plan = night(tmp_path, store, "two", rows, export=export)
    assert (plan.rows, plan.shards[0].sent) == (2, 1)
    lines = [json.loads(x) for x in (tmp_path / "two.jsonl").read_text().splitlines()]
    assert [x["custom_id"] for x in lines] == list(rows)


def test_increment_needs_ids(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"needs `input\.id_column`"):
        job(tmp_path, incremental=True)
