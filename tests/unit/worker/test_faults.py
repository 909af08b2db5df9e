"""One bad row costs only itself: poison, hangs, errors and answers that are none."""

from __future__ import annotations

import math
from typing import Any

import pytest

from airflow_batchinfer.errors import ExitCode
from tests.unit.worker.conftest import Run, assert_sums, texts

NO_WAIT = {"backoff_seconds": 0.01}


def test_a_row_that_kills_the_engine_is_found_and_the_rest_succeeds(run: Run) -> None:
    in_flight = 64
    options = {"delay_seconds": 0.01, "max_in_flight": in_flight}
    run.plan(texts(200, {77: "<<die>>"}), engine="DyingEngine", options=options)
    assert run.work()[0] == ExitCode.COMMITTED
    results = run.results()
    assert run.outcomes() == {"succeeded": 199, "poisoned": 1}
    assert results[77]["reason"] == "engine_killed"
    assert "exited with code 9" in results[77]["message"] or "ended with code 9" in results[77]["message"]
    assert "no other row beside it" in results[77]["message"]
    assert run.progress().engine_restarts <= math.ceil(math.log2(in_flight)) + 3
    assert_sums(run.commit())


def test_rows_that_come_after_the_engine_has_died_are_no_suspects(run: Run) -> None:
    options = {"max_in_flight": 4, "lives_for": 20, "starts_log": str(run.folder / "starts")}
    run.plan(texts(60), engine="PartingEngine", options=options)
    _, said = (worker := run.start()).communicate(timeout=60)
    assert worker.returncode == ExitCode.COMMITTED
    assert "the engine died with 0 rows in flight" in said
    assert "the engine died with 4" not in said
    assert run.progress().engine_restarts == 1
    assert {row["attempts"] for row in run.results().values()} == {1}


def test_two_rows_that_kill_are_both_found(run: Run) -> None:
    options = {"delay_seconds": 0.01, "max_in_flight": 16}
    run.plan(texts(60, {5: "<<die>>", 6: "<<die>>"}), engine="DyingEngine", options=options)
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.outcomes() == {"succeeded": 58, "poisoned": 2}
    assert run.progress().engine_restarts <= 2 * (4 + 3)


def test_a_row_that_kills_the_whole_worker_is_found_by_its_successors(run: Run) -> None:
    in_flight = 16
    options = {"delay_seconds": 0.01, "max_in_flight": in_flight}
    run.plan(
        texts(100, {42: "<<killworker>>"}),
        engine="FaultyEngine",
        options=options,
        checkpoint={"rows": 10, "progress_seconds": 0.1},
    )
    deaths = 0
    while (code := run.work()[0]) == -9:
        deaths += 1
        assert deaths <= math.ceil(math.log2(in_flight)) + 3
    assert code == ExitCode.COMMITTED
    assert deaths >= 3
    result = run.results()[42]
    assert result["outcome"] == "poisoned"
    assert f"the worker died {deaths} times while this row was in the engine" in result["message"]
    assert run.outcomes() == {"succeeded": 99, "poisoned": 1}


def test_one_kill_from_outside_makes_nobody_a_suspect(run: Run) -> None:
    options = {"delay_seconds": 0.05, "max_in_flight": 4}
    run.plan(texts(60), options=options)
    worker = run.start()
    run.kill_when(worker, lambda: len(run.paid()) >= 8)
    assert len(run.files("suspects.json")) == 1
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.outcomes() == {"succeeded": 60}


def test_one_death_of_the_engine_convicts_no_row_that_a_worker_died_with_before(run: Run) -> None:
    options = {"starts_log": str(run.folder / "starts")}
    run.plan(
        texts(1, {0: "<<hang 2>>"}), engine="FaultyEngine", options=options, retry={"stall_seconds": 1.0}
    )
    run.kill_when(run.start(), lambda: bool(run.files("suspects.json")))
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.outcomes() == {"succeeded": 1}
    assert run.progress().engine_restarts == 1


def test_an_engine_that_dies_too_often_ends_the_worker_and_what_is_done_stays(run: Run) -> None:
    faults = {30: "<<die>>", 31: "<<die>>"}
    options = {"delay_seconds": 0.01, "max_in_flight": 16}
    run.plan(texts(60, faults), engine="DyingEngine", options=options, retry={"engine_restarts": 3})
    code, said = run.work()
    assert code == ExitCode.ENGINE_FAILED
    assert "more than retry.engine_restarts=3 times" in said
    assert run.durable() == set(run.paid())
    assert run.progress().state == "failed"


