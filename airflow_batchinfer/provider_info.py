"""What Airflow asks of a provider (entry point `apache_airflow_provider`)."""

from __future__ import annotations

from typing import Any

import airflow_batchinfer

_OPERATORS = (
    "split",
    "pilot",
    "infer_local",
    "infer_kubernetes",
    "reconcile",
    "judge",
    "validate",
    "merge",
    "report",
    "gate",
    "stop",
    "replay",
    "housekeeping",
)


def get_provider_info() -> dict[str, Any]:
    """Provider metadata, see Airflow's `provider_info.schema.json`."""
    return {
        "package-name": "airflow-provider-batchinfer",
        "name": "Batch inference",
        "description": airflow_batchinfer.__doc__,
        "versions": [airflow_batchinfer.__version__],
        "integrations": [{"integration-name": "Batch inference", "tags": ["service"]}],
        "operators": [
            {
                "integration-name": "Batch inference",
                "python-modules": [f"airflow_batchinfer.operators.{name}" for name in _OPERATORS],
            }
        ],
        "extra-links": [
            f"airflow_batchinfer.operators.links.{name}" for name in ("DataDocsLink", "ReportLink")
        ],
        "triggers": [
            {
                "integration-name": "Batch inference",
                "python-modules": ["airflow_batchinfer.operators.pod_trigger"],
            }
        ],
        "config": {
            "batchinfer": {
                "description": "Settings of the batch inference provider.",
                "options": {
                    "worker_python": {
                        "description": (
                            "Python of the workers' environment (the one with vLLM), for workers that run "
                            "as local processes. Empty: the Python that runs Airflow's task."
                        ),
                        "version_added": airflow_batchinfer.__version__,
                        "type": "string",
                        "example": "/opt/batchinfer/worker/bin/python",
                        "default": "",
                    },
                    "store_url": {
                        "description": (
                            "Address under which a browser can open the store's files, if you serve them: "
                            "the links to reports and data docs then start with it."
                        ),
                        "version_added": airflow_batchinfer.__version__,
                        "type": "string",
                        "example": "https://files.example.com/batchinfer",
                        "default": "",
                    },
                    "store": {
                        "description": (
                            "Folder of runs and tables (a local path or s3://bucket/prefix) for job specs "
                            "that name none; a relative `store` in a spec file starts here."
                        ),
                        "version_added": airflow_batchinfer.__version__,
                        "type": "string",
                        "example": "s3://my-bucket/batchinfer",
                        "default": "",
                    },
                },
            }
        },
    }
