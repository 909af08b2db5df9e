"""`make tour`: what comes after the first run, step by step on the demo's data, Airflow and model.

python -m scripts.tour [data] [gates]      all parts by default
"""

from __future__ import annotations

import sys

import httpx

from airflow_batchinfer.store import LocalStore
from scripts.airflow_stack import AirflowStack, StackError
from scripts.demo import DAG_ID, ENVIRONMENT, HOME, ROOT, STORE, DemoError, stop_kept
from scripts.tour import data, gates

PARTS = {
    "data": (data.replay, data.nights),
    "gates": (gates.broken, gates.approved, gates.drifted, gates.bad),
}


def main(arguments: list[str]) -> int:
    """Take the tour, or the parts of it that are named; the exit status."""
    stop_kept()
    store = LocalStore(STORE)
    try:
        with AirflowStack(HOME, ROOT / "dags", env=ENVIRONMENT) as stack:
            for dag_id in (DAG_ID, data.REPLAY):
                stack.api.wait_for_dag(dag_id)
                stack.api.fail_unfinished(dag_id)
            for part in arguments or PARTS:
                for step in PARTS[part]:
                    step(stack.api, store)
    except (DemoError, StackError, httpx.HTTPError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
