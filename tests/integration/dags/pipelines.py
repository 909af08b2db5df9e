"""DAGs of the integration tests: each takes the job from the run's conf."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_batchinfer.dag import batch_inference
from airflow_batchinfer.spec import JobSpec

NO_SPEC = {"spec": Param({}, type="object")}


def job_of_conf(params: dict[str, Any]) -> JobSpec:
    return JobSpec.parse(params["spec"])


any_job = batch_inference(job_of_conf, dag_id="any_job", params=NO_SPEC, retries=0)

retried_job = batch_inference(
    job_of_conf, dag_id="retried_job", params=NO_SPEC, retries=1, retry_delay=timedelta(seconds=1)
)

model_job = batch_inference(
    job_of_conf,
    dag_id="model_job",
    params=NO_SPEC,
    retries=0,
    infer_arguments={
        "worker_python": os.environ.get("BATCHINFER_TEST_WORKER_PYTHON"),
        "worker_env": {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    },
)

with DAG("somebodys_own", params=NO_SPEC) as somebodys_own:

    @task
    def before() -> str:
        return "done"

    @task
    def after(published: dict[str, Any]) -> int:
        return int(published["rows"])

    inference = batch_inference(job_of_conf, group_id="inference", retries=0)
    before() >> inference >> after(somebodys_own.get_task("inference.gate").output)
