"""Batch inference by hand: fill in the form, press Trigger.

The form starts with the shipped sample, so pressing Trigger at once runs it.
"""

from __future__ import annotations

from pathlib import Path

from airflow_batchinfer.dag import batch_inference
from airflow_batchinfer.form import form_params, job_of_form

HERE = Path(__file__).parent

dag = batch_inference(
    job_of_form(HERE),
    dag_id="batch_inference",
    schedule=None,
    params=form_params(HERE / "tickets.yaml"),
    max_parallel_shards=2,
    pilot=True,  # for jobs that ask for one under "Other fields"; others skip it
    judge=True,  # likewise
    doc_md=__doc__,
    tags=["batchinfer"],
)