def test_a_row_that_hangs_is_timed_out_and_the_rest_succeeds(run: Run) -> None:
    run.plan(
        texts(200, {3: "<<hang>>"}),
        engine="FaultyEngine",
        options={"delay_seconds": 0.02, "max_in_flight": 4},
        retry={"row_timeout_seconds": 0.2, "stall_seconds": 60, "engine_attempts": 2},
    )
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.outcomes() == {"succeeded": 199, "failed": 1}
    result = run.results()[3]
    assert (result["reason"], result["attempts"]) == ("timed_out", 2)
    assert "retry.row_timeout_seconds=0.2" in result["message"]
    assert run.progress().engine_restarts == 0


def test_time_in_the_engines_queue_does_not_count_as_running(run: Run) -> None:
    """The window is 60 rows and the engine takes one at a time: most wait for longer than a row may run."""
    run.plan(
        texts(60),
        options={"delay_seconds": 0.05, "one_at_a_time": True, "max_in_flight": 60},
        retry={"row_timeout_seconds": 1.0},
    )
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.outcomes() == {"succeeded": 60}
    assert {result["attempts"] for result in run.results().values()} == {1}
    assert run.progress().engine_restarts == 0


def test_a_stuck_engine_is_ended_although_its_rows_enter_one_by_one(run: Run) -> None:
    """Aborting the one row would leave the engine stuck, and each row after it would be blamed in turn."""
    run.plan(
        texts(6, {2: "<<stall>>"}),
        engine="FaultyEngine",
        options={"max_in_flight": 1},
        retry={"row_timeout_seconds": 0.3, "stall_seconds": 60, "backoff_seconds": 0.01},
    )
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.outcomes() == {"succeeded": 5, "failed": 1}
    assert run.results()[2]["reason"] == "timed_out"


def test_a_row_that_stalls_the_engine_is_found_and_the_rest_succeeds(run: Run) -> None:
    run.plan(
        texts(40, {9: "<<stall>>"}),
        engine="FaultyEngine",
        options={"max_in_flight": 8},
        retry={"stall_seconds": 0.4},
    )
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.outcomes() == {"succeeded": 39, "failed": 1}
    result = run.results()[9]
    assert result["reason"] == "timed_out"
    assert "retry.stall_seconds=0.4" in result["message"]
    assert run.progress().engine_restarts <= 3 + 3


def test_an_engine_with_nothing_to_do_is_not_taken_for_stalled(run: Run) -> None:
    """While the only row left waits for its next attempt, or for a slow store, nothing is in the engine."""
    run.plan(
        texts(4, {1: "<<transient 1>>"}),
        engine="FaultyEngine",
        retry={"stall_seconds": 0.4, "backoff_seconds": 2.0},
    )
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.outcomes() == {"succeeded": 4}
    assert run.progress().engine_restarts == 0


@pytest.mark.parametrize(
    ("mark", "outcome", "reason", "attempts", "message"),
    [
        ("<<twice>>", "succeeded", None, 1, None),
        ("<<blank>>", "invalid", "empty_output", 2, "the output is blank (attempt 2, with seed 1)"),
        ("<<invalid 1>>", "succeeded", None, 2, "attempt 2, with seed 1"),
        ("<<invalid 9>>", "invalid", "invalid_output", 2, "none of the labels"),
        ("<<transient 2>>", "succeeded", None, 3, None),
        ("<<throttle 2>>", "succeeded", None, 3, None),
        ("<<transient 9>>", "failed", "engine_error", 3, "try again (attempt 3)"),
        ("<<refuse>>", "failed", "engine_refused", 1, "no"),
        ("<<grammar>>", "failed", "grammar_rejected", 1, "no such grammar"),
        ("<<abort>>", "failed", "engine_error", 3, "finish_reason `abort`"),
        ("<<length>>", "invalid", "truncated_output", 2, "cut off by sampling.max_tokens"),
        ("<<utf8>>", "invalid", "invalid_output", 2, "none of the labels"),
    ],
)
def test_outcomes(
    all_faults: dict[str, dict[str, Any]],
    mark: str,
    outcome: str,
    reason: str | None,
    attempts: int,
    message: str | None,
) -> None:
    result = all_faults[mark]
    assert (result["outcome"], result["reason"], result["attempts"]) == (outcome, reason, attempts)
    assert message is None if result["message"] is None else (message or "") in result["message"]


MARKS = (
    *("<<twice>>", "<<blank>>", "<<invalid 1>>", "<<invalid 9>>", "<<transient 2>>", "<<throttle 2>>"),
    *("<<transient 9>>", "<<refuse>>", "<<grammar>>", "<<abort>>", "<<length>>", "<<utf8>>"),
)


