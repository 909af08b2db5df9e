"""Answered rows: a stream whose batches are of bounded size, whatever was copied how often."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_batchinfer.pipeline import answered
from airflow_batchinfer.pipeline.answered import answered_rows
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.store import Store
from tests.unit.pipeline.runs import commit_shard, job, write_input

pytestmark = pytest.mark.airflow_env


def test_copies_of_a_long_prompt_come_in_short_stretches(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answered, "STRETCH_BYTES", 50_000)
    texts = [f"{i % 10}" if i % 3 else "x" * 10_000 for i in range(120)]
    write_input(tmp_path, [{"text": text, "number": 7} for text in texts])
    plan = split(store, job(tmp_path, prompt={"template": "{{ text }} {{ number }}"}), "run")
    (shard,) = plan.shards
    batches = list(answered_rows(store, shard, commit_shard(store, plan, shard), ["text"]))
    sent, *copies = batches
    assert sent.copy_of.null_count == len(sent.copy_of) == 11
    assert len(copies) > 5
    assert all(batch.input.nbytes < 65_000 for batch in copies)
    found = {i: t for b in batches for i, t in zip(b.row_ids, b.carried["text"], strict=True)}
    assert {i.as_py(): t.as_py() for i, t in found.items()} == dict(enumerate(texts))
