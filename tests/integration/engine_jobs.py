"""Jobs and requests for tests of real engines on the small models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airflow_batchinfer.prompts.builder import Prepared, PromptBuilder
from airflow_batchinfer.prompts.tokens import load_tokenizer
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.worker.engines.base import Completion, Engine, Request, RequestFailure

MODELS = Path(__file__).resolve().parents[2] / ".build" / "models"
PATIENCE_SECONDS = 120.0

ENGINE = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 16}


def job(model: dict[str, Any] | None = None, **fields: Any) -> JobSpec:
    """A job on SmolLM2 in vLLM; `fields` replace parts of the spec."""
    spec: dict[str, Any] = {
        "name": "test",
        "input": {"path": "rows.jsonl"},
        "prompt": {"template": "{{ text }}"},
        "model": model or {"name": str(MODELS / "smollm2"), "engine": ENGINE},
        "sampling": {"max_tokens": 24},
        "store": "store",
    }
    return JobSpec.parse(spec | fields)


def requests(spec: JobSpec, texts: Sequence[str], *, takes_tokens: bool = True) -> list[Request]:
    """One request a text, keyed by its position, as the worker would make them."""
    tokenizer = load_tokenizer(spec) if takes_tokens else None
    builder = PromptBuilder(spec, tokenizer, 100_000 if takes_tokens else None, takes_tokens=takes_tokens)
    made = []
    for i, prepared in enumerate(builder.build([{"text": text} for text in texts])):
        assert isinstance(prepared, Prepared)
        (prompt,) = prepared.prompts
        made.append(
            Request(str(i), 0, token_ids=prompt.token_ids, messages=prompt.messages, text=prompt.text)
        )
    return made


def collect(engine: Engine, count: int) -> dict[str, Completion | RequestFailure]:
    """Poll until `count` answers are there."""
    answers: dict[str, Completion | RequestFailure] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(answers) < count:
        assert time.monotonic() < deadline, f"{len(answers)} of {count} answers"
        for answer in engine.poll(1.0):
            assert answer.key not in answers, "each request comes back once"
            answers[answer.key] = answer
    return answers


def completed(answers: dict[str, Completion | RequestFailure]) -> dict[str, Completion]:
    """The answers, all of which must be results."""
    results = {}
    for key, answer in answers.items():
        assert isinstance(answer, Completion), answer
        assert answer.finish_reason in ("stop", "length")
        results[key] = answer
    return results