@pytest.fixture(scope="module")
def all_faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One run with every fault in it, and what became of the rows that had them."""
    run = Run(tmp_path_factory.mktemp("faults"))
    run.plan(
        texts(100, {10 + i: mark for i, mark in enumerate(MARKS)}),
        engine="FaultyEngine",
        task={"type": "choice", "labels": ["yes", "no"]},
        sampling={"temperature": 0.7},
        retry=NO_WAIT,
        line={"max_dead": 1.0},
    )
    assert run.work()[0] == ExitCode.COMMITTED
    assert_sums(run.commit())
    results = run.results()
    assert all(results[i]["outcome"] == "succeeded" for i in range(10))
    return {mark: results[10 + i] for i, mark in enumerate(MARKS)}


def test_an_invalid_answer_is_not_paid_for_again_where_it_would_be_the_same(run: Run) -> None:
    faults = {1: "<<invalid 9>>", 2: "<<transient 2>>"}
    task = {"type": "choice", "labels": ["yes", "no"]}
    run.plan(texts(4, faults), engine="FaultyEngine", options={"greedy": True}, task=task, retry=NO_WAIT)
    assert run.work()[0] == ExitCode.COMMITTED
    assert {row: result["attempts"] for row, result in run.results().items()} == {0: 1, 1: 1, 2: 3, 3: 1}


def test_without_a_draw_no_seed_is_named(run: Run) -> None:
    task = {"type": "choice", "labels": ["yes", "no"]}
    run.plan(texts(4, {1: "<<invalid 1>>"}), engine="FaultyEngine", task=task)
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.results()[1]["message"] == "attempt 2: invalid before"


def test_rows_without_text_and_copies_are_counted(run: Run) -> None:
    run.plan(["a", None, "  ", "b"], copies={0: 2, 1: 5})
    assert run.work()[0] == 0
    commit = run.commit()
    assert commit.counts == {"succeeded": 4, "rejected": 7}
    assert commit.reasons == {"empty_input": 7}
    assert "4/4 rows (7 dead, " in run.progress().line()
    assert sum(run.paid().values()) == 2


def test_a_template_that_fails_on_one_row_rejects_it_alone(run: Run) -> None:
    run.plan(["10", "none", "5"], prompt={"template": "{{ 100 // (text | int) }}"})
    assert run.work()[0] == 0
    assert run.outcomes() == {"succeeded": 2, "rejected": 1}
    assert run.results()[1]["reason"] == "render_error"


def test_json_and_vectors(run: Run) -> None:
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}
    run.plan(texts(5), task={"type": "json", "schema": schema})
    assert run.work()[0] == 0
    assert run.results()[0]["output"].startswith('{"score":')


def test_vectors(run: Run) -> None:
    run.plan(texts(5), task={"type": "embed"})
    assert run.work()[0] == 0
    vector = run.results()[0]["vector"]
    assert math.isclose(sum(x * x for x in vector), 1.0, rel_tol=1e-5)


def test_an_engine_that_does_not_start(run: Run) -> None:
    run.plan(texts(3), engine="FailingStartEngine")
    assert run.work() == (ExitCode.ENGINE_FAILED, "batchinfer: no memory left on the device")
    assert run.progress().state == "failed"


@pytest.mark.parametrize("error", ["EngineError", "SpecError"])
def test_a_restart_that_fails_is_tried_again(run: Run, error: str) -> None:
    log = run.folder / "starts"
    run.plan(
        texts(20, {3: "<<stall>>"}),
        engine="FaultyEngine",
        options={
            "max_in_flight": 1,
            "starts_log": str(log),
            "failing_starts": [2],
            "starts_fail_with": error,
        },
        retry={"stall_seconds": 0.2, **NO_WAIT},
    )
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.outcomes() == {"succeeded": 19, "failed": 1}
    assert log.read_text().split().count("start") == run.progress().engine_restarts + 1 == 4


def test_a_job_that_is_refused_after_a_restart_has_worked_and_may_do_so_again(run: Run) -> None:
    marks = dict.fromkeys(range(10), "<<locked>>") | {3: "<<stall>>"}
    run.plan(
        texts(10, marks),
        engine="FaultyEngine",
        options={"max_in_flight": 4, "starts_log": str(run.folder / "starts")},
        retry={"stall_seconds": 0.2, **NO_WAIT},
    )
    code, said = run.work()
    assert (code, said) == (ExitCode.ENGINE_FAILED, "batchinfer: the key is refused")
    assert run.files("suspects.json") == []


def test_a_verdict_is_durable_before_the_engine_is_back(run: Run) -> None:
    options = {"max_in_flight": 1, "starts_log": str(run.folder / "starts"), "failing_starts": [3]}
    run.plan(texts(3, {0: "<<die>>"}), engine="DyingEngine", options=options, retry={"backoff_seconds": 60})
    worker = run.start()
    run.wait_until(lambda: 0 in run.durable(), worker, patience=40)
    worker.kill()
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.outcomes() == {"succeeded": 2, "poisoned": 1}


def test_a_restart_that_keeps_failing_ends_the_worker_and_what_is_done_stays(run: Run) -> None:
    log = run.folder / "starts"
    run.plan(
        texts(20, {9: "<<die>>"}),
        engine="DyingEngine",
        options={
            "delay_seconds": 0.01,
            "max_in_flight": 2,
            "starts_log": str(log),
            "failing_starts": [2, 3, 4, 5],
        },
        retry={"restart_attempts": 3, **NO_WAIT},
    )
    code, said = run.work()
    assert code == ExitCode.ENGINE_FAILED
    assert "no memory left on the device (attempt 3 of retry.restart_attempts" in said
    assert log.read_text().split().count("start") == 1 + 3
    assert run.durable() == set(run.paid())


def test_an_engine_that_hangs_while_it_starts(run: Run) -> None:
    run.plan(
        texts(3), engine="FailingStartEngine", options={"hang_start": True}, retry={"startup_seconds": 0.3}
    )
    code, said = run.work()
    assert code == ExitCode.ENGINE_FAILED
    assert "did not start within retry.startup_seconds=0.3" in said


LONG = [f"a row with so much text that it goes first {i}" for i in range(20)]


def test_an_engine_that_cannot_be_ended_ends_the_worker_and_what_is_done_stays(run: Run) -> None:
    run.plan(
        [*LONG, "<<stall>>"],
        engine="UnkillableEngine",
        options={"max_in_flight": 4},
        retry={"stall_seconds": 0.4},
    )
    code, said = run.work()
    assert code == ExitCode.ENGINE_FAILED
    assert "made no token for retry.stall_seconds=0.4; the engine does not end, not even by force" in said
    assert run.durable() == set(run.paid()) == set(range(20))
    assert run.progress().state == "failed"


IMPATIENT = """
import sys
from airflow_batchinfer.worker import guard
from airflow_batchinfer.worker.__main__ import leave, main
guard.STUCK_SECONDS = 0.5
leave(main())
"""


def test_a_worker_held_by_its_engine_is_ended_and_what_is_done_stays(run: Run) -> None:
    run.plan(
        [*LONG, "<<stall>>"],
        engine="UnkillableEngine",
        options={"max_in_flight": 4, "hang_close": True},
        retry={"stall_seconds": 0.4},
    )
    code, said = run.end_of(run.start(program=("-c", IMPATIENT)))
    assert (code, said) == (ExitCode.ENGINE_FAILED, "batchinfer: the engine does not end")
    assert run.durable() == set(run.paid()) == set(range(20))
    assert run.progress().state == "failed"


WITH_A_BUG = """
from airflow_batchinfer.worker import loop
from airflow_batchinfer.worker.__main__ import leave, main
loop.Loop._completed = lambda *_: 1 / 0
leave(main())
"""


def test_a_bug_ends_the_worker_and_its_progress_says_so(run: Run) -> None:
    run.plan(texts(3))
    code, said = run.end_of(run.start(program=("-c", WITH_A_BUG)))
    assert (code, said) == (1, "batchinfer: internal error: ZeroDivisionError: division by zero")
    progress = run.progress()
    assert (progress.state, progress.message) == ("failed", "ZeroDivisionError: division by zero")
    assert run.files("suspects.json"), "one of the rows may have brought it about"


def test_an_engine_that_does_not_exist(run: Run) -> None:
    run.plan(texts(3), engine="NoSuchEngine")
    code, said = run.work()
    assert code == ExitCode.BAD_SPEC
    assert "has no `NoSuchEngine`" in said


def test_judging_that_takes_long_is_no_stall_of_the_engine(run: Run) -> None:
    run.plan(
        texts(20),
        options={"max_in_flight": 10, "answer": "word" * 15 + ".!"},
        task={"type": "regex", "pattern": r"(\w|\w\w)+!"},
        retry={"stall_seconds": 1.0, "invalid_attempts": 1},
        line={"max_dead": 1.0},
    )
    assert run.work()[0] == ExitCode.COMMITTED
    assert {row["reason"] for row in run.results().values()} == {"invalid_output"}
    assert run.progress().engine_restarts == 0
