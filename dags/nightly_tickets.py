"""Every night: classify the tickets, as `tickets.yaml` says.

A run that is red is resumed by "Clear" on the failed tasks with downstream; nothing is paid twice.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from airflow_batchinfer.dag import batch_inference

dag = batch_inference(
    Path(__file__).parent / "tickets.yaml",
    dag_id="nightly_tickets",
    schedule="0 2 * * *",
    start_date=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    catchup=False,
    is_paused_upon_creation=True,
    max_active_runs=1,
    doc_md=__doc__,
    tags=["batchinfer"],
)
