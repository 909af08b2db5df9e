"""Engines by name: built in, by dotted path, and what a wrong name says."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.worker.engines import load_engine


def job(backend: str, **model: Any) -> JobSpec:
    return JobSpec.parse(
        {
            "name": "job",
            "input": {"path": "rows.jsonl"},
            "prompt": {"template": "{{ text }}"},
            "model": {"name": "model", "backend": backend, **model},
            "store": "store",
        }
    )


@pytest.mark.parametrize(
    ("backend", "model", "name"),
    [
        ("vllm", {}, "VllmEngine"),
        ("openai", {"base_url": "http://localhost/v1"}, "OpenAIEngine"),
        ("tests.engines:InstantEngine", {}, "InstantEngine"),
    ],
)
def test_an_engine_is_built_and_nothing_is_started(backend: str, model: dict[str, Any], name: str) -> None:
    assert type(load_engine(job(backend, **model))).__name__ == name


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("no.such.module:Engine", "cannot import `no.such.module`"),
        ("tests.engines:NoSuchEngine", "has no `NoSuchEngine`"),
        ("json:JSONDecoder", "is no engine: it lacks takes_tokens"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(backend: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_engine(job(backend))
