from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.outcome import Outcome
from airflow_batchinfer.run.stop import clear_stop, read_stop, set_stop
from airflow_batchinfer.spec import LineSpec
from airflow_batchinfer.store import LocalStore
from airflow_batchinfer.worker.line import Line

pytestmark = pytest.mark.airflow_env

GOOD = (Outcome.SUCCEEDED, "fine", "stop")
BAD = (Outcome.INVALID, "not json", "stop")


def line(**limits: Any) -> Line:
    return Line(LineSpec(**{"window": 10, "min_rows": 4, **limits}))


def test_nothing_is_said_before_min_rows() -> None:
    watched = line()
    assert [watched.see(*BAD) for _ in range(3)] == [None] * 3
    assert watched.see(*BAD) == ("4 of the last 4 rows did not succeed (100%), more than `line.max_dead` 50%")


def test_rows_that_were_never_sent_do_not_count() -> None:
    watched = line()
    assert [watched.see(Outcome.REJECTED, None, None) for _ in range(50)] == [None] * 50


def test_old_rows_leave_the_window() -> None:
    watched = line(max_dead=0.5)
    for _ in range(1000):
        assert watched.see(*GOOD) is None
    said = [watched.see(*BAD) for _ in range(6)]
    assert said[:5] == [None] * 5
    assert said[5] is not None
    assert said[5].startswith("6 of the last 10 rows")


def test_a_run_at_the_limit_goes_on() -> None:
    watched = line(max_dead=0.5)
    for _ in range(100):
        assert watched.see(*GOOD) is None
        assert watched.see(*BAD) is None


@pytest.mark.parametrize(
    ("limit", "row"),
    [
        ("max_empty", (Outcome.SUCCEEDED, "  ", "stop")),
        ("max_length", (Outcome.SUCCEEDED, "text", "length")),
        ("max_identical", (Outcome.SUCCEEDED, "same", "stop")),
    ],
)
def test_each_limit(limit: str, row: tuple[Outcome, str, str]) -> None:
    watched = line(**{limit: 0.7, "max_dead": None})
    for i in range(3):
        assert watched.see(Outcome.SUCCEEDED, f"answer {i}", "stop") is None
    said = [watched.see(*row) for _ in range(8)]
    assert said[-1] is not None
    assert f"`line.{limit}`" in said[-1]
    assert said[0] is None


def test_limits_that_are_off_say_nothing() -> None:
    watched = line(max_dead=None)
    assert [watched.see(*BAD) for _ in range(50)] == [None] * 50


def test_first_stop_stands_until_cleared(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert read_stop(store, "job/runs/r") is None
    first = set_stop(store, "job/runs/r", "bad answers", by="worker, shard 0003")
    assert set_stop(store, "job/runs/r", "me too", by="worker, shard 0004") == first
    assert read_stop(store, "job/runs/r") == first
    assert clear_stop(store, "job/runs/r")
    assert not clear_stop(store, "job/runs/r")
    assert read_stop(store, "job/runs/r") is None
