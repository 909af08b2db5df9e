"""DAGs of the Kubernetes tests: as `pipelines.py`, each shard in a pod of the test cluster."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from airflow.sdk import Param

from airflow_batchinfer.dag import batch_inference
from airflow_batchinfer.spec import JobSpec

NO_SPEC = {"spec": Param({}, type="object")}


def job_of_conf(params: dict[str, Any]) -> JobSpec:
    return JobSpec.parse(params["spec"])


def pods(dag_id: str, *, at_once: int = 4, store_conn_id: str | None = None, **arguments: Any) -> None:
    """A DAG `dag_id` whose infer tasks ask the cluster often, as tests have no patience."""
    batch_inference(
        job_of_conf,
        dag_id=dag_id,
        params=NO_SPEC,
        runtime="kubernetes",
        store_conn_id=store_conn_id,
        max_parallel_shards=at_once,
        retries=2,
        retry_delay=timedelta(seconds=1),
        infer_arguments={
            "config_file": os.environ.get("BATCHINFER_TEST_KUBECONFIG"),
            "namespace": "default",
            "image": "worker:test",
            "worker_python": sys.executable,
            "gpus": 0,
            "poll_interval": 1,
            "startup_check_interval_seconds": 1,
            **arguments,
        },
    )


pods("watched_pod_job", deferrable=False)
pods("deferred_pod_job")
pods("s3_pod_job", store_conn_id="test_store", store_secret="store")
pods(
    "model_pod_job",
    at_once=2,  # engines on a small machine
    store_conn_id="test_store",
    store_secret="store",
    worker_python=os.environ.get("BATCHINFER_TEST_WORKER_PYTHON", sys.executable),
    env_vars={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
)
