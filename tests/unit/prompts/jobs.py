"""Jobs on the small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow_batchinfer.spec import JobSpec

MODELS = Path(__file__).resolve().parents[3] / ".build" / "models"


def job(**fields: Any) -> JobSpec:
    """A job on the small model; `fields` replace parts of the spec."""
    spec: dict[str, Any] = {
        "name": "test",
        "input": {"path": "rows.jsonl"},
        "prompt": {"template": "Read this: {{ text }}\nIs it good?"},
        "model": {"name": str(MODELS / "smollm2")},
        "sampling": {"max_tokens": 28},
        "store": "store",
    }
    return JobSpec.parse(spec | fields)
