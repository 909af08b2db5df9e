"""What Airflow asks of a provider (entry point `apache_airflow_provider`)."""

from __future__ import annotations

from typing import Any

import airflow_batchinfer


def get_provider_info() -> dict[str, Any]:
    """Provider metadata, see Airflow's `provider_info.schema.json`."""
    return {
        "package-name": "airflow-provider-batchinfer",
        "name": "Batch inference",
        "description": airflow_batchinfer.__doc__,
        "versions": [airflow_batchinfer.__version__],
    }
