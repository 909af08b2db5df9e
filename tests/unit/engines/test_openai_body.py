"""What every request to a server carries follows from fields that the fingerprint covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.run.fingerprint import fingerprint_fields
from airflow_batchinfer.worker.engines.openai import _request_body
from tests.plans import UNUSUAL_SAMPLING, job

FOLLOWS_FROM = {
    "model": "model.name",
    "response_format": "task.schema",
    "structured_outputs": "task.type",
    "use_activation": "task.normalize",
    "own": "model.engine.own",
    **{name: f"sampling.{name}" for name in UNUSUAL_SAMPLING},
}
NEUTRAL = {"encoding_format"}
"""How numbers are written."""


@pytest.mark.parametrize(
    "task",
    [
        {"type": "generate"},
        {"type": "choice", "labels": ["a", "b"]},
        {"type": "json", "schema": {}},
        {"type": "regex", "pattern": "a+"},
        {"type": "embed", "normalize": False},
    ],
    ids=lambda task: str(task["type"]),
)
def test_a_field_of_the_body_is_in_the_fingerprint(task: dict[str, Any], tmp_path: Path) -> None:
    model = {
        "name": "m",
        "backend": "openai",
        "base_url": "http://localhost/v1",
        "engine": {"own": 1, "max_model_len": 9},
    }
    spec = job(tmp_path, model=model, task=task, sampling=UNUSUAL_SAMPLING)
    fields = fingerprint_fields(spec)
    assert not {name for name in _request_body(spec) if FOLLOWS_FROM.get(name) not in fields} - NEUTRAL
