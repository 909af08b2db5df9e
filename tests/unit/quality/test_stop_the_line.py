"""Real worker processes that stop the line, are stopped by others, and go on once it is cleared."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from airflow_batchinfer.errors import ExitCode
from airflow_batchinfer.run.commit import chosen_commit
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.stop import clear_stop, read_stop, set_stop
from airflow_batchinfer.store import LocalStore
from tests.plans import job, plan_run

pytestmark = pytest.mark.airflow_env

ROOT = Path(__file__).resolve().parents[3]
# The worker sends the longest rows first.
EARLY = [f"{i} is good {'and long ' * 9}" for i in range(60)]
BAD = [f"{i} is <<invalid 99>> and bad" for i in range(60)]
LATE = [f"{i}" for i in range(200)]


def plan(store: Path, *shards: list[str], **engine: Any) -> Plan:
    spec = job(
        store,
        task={"type": "choice", "labels": ["yes", "no"]},
        model={
            "name": "none",
            "backend": "tests.engines:FaultyEngine",
            "engine": {"max_in_flight": 8, "paid_log": str(store / "paid"), **engine},
        },
        line={"window": 60, "min_rows": 60, "max_dead": 0.5},
        retry={"invalid_attempts": 1},
        checkpoint={"rows": 20, "progress_seconds": 0.2},
    )
    store.mkdir(exist_ok=True)
    return plan_run(spec, shards)


def start(made: Plan, shard: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "airflow_batchinfer.worker", "--store", made.spec.store]
    command += ["--folder", made.folder, "--shards", str(shard)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def finish(worker: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = worker.communicate(timeout=120)
    return worker.returncode, stderr.strip().splitlines()[-1]


def durable(made: Plan, shard: int) -> list[int]:
    parts = Path(made.spec.store, RunLayout(made.folder).shard(shard)).glob("*/part-*.parquet")
    return sorted(row for part in parts for row in pq.read_table(part)["row_id"].to_pylist())


def test_a_run_that_turns_bad_stops_and_resumes(tmp_path: Path) -> None:
    made = plan(tmp_path, [*LATE, *BAD, *EARLY])
    store = LocalStore(tmp_path)
    code, said = finish(start(made, 0))
    assert code == ExitCode.STOPPED
    assert "batchinfer: stopped by worker of shard 0000: 31 of the last 60 rows did not succeed" in said
    assert f"airflow_batchinfer resume {made.folder}" in said
    kept = durable(made, 0)
    assert 91 <= len(kept) <= 91 + 2 * 8, "what was in flight is kept, and no more is admitted"

    code, again = finish(start(made, 0))
    assert (code, again) == (ExitCode.STOPPED, said)
    assert durable(made, 0) == kept

    assert clear_stop(store, made.folder)
    assert finish(start(made, 0))[0] == ExitCode.COMMITTED
    assert durable(made, 0) == list(range(320))
    commit = chosen_commit(store, RunLayout(made.folder), 0, made.fingerprint)
    assert commit is not None
    assert commit.counts == {"succeeded": 260, "invalid": 60}
    paid = [line.split("/", 1)[0] for line in (tmp_path / "paid").read_text().splitlines()]
    assert sorted(map(int, paid)) == list(range(320)), "no row is paid twice"


def test_the_marker_stops_other_workers(tmp_path: Path) -> None:
    many = [f"{i}" for i in range(1000)]
    made = plan(tmp_path, [*BAD, *BAD], many, delay_seconds=0.1)
    bystander = start(made, 1)
    while not durable(made, 1):
        assert bystander.poll() is None
        time.sleep(0.02)
    assert finish(start(made, 0))[0] == ExitCode.STOPPED
    code, said = finish(bystander)
    assert code == ExitCode.STOPPED
    assert "stopped by worker of shard 0000" in said
    assert 0 < len(durable(made, 1)) < len(many)


def test_a_person_can_pull_the_brake(tmp_path: Path) -> None:
    made = plan(tmp_path, LATE)
    set_stop(LocalStore(tmp_path), made.folder, "wrong model", by="Ada")
    code, said = finish(start(made, 0))
    assert code == ExitCode.STOPPED
    assert "stopped by Ada: wrong model" in said
    assert durable(made, 0) == []


def test_a_marker_that_cannot_be_read_still_stops(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write_bytes(RunLayout("job/runs/run").stop, b"STOP!")
    found = read_stop(store, "job/runs/run")
    assert found is not None
    assert "stop.json" in found.by
