"""The process a fault strikes: `python -m tests.chaos.victim WHAT ARGUMENTS`; `main` knows what there is."""

from __future__ import annotations

import os
import sys

from airflow_batchinfer.store import Store
from airflow_batchinfer.worker.__main__ import leave
from tests.chaos.injection import install


def main() -> int:
    """Arm the fault, then do what the real process does."""
    install()
    what, *arguments = sys.argv[1:]
    if what == "worker":
        return _worker(arguments)
    if what == "task":
        return _task(arguments)
    if what == "split":
        return _split(arguments[0])
    from airflow_batchinfer.store import open_store

    store, folder = open_store(arguments[0]), arguments[1]
    if what == "reconcile":
        from airflow_batchinfer.pipeline.reconcile import reconcile

        reconcile(store, folder)
    elif what == "replay":
        return _replay(store, folder, arguments[2])
    else:
        from airflow_batchinfer.pipeline.merge import merge

        merge(store, folder)
    return 0


def _worker(arguments: list[str]) -> int:
    from airflow_batchinfer.worker.__main__ import main as worker

    sys.argv = ["worker", *arguments]
    return worker()


def _split(spec_file: str) -> int:
    from airflow_batchinfer.pipeline.split import split
    from airflow_batchinfer.spec_files import load_spec
    from airflow_batchinfer.store import open_store

    spec = load_spec(spec_file)
    split(open_store(spec.store), spec, "run")
    return 0


def _task(arguments: list[str]) -> int:
    """A task's own process with its worker below it, as `BatchInferLocalOperator` runs it."""
    from airflow_batchinfer.operators.local_worker import LocalWorker

    command = [sys.executable, "-m", "airflow_batchinfer.worker", *arguments, "--die-with-parent"]
    with LocalWorker(command, os.environ, print, grace_seconds=30.0) as worker:
        while (code := worker.wait(0.1)) is None:
            pass
    return code


def _replay(store: Store, folder: str, paid_log: str) -> int:
    """All of a replay that succeeds with each row: plan, worker, ledger, tables."""
    from airflow_batchinfer.pipeline.merge import merge
    from airflow_batchinfer.pipeline.reconcile import reconcile
    from airflow_batchinfer.pipeline.replay import prepare_replay

    model = {"backend": "tests.engines:InstantEngine", "engine": {"paid_log": paid_log}}
    plan = prepare_replay(store, folder, "replay", overrides={"model": model})
    code = _worker(["--store", store.uri, "--folder", plan.folder, "--shards", "0"])
    if code == 0:
        reconcile(store, plan.folder)
        merge(store, plan.folder)
    return code


if __name__ == "__main__":
    leave(main())
