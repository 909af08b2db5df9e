"""DAGs of the integration tests: each takes the job from the run's conf."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_batchinfer.dag import batch_inference, replay_dead_letters
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.spec_files import load_spec

PARAMS = {
    "spec": Param(None, type=["object", "null"], description="Fields of the job."),
    "file": Param(None, type=["string", "null"], description="Or a file that holds them."),
}


def job_of_conf(params: dict[str, Any]) -> JobSpec:
    return load_spec(params["file"]) if params["file"] else JobSpec.parse(params["spec"])


def job_of_day(params: dict[str, Any], logical_date: datetime) -> JobSpec:
    """The job of the conf; `{day}` in its input's path is the run's own."""
    fields = params["spec"]
    path = fields["input"]["path"].replace("{day}", f"{logical_date:%Y-%m-%d}")
    return JobSpec.parse({**fields, "input": {**fields["input"], "path": path}})


any_job = batch_inference(job_of_conf, dag_id="any_job", params=PARAMS, retries=0)

dated_job = batch_inference(job_of_day, dag_id="dated_job", params=PARAMS, retries=0)

retried_job = batch_inference(
    job_of_conf, dag_id="retried_job", params=PARAMS, retries=1, retry_delay=timedelta(seconds=1)
)

piloted_job = batch_inference(
    job_of_conf,
    dag_id="piloted_job",
    params=PARAMS,
    retries=1,
    retry_delay=timedelta(seconds=1),
    pilot=True,
    judge=True,
)

model_job = batch_inference(
    job_of_conf,
    dag_id="model_job",
    params=PARAMS,
    retries=0,
    judge=True,
    infer_arguments={
        "worker_python": os.environ.get("BATCHINFER_TEST_WORKER_PYTHON"),
        "worker_env": {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    },
)

with DAG("somebodys_own", params=PARAMS) as somebodys_own:

    @task.branch
    def before(params: dict[str, Any]) -> list[str]:
        return ["inference.split"] if params["spec"] else []

    @task
    def after(published: dict[str, Any]) -> int:
        return int(published["rows"])

    inference = batch_inference(job_of_conf, group_id="inference", retries=0)
    before() >> inference >> after(somebodys_own.get_task("inference.gate").output)

replay = replay_dead_letters("replay", retries=0)
