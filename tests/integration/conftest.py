"""One real Airflow for the whole session, and jobs to run on it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from scripts.airflow_stack import AirflowApi, AirflowStack

from tests.s3.servers import ACCESS_KEY, SECRET_KEY

ROOT = Path(__file__).resolve().parents[2]
STORE_CONNECTION = {
    "conn_type": "aws",
    "login": ACCESS_KEY,
    "password": SECRET_KEY,
    "extra": {"region_name": "us-east-1"},
}
"""Airflow's connection `test_store`: the credentials of the S3 servers that tests start."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked `mishaps`, unless they are asked for: they take many minutes."""
    if "mishaps" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("mishaps")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def airflow_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that `[batchinfer] store` of the test Airflow names."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the test DAGs look for a cluster; the tests that have one write it."""
    return tmp_path_factory.mktemp("kube") / "kubeconfig"


@pytest.fixture(scope="session")
def airflow_stack(
    tmp_path_factory: pytest.TempPathFactory, airflow_store: Path, kubeconfig: Path
) -> Iterator[AirflowStack]:
    """An Airflow that has the shipped DAGs and those of the tests."""
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
        "BATCHINFER_TEST_KUBECONFIG": str(kubeconfig),
        "AIRFLOW_CONN_TEST_STORE": json.dumps(STORE_CONNECTION),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with AirflowStack(home, dags, env=env, triggerer=True) as stack:
        for dag_id in ("any_job", "retried_job", "piloted_job", "somebodys_own", "batch_inference"):
            stack.api.wait_for_dag(dag_id)
        yield stack


@pytest.fixture(scope="session")
def airflow(airflow_stack: AirflowStack) -> AirflowApi:
    """Its REST client."""
    return airflow_stack.api


def worker_python() -> Path:
    """The worker environment's Python, as `make` builds it."""
    return Path(os.environ.get("BATCHINFER_WORKER_PYTHON", ROOT / ".build" / "worker" / "bin" / "python"))
