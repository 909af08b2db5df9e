"""A server is away for as long as connections fail one after another, and no longer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from airflow_batchinfer.worker.engines import outage


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, to be set."""
    clock = [1000.0]
    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def fails(away: outage.Outage, now: list[float], after: float) -> float:
    """An attempt begins now and fails after so long; the next follows a second later."""
    started = now[0]
    now[0] += after
    seconds = away.goes_on(started)
    now[0] += 1.0
    return seconds


def test_failures_one_after_another_are_one_outage(now: list[float]) -> None:
    away = outage.Outage()
    assert [fails(away, now, 10.0) for _ in range(3)] == [10.0, 21.0, 32.0]


def test_an_answer_ends_an_outage(now: list[float]) -> None:
    away = outage.Outage()
    fails(away, now, 10.0)
    away.is_over()
    assert fails(away, now, 0.5) == 0.5


def test_a_refused_connection_long_after_another_is_not_the_same_outage(now: list[float]) -> None:
    """In between, answers were in progress that take long."""
    away = outage.Outage()
    fails(away, now, 0.0)
    now[0] += 40.0
    assert fails(away, now, 0.0) == 0.0
