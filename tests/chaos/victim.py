"""The process a fault strikes: `python -m tests.chaos.victim worker|reconcile|merge ARGUMENTS`."""

from __future__ import annotations

import sys

from airflow_batchinfer.worker.__main__ import leave
from tests.chaos.injection import Fault, install


def main() -> int:
    """Arm the fault, then do what the real process does."""
    install(Fault.from_environment())
    what, *arguments = sys.argv[1:]
    if what == "worker":
        from airflow_batchinfer.worker.__main__ import main as worker

        sys.argv = ["worker", *arguments]
        return worker()
    from airflow_batchinfer.store import open_store

    store, folder = open_store(arguments[0]), arguments[1]
    if what == "reconcile":
        from airflow_batchinfer.pipeline.reconcile import reconcile

        reconcile(store, folder)
    else:
        from airflow_batchinfer.pipeline.merge import merge

        merge(store, folder)
    return 0


if __name__ == "__main__":
    leave(main())
