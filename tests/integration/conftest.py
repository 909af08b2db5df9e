"""One real Airflow for the whole session, and jobs to run on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from scripts.airflow_stack import AirflowApi

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def airflow_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that `[batchinfer] store` of the test Airflow names."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def airflow(tmp_path_factory: pytest.TempPathFactory, airflow_store: Path) -> Iterator[AirflowApi]:
    """REST client of an Airflow that has the shipped DAGs and those of the tests."""
    from scripts.airflow_stack import AirflowStack

    home = tmp_path_factory.mktemp("airflow")
    dags = home / "dags"
    dags.mkdir()
    (dags / "shipped").symlink_to(ROOT / "dags")
    (dags / "tests").symlink_to(ROOT / "tests" / "integration" / "dags")
    env = {
        "PYTHONPATH": str(ROOT),
        "AIRFLOW__BATCHINFER__STORE": str(airflow_store),
        "AIRFLOW__BATCHINFER__WORKER_PYTHON": sys.executable,
        "BATCHINFER_TEST_WORKER_PYTHON": str(worker_python()),
    }
    with AirflowStack(home, dags, env=env) as stack:
        for dag_id in ("any_job",):
            stack.api.wait_for_dag(dag_id)
        yield stack.api


def worker_python() -> Path:
    """The worker environment's Python, as `make` builds it."""
    return Path(os.environ.get("BATCHINFER_WORKER_PYTHON", ROOT / ".build" / "worker" / "bin" / "python"))
