"""Replay: exactly the dead rows, merged back in place, whoever else replays at the same time."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.errors import (
    CorruptError,
    InputError,
    PlanChangedError,
    SpecError,
    StaleLedgerError,
    StoreError,
)
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.pipeline.replay import prepare_replay, published_folder
from airflow_batchinfer.pipeline.split import load_plan, split
from airflow_batchinfer.pipeline.standing import standing_of
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.spec import GateSpec, JobSpec
from airflow_batchinfer.store import Store
from tests.unit.pipeline.runs import (
    commit_run,
    commit_shard,
    frozen_copies,
    frozen_rows,
    job,
    publish_run,
    table_rows,
    write_input,
)

pytestmark = pytest.mark.airflow_env

ROWS = 120


def dead_at_first(row_id: int) -> Reason | None:
    if row_id % 10 == 0:
        return Reason.OVER_LONG
    return Reason.INVALID_OUTPUT if row_id % 11 == 0 else None


@pytest.fixture
def home(tmp_path: Path, store: Store) -> Plan:
    rows = [{"id": f"k{i}", "text": f"text {i % 100}", "who": f"w{i}"} for i in range(ROWS)]
    write_input(tmp_path, rows)
    given = {"path": str(tmp_path / "in"), "id_column": "id", "carry": ["who"]}
    plan = split(store, job(tmp_path, input=given, sharding={"max_rows": 30}), "home")
    publish_run(store, plan, dead=dead_at_first)
    return plan


def dead_rows(*reasons: Reason) -> set[int]:
    """Rows that die first, with their copies (rows 100 to 119 copy rows 0 to 19)."""
    chosen = {i for i in range(100) if dead_at_first(i) in (reasons or tuple(Reason))}
    return chosen | {i + 100 for i in chosen if i < 20}


def check_sums(store: Store, home: Plan) -> dict[str, int]:
    standing = standing_of(store, home)
    results = table_rows(store, "job/results", run_id="home")
    letters = table_rows(store, "dead_letters", run_id="home")
    assert sorted(r["row_id"] for r in letters) == sorted(dead_rows())
    unresolved = {r["row_id"] for r in letters if r["status"] != "resolved"}
    assert sorted([*(r["row_id"] for r in results), *unresolved]) == list(range(ROWS))
    for row in results:
        assert (row["custom_id"], row["who"]) == (f"k{row['row_id']}", f"w{row['row_id']}")
    assert standing.rows == ROWS
    return dict(Counter(r["status"] for r in letters))


def test_replays_exactly_the_dead_rows_of_the_reasons_asked_for(store: Store, home: Plan) -> None:
    plan = prepare_replay(store, home.folder, "again", reasons=["over_long"])
    assert plan.rows == len(dead_rows(Reason.OVER_LONG))
    assert {r["row_id"] for r in frozen_rows(store, plan)} == set(range(0, 100, 10))
    publish_run(store, plan)
    assert check_sums(store, home) == {
        "resolved": len(dead_rows(Reason.OVER_LONG)),
        "open": len(dead_rows(Reason.INVALID_OUTPUT)),
    }
    assert not table_rows(store, "job/results", run_id="again")
    rows = table_rows(store, "job/results", answered_in="again")
    assert {r["row_id"] for r in rows} == dead_rows(Reason.OVER_LONG)
    assert {r["run_fingerprint"] for r in rows} == {home.fingerprint}


def test_overrides_change_the_job_and_nothing_else(store: Store, home: Plan) -> None:
    overrides = {"prompt": {"template": "Short: {{ text }} {{ who }}"}, "sampling": {"max_tokens": 9}}
    plan = prepare_replay(store, home.folder, "again", overrides=overrides)
    assert plan.spec.prompt.template == "Short: {{ text }} {{ who }}"
    assert (plan.spec.sampling.max_tokens, plan.spec.sampling.seed) == (9, home.spec.sampling.seed)
    assert plan.fingerprint != home.fingerprint
    assert set(frozen_rows(store, plan)[0]["input"]) == {"text", "who"}
    publish_run(store, plan)
    assert check_sums(store, home) == {"resolved": len(dead_rows())}


def test_rows_that_die_again_say_so(store: Store, home: Plan) -> None:
    plan = prepare_replay(store, home.folder, "again")
    publish_run(store, plan, dead=lambda i: Reason.TIMED_OUT if i < 50 else None)
    counts = check_sums(store, home)
    assert set(counts) == {"resolved", "replayed"}
    again = [r for r in table_rows(store, "dead_letters") if r["status"] == "replayed"]
    assert {(r["reason"], r["attempts"], r["replays"], r["last_run"]) for r in again} == {
        ("timed_out", 2, 1, "again")
    }
    last = prepare_replay(store, home.folder, "last")
    assert last.rows == counts["replayed"]
    publish_run(store, last)
    assert check_sums(store, home) == {"resolved": len(dead_rows())}


def test_a_second_replay_changes_nothing_more(store: Store, home: Plan) -> None:
    publish_run(store, prepare_replay(store, home.folder, "again"))
    before = table_rows(store, "job/results")
    empty = prepare_replay(store, home.folder, "twice")
    assert (empty.rows, empty.shards) == (0, [])
    assert "no dead letter left" in empty.warnings[-1]
    publish_run(store, empty)
    assert table_rows(store, "job/results") == before
    check_sums(store, home)


def test_two_replays_of_the_same_rows_at_once(store: Store, home: Plan) -> None:
    plans = [prepare_replay(store, home.folder, name) for name in ("left", "right")]
    for plan in plans:
        commit_run(store, plan, answer=lambda _, p=plan: p.run_id)
        reconcile(store, plan.folder)
    errors: list[BaseException] = []

    def go(folder: str) -> None:
        try:
            merge(store, folder)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=go, args=(p.folder,)) for p in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(e, StoreError) for e in errors), errors
    for plan in plans:
        merge(store, plan.folder)
    assert check_sums(store, home) == {"resolved": len(dead_rows())}
    assert (
        len({r["output"] for r in table_rows(store, "job/results", run_id="home")} & {"left", "right"}) == 1
    )


def test_home_can_be_merged_again(store: Store, home: Plan) -> None:
    replay = prepare_replay(store, home.folder, "again", reasons=["over_long"])
    publish_run(store, replay)
    before = (table_rows(store, "job/results"), table_rows(store, "dead_letters"))
    for plan in (home, replay, home):
        store.delete(RunLayout(plan.folder).merge)
        if plan is replay:
            merge(store, home.folder)
        merge(store, plan.folder)
        assert (table_rows(store, "job/results"), table_rows(store, "dead_letters")) == before


def test_same_run_id_gives_the_same_plan(store: Store, home: Plan) -> None:
    plan = prepare_replay(store, home.folder, "again", reasons=["over_long"])
    publish_run(store, plan)
    assert prepare_replay(store, home.folder, "again", reasons=["over_long"]) == plan
    with pytest.raises(PlanChangedError, match="other rows"):
        prepare_replay(store, home.folder, "again")
    with pytest.raises(PlanChangedError, match=r"sampling\.seed"):
        prepare_replay(
            store, home.folder, "again", reasons=["over_long"], overrides={"sampling": {"seed": 1}}
        )


@pytest.mark.parametrize("changed", ["fail", "restart"])
def test_a_run_and_a_replay_never_share_an_id(tmp_path: Path, store: Store, changed: Any) -> None:
    """Two DAGs with one schedule have the same run ids."""
    write_input(tmp_path, [{"text": f"text {i}"} for i in range(20)])
    spec = job(tmp_path, on_changed_spec=changed, export=[{"format": "csv", "path": str(tmp_path / "x.csv")}])
    home = split(store, spec, "home")
    publish_run(store, home, dead=lambda i: Reason.OVER_LONG if i < 4 else None)
    replay = prepare_replay(store, home.folder, "night")
    assert replay.rows == 4
    with pytest.raises(PlanChangedError, match="'night' is a replay of job"):
        split(store, spec, "night")
    with pytest.raises(PlanChangedError, match="'home' is a run of job"):
        prepare_replay(store, home.folder, "home")
    assert load_plan(store, replay.folder) == replay
    assert load_plan(store, home.folder) == home


def test_a_restarted_replay_loses_nothing_that_it_resolved_before(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, [{"text": f"text {i}"} for i in range(20)])
    home = split(store, job(tmp_path, on_changed_spec="restart"), "home")
    publish_run(store, home, dead=lambda i: Reason.OVER_LONG if i < 4 else None)
    first = prepare_replay(store, home.folder, "again")
    publish_run(store, first, dead=lambda i: Reason.TIMED_OUT if i == 0 else None)
    second = prepare_replay(store, home.folder, "again", overrides={"sampling": {"max_tokens": 3}})
    assert (first.generation, second.generation) == (1, 2)
    publish_run(store, second)
    assert [r["row_id"] for r in table_rows(store, "job/results")] == list(range(20))
    assert standing_of(store, home).resolved == 4


def test_a_restarted_replay_leaves_what_the_run_has_answered_since(tmp_path: Path, store: Store) -> None:
    """The run left such a row to the first generation; the second one does not send it."""
    write_input(tmp_path, [{"text": f"text {i}"} for i in range(20)])
    home = split(store, job(tmp_path, on_changed_spec="restart"), "home")
    publish_run(store, home, dead=lambda i: Reason.OVER_LONG if i < 4 else None)
    first = prepare_replay(store, home.folder, "again")
    publish_run(store, first, dead=lambda i: Reason.TIMED_OUT if i == 0 else None)
    for info in list(store.list(f"{home.folder}/shards/00000")):
        if info.key != home.shards[0].rows_key:
            store.delete(info.key)
    publish_run(store, home, dead=lambda i: Reason.OVER_LONG if i < 2 else None)
    second = prepare_replay(store, home.folder, "again", overrides={"sampling": {"max_tokens": 3}})
    assert {r["row_id"] for r in frozen_rows(store, second)} == {0, 1}
    publish_run(store, second)
    assert [r["row_id"] for r in table_rows(store, "job/results")] == list(range(20))
    answered = {r["row_id"]: r["fingerprint"] for r in table_rows(store, "job/results", merged_by="again")}
    assert answered == dict.fromkeys((0, 1), second.fingerprint) | dict.fromkeys((2, 3), first.fingerprint)
    assert (standing_of(store, home).resolved, standing_of(store, home).dead) == (4, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"reasons": ["overlong"]}, SpecError, "unknown reason `overlong`"),
        ({"overrides": {"input": {"path": "x"}}}, SpecError, "input: a replay cannot change it"),
        ({"overrides": {"prompt": {"templat": "x"}}}, SpecError, "did you mean `template`"),
        ({"overrides": {"prompt": {"template": "{{ title }}"}}}, InputError, "the column `title`"),
        ({"overrides": {"task": {"type": "embed"}}}, StoreError, "column `output` of the table is string"),
    ],
)
def test_what_cannot_be_replayed(
    store: Store, home: Plan, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prepare_replay(store, home.folder, "again", **arguments)


def test_limits_of_the_pilot_and_the_judge_do_not_bind_a_replay(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, [{"text": f"text {i}"} for i in range(20)])
    judge = {
        "prompt": {"template": "{{ output }}"},
        "task": {"type": "choice", "labels": ["good", "bad"]},
        "passing": ["good"],
    }
    gate = {"max_tokens": 1, "approval": "required", "min_judge_pass": 0.5}
    home = split(store, job(tmp_path, pilot={"rows": 2}, judge=judge, gate=gate), "home")
    publish_run(store, home, dead=dead_at_first)
    publish_run(store, prepare_replay(store, home.folder, "again"))
    assert standing_of(store, home).dead == 0


def test_a_replay_planned_before_its_spec_would_be_refused_holds_up_nothing(store: Store, home: Plan) -> None:
    replay = prepare_replay(store, home.folder, "again")
    spec = replay.spec.model_copy(update={"gate": GateSpec(max_tokens=5)})  # without a pilot
    with pytest.raises(SpecError, match="needs `pilot`"):
        JobSpec.parse(spec.dump())
    replay.model_copy(update={"spec": spec}).write(store, RunLayout(replay.folder).plan)
    publish_run(store, Plan.read(store, RunLayout(replay.folder).plan))
    store.delete(RunLayout(home.folder).merge)
    merge(store, home.folder)
    assert check_sums(store, home) == {"resolved": len(dead_rows())}


def test_a_run_whose_spec_would_be_refused_today_can_be_replayed(store: Store, home: Plan) -> None:
    line = home.spec.line.model_copy(update={"window": 50, "min_rows": 60})
    spec = home.spec.model_copy(update={"line": line})
    with pytest.raises(SpecError, match="min_rows"):
        JobSpec.parse(spec.dump())
    home.model_copy(update={"spec": spec}).write(store, RunLayout(home.folder).plan)
    reconcile(store, home.folder)
    merge(store, home.folder)
    replay = prepare_replay(store, home.folder, "again")
    assert replay.spec.line == line
    assert prepare_replay(store, home.folder, "again") == replay
    with pytest.raises(SpecError, match="min_rows"):
        prepare_replay(store, home.folder, "changed", overrides={"sampling": {"max_tokens": 9}})


def test_replay_of_a_replay_or_of_an_open_run(tmp_path: Path, store: Store, home: Plan) -> None:
    replay = prepare_replay(store, home.folder, "again")
    with pytest.raises(SpecError, match="itself a replay"):
        prepare_replay(store, replay.folder, "more")
    other = split(store, job(tmp_path), "unfinished")
    with pytest.raises(StaleLedgerError, match="no ledger"):
        prepare_replay(store, other.folder, "more")


def test_the_newest_run_is_replayed_even_if_it_is_all_dead(tmp_path: Path, store: Store, home: Plan) -> None:
    publish_run(store, prepare_replay(store, home.folder, "again"))
    assert published_folder(store, "job", None) == home.folder
    newest = split(store, home.spec, "newest")
    assert published_folder(store, "job", None) == home.folder  # it is not published yet
    old = split(store, home.spec, "old")
    for key in (RunLayout(old.folder).plan, RunLayout(old.folder).merge):
        store.write_bytes(key, b"{")  # damaged, which is no concern of the others
    publish_run(store, newest, dead=lambda _: Reason.TIMED_OUT)
    assert published_folder(store, "job", None) == newest.folder
    publish_run(store, prepare_replay(store, newest.folder, "mended"))
    for info in list(store.list(newest.folder)):
        store.delete(info.key)
    with pytest.raises(InputError, match="holds no run 'newest'"):
        published_folder(store, "job", None)


def test_replay_waits_for_its_home_to_be_published(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, [{"text": f"text {i}"} for i in range(20)])
    home = split(store, job(tmp_path), "home")
    commit_run(store, home, dead=dead_at_first)
    reconcile(store, home.folder)
    with pytest.raises(StaleLedgerError, match="not published yet"):
        publish_run(store, prepare_replay(store, home.folder, "again"))


def test_a_replay_that_runs_again_stops_the_next_before_it_publishes(store: Store, home: Plan) -> None:
    first = prepare_replay(store, home.folder, "first", reasons=["over_long"])
    publish_run(store, first)
    second = prepare_replay(store, home.folder, "second")
    commit_run(store, second)
    reconcile(store, second.folder)
    before = (table_rows(store, "job/results"), table_rows(store, "dead_letters"))
    store.delete(RunLayout(first.folder).ledger)
    message = "job/runs/home does not hold any more: job/runs/first has no ledger: .*; or delete its folder"
    with pytest.raises(StaleLedgerError, match=message):
        merge(store, second.folder)
    assert (table_rows(store, "job/results"), table_rows(store, "dead_letters")) == before
    reconcile(store, first.folder)
    merge(store, second.folder)
    assert check_sums(store, home) == {"resolved": len(dead_rows())}


@pytest.mark.parametrize("replayed_first", [False, True], ids=["run first", "replay first"])
def test_a_row_that_the_run_and_a_replay_mend_stands_once(
    store: Store, home: Plan, replayed_first: bool
) -> None:
    replay = prepare_replay(store, home.folder, "again")
    if replayed_first:
        publish_run(store, replay, dead=lambda i: Reason.TIMED_OUT if i == 90 else None)
    layout, first = RunLayout(home.folder), home.shards[0]
    frozen = [*frozen_rows(store, home), *frozen_copies(store, home)]
    mended = {r["row_id"] for r in frozen if r["shard"] == 0} & dead_rows()
    assert mended
    for info in list(store.list(layout.shard(0))):  # its commit is lost, and its rows run again
        if info.key not in (first.rows_key, first.copies_key):
            store.delete(info.key)
    commit_shard(store, home, first)
    reconcile(store, home.folder)
    merge(store, home.folder)
    if not replayed_first:
        publish_run(store, replay, dead=lambda i: Reason.TIMED_OUT if i == 90 else None)
    results = table_rows(store, "job/results", run_id="home")
    dead = {r["row_id"] for r in table_rows(store, "dead_letters") if r["status"] != "resolved"}
    assert sorted([*(r["row_id"] for r in results), *dead]) == list(range(ROWS))
    assert dead == {90} - mended
    by_replay = {r["row_id"] for r in results if r["merged_by"] == "again"}
    assert by_replay == dead_rows() - {90} - (set() if replayed_first else mended)
    assert standing_of(store, home).dead == len(dead)


@pytest.mark.parametrize("all_dead", [False, True], ids=["some rows", "no row"])
def test_a_replay_leaves_a_restarted_run_alone(
    tmp_path: Path, store: Store, home: Plan, all_dead: bool
) -> None:
    """The run that it repairs was begun anew since, and is published from that new plan."""
    replay = prepare_replay(store, home.folder, "again")
    publish_run(store, replay)
    spec = {"input": home.spec.input, "sharding": {"max_rows": 30}, "on_changed_spec": "restart"}
    second = split(store, job(tmp_path, **spec, prompt={"template": "New: {{ text }}"}), "home")
    assert second.generation == 2
    publish_run(store, second, dead=lambda i: Reason.TIMED_OUT if all_dead or i < 5 else None)
    before = (table_rows(store, "job/results"), table_rows(store, "dead_letters"))
    assert len(before[0]) == (0 if all_dead else ROWS - 10)
    for plan in (replay, home):  # as when their merge tasks are cleared
        store.delete(RunLayout(plan.folder).merge)
        with pytest.raises(StaleLedgerError, match="published by another plan"):
            merge(store, plan.folder)
        assert (table_rows(store, "job/results"), table_rows(store, "dead_letters")) == before
    with pytest.raises(CorruptError, match="count the run's newest generation"):
        standing_of(store, home)
    with pytest.raises(StaleLedgerError, match="replay the run's newest generation"):
        prepare_replay(store, home.folder, "late")


def test_a_restarted_run_is_published_before_it_is_replayed(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, [{"text": f"text {i}"} for i in range(20)])
    publish_run(store, split(store, job(tmp_path), "home"), dead=dead_at_first)
    spec = job(tmp_path, prompt={"template": "New: {{ text }}"}, on_changed_spec="restart")
    second = split(store, spec, "home")
    commit_run(store, second, dead=dead_at_first)
    reconcile(store, second.folder)
    with pytest.raises(StaleLedgerError, match="it is not published yet: run its merge, then replay it"):
        prepare_replay(store, second.folder, "early")
    with pytest.raises(CorruptError, match="it is not published yet: run its merge, then count it"):
        standing_of(store, second)


def test_a_run_planned_anew_keeps_nothing_of_its_old_plan(tmp_path: Path, store: Store, home: Plan) -> None:
    """Its folder is deleted and its split cleared: the new rows have nothing to do with the old replay's."""
    old = prepare_replay(store, home.folder, "again")
    publish_run(store, old)
    for info in list(store.list(home.folder)):
        store.delete(info.key)
    write_input(tmp_path, [{"id": f"new{i}", "text": f"new text {i}", "who": ""} for i in range(ROWS)])
    publish_run(store, split(store, home.spec, "home"))
    found = table_rows(store, "job/results")
    assert [r["custom_id"] for r in found] == [f"new{i}" for i in range(ROWS)]
    store.delete(RunLayout(old.folder).merge)
    with pytest.raises(StaleLedgerError, match="has another plan than when this replay was planned"):
        merge(store, old.folder)
    assert table_rows(store, "job/results") == found
