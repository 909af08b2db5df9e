"""A short form of the chaos matrix; `make chaos` runs all of it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.chaos.case import Case
from tests.chaos.matrix import cases, run_case

pytestmark = pytest.mark.airflow_env

_SHORT = (
    ("SIGKILL of the worker", "after write 1 of `part-00002`"),
    ("SIGKILL of the worker", "before write 1 of `commit.json`"),
    ("SIGKILL of the worker", "random"),
    ("a torn write", ""),
    ("SIGTERM", "0 s of grace"),
    ("two attempts at once", ""),
    ("disk full, once", ""),
    ("a flipped byte", "`part-00001.parquet`"),
    ("the engine takes the worker with it", ""),
    ("two merges at once", ""),
)
_TRIES = 2
"""Of each case: its last ones, which strike latest."""


def _find(fault: str, where: str) -> Case:
    return next(c for c in cases(random_kills=2) if c.fault.startswith(fault) and where in c.where)


@pytest.mark.parametrize(("fault", "where"), _SHORT)
def test_nothing_lost_doubled_or_paid_twice(fault: str, where: str) -> None:
    case = _find(fault, where)
    line = run_case(dataclasses.replace(case, tries=case.tries[-_TRIES:]))
    assert line.clean, line
