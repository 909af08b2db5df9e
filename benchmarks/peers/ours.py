"""This package: split in Airflow's environment, one worker process, reconcile; no Airflow around it.

What is held is the worker; split and reconcile run where no accelerator is, and are timed apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.job import Job, Results

_RUN = "bench"


def prepare(job: Job, python: str) -> None:
    """Plan the run with Airflow's Python, which has the data engines; a plan that stands is kept."""
    subprocess.run([python, "-m", "benchmarks.peers.ours", "plan", str(job.folder / "job.json")], check=True)


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


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        _plan(Job.load(sys.argv[2]))
    else:
        main(Job.load(sys.argv[1]))
