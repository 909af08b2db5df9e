"""This package: split, one worker process, reconcile and merge; no Airflow around it.

What is held is the worker; the other steps run where no accelerator is, and are timed apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.job import Job, Results

_RUN = "bench"


def plan(job: Job, python: str) -> float:
    """Split, with Airflow's Python, which has the data engines. Returns seconds, start of Python included."""
    return _timed(python, "plan", job)


def publish(job: Job, python: str) -> float:
    """Reconcile and merge. Returns seconds, start of Python included."""
    return _timed(python, "publish", job)


def _timed(python: str, step: str, job: Job) -> float:
    begin = time.monotonic()
    subprocess.run([python, "-m", "benchmarks.peers.ours", step, str(job.folder / "job.json")], check=True)
    return time.monotonic() - begin


def main(job: Job) -> None:
    """Become the worker of all shards."""
    from airflow_batchinfer.run.layout import run_dir
    from airflow_batchinfer.run.plan import Plan
    from airflow_batchinfer.store import open_store

    store = open_store(str(job.folder / "store"))
    folder = run_dir("peers", _RUN)
    plan = Plan.read(store, f"{folder}/plan.json")
    shards = ",".join(str(s.shard) for s in plan.shards)
    where = ["--store", store.uri, "--folder", folder, "--shards", shards]
    os.execv(sys.executable, [sys.executable, "-m", "airflow_batchinfer.worker", *where])


def results(folder: Path) -> Results:
    """Rows that succeeded, copies included, from the parts on disk (committed or not)."""
    import pyarrow.parquet as pq

    found: Results = {}
    for path in sorted((folder / "store").rglob("part-*.parquet")):
        for row in pq.read_table(path, columns=["row_id", "outcome", "output"]).to_pylist():
            if row["outcome"] == "succeeded":
                found[row["row_id"] + 1] = row["output"]
    for path in (folder / "store").rglob("copies-*.parquet"):
        for row in pq.read_table(path, columns=["row_id", "copy_of"]).to_pylist():
            if row["copy_of"] + 1 in found:
                found[row["row_id"] + 1] = found[row["copy_of"] + 1]
    return found


def _plan(job: Job) -> None:
    from airflow_batchinfer.pipeline.split import split
    from airflow_batchinfer.spec import JobSpec
    from airflow_batchinfer.store import open_store

    data: dict[str, Any] = {
        "name": "peers",
        "input": {"path": job.prompts, "id_column": "id"},
        "prompt": {"template": job.template.replace("{text}", "{{ text }}"), "system": job.system or None},
        "model": {"name": job.model, "engine": job.engine},
        "sampling": {"max_tokens": job.max_tokens},
        "checkpoint": {"rows": 64, "seconds": 5},
        "store": str(job.folder / "store"),
    }
    split(open_store(data["store"]), JobSpec.parse(data), _RUN)


def _publish(job: Job) -> None:
    from airflow_batchinfer.pipeline.merge import merge
    from airflow_batchinfer.pipeline.reconcile import reconcile
    from airflow_batchinfer.run.layout import run_dir
    from airflow_batchinfer.store import open_store

    store = open_store(str(job.folder / "store"))
    reconcile(store, run_dir("peers", _RUN))
    merge(store, run_dir("peers", _RUN))


if __name__ == "__main__":
    if sys.argv[1] in ("plan", "publish"):
        {"plan": _plan, "publish": _publish}[sys.argv[1]](Job.load(sys.argv[2]))
    else:
        main(Job.load(sys.argv[1]))
