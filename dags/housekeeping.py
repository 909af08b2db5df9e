"""Every week: delete the folders of runs older than 30 days, and what killed writers left behind.

Tables keep the rows of each job's 30 newest runs: they would grow by a copy of the results a run.
A run whose folder is gone can be neither resumed nor replayed.
"""

from __future__ import annotations

import datetime

from airflow.sdk import DAG

from airflow_batchinfer.operators.housekeeping import HousekeepingOperator

JOBS = ["tickets"]

with DAG(
    "batch_inference_housekeeping",
    schedule="0 5 * * 0",
    start_date=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    catchup=False,
    is_paused_upon_creation=True,
    max_active_runs=1,
    doc_md=__doc__,
    tags=["batchinfer"],
) as dag:
    for job in JOBS:
        HousekeepingOperator(
            task_id=job,
            job=job,
            # store="s3://my-bucket/batchinfer", store_conn_id="store",  # default: `[batchinfer] store`
            delete_runs_after=datetime.timedelta(days=30),
            keep_runs=30,
            retries=2,
        )
