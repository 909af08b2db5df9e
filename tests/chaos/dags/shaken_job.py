"""The DAG that `tests.chaos.airflow` shakes: the job comes with the run's conf."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import Param

from airflow_batchinfer.dag import batch_inference
from airflow_batchinfer.spec import JobSpec

shaken_job = batch_inference(
    lambda params: JobSpec.parse(params["spec"]),
    dag_id="shaken_job",
    params={"spec": Param(None, type=["object", "null"], description="Fields of the job.")},
    retries=2,
    retry_delay=timedelta(seconds=1),
)
