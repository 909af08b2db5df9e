"""Kill and clear once more, with the real model: its own token counts show what was paid."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from airflow_batchinfer.run.progress import Progress
from tests.integration.engine_jobs import MODELS
from tests.integration.runs import StoredRun, job_fields, wait_for_parts, write_input

pytestmark = pytest.mark.airflow_env

ROWS = 40
TOKENS_PER_ROW = ["prompt_tokens", "output_tokens"]


def parts_by_attempt(run: StoredRun, shard: int = 0) -> dict[str, dict[int, int]]:
    """By epoch, the tokens of each row in that attempt's parts."""
    found: dict[str, dict[int, int]] = {}
    for part in sorted((run.folder / "shards" / f"{shard:05d}").glob("*/part-*.parquet")):
        rows = pq.read_table(part, columns=["row_id", *TOKENS_PER_ROW]).to_pylist()
        found.setdefault(part.parent.name, {}).update(
            {row["row_id"]: sum(row[c] for c in TOKENS_PER_ROW) for row in rows}
        )
    return found


def paid_by(run: StoredRun, epoch: str, shard: int = 0) -> int:
    """Tokens that one attempt paid, by the engine's count."""
    progress = Progress.read(run.store, run.layout.progress(shard, epoch))
    return progress.tokens.total


def test_the_real_model_resumes_from_its_parts(airflow, airflow_store: Path, tmp_path: Path):
    source = write_input(tmp_path / "rows.jsonl", [f"Name {i} animals of the forest." for i in range(ROWS)])
    fields = job_fields(
        airflow_store,
        "smollm2",
        source,
        prompt={"template": "{{ text }}"},
        model={
            "name": str(MODELS / "smollm2"),
            "backend": "vllm",
            "engine": {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 2},
        },
        sampling={"max_tokens": 24},
        sharding={"max_rows": ROWS},
        checkpoint={"rows": 4},
    )
    run_id = airflow.trigger("model_job", {"spec": fields})
    run = StoredRun(airflow_store, "smollm2", run_id)
    os.kill(wait_for_parts(run, 0, timeout=400), signal.SIGKILL)
    assert airflow.wait("model_job", run_id) == "failed"
    (first,) = parts_by_attempt(run)
    durable = parts_by_attempt(run)[first]
    assert 0 < len(durable) < ROWS

    assert "infer[0]" in airflow.clear("model_job", run_id)
    assert airflow.wait("model_job", run_id) == "success"
    attempts = parts_by_attempt(run)
    (second,) = attempts.keys() - {first}
    assert set(run.rows_in_parts(0).values()) == {1}
    assert attempts[second].keys() == set(range(ROWS)) - durable.keys()
    assert paid_by(run, second) == sum(attempts[second].values()), "only the missing rows were paid for"
    tokens = run.commit_of(0)["tokens"]
    assert tokens["prompt"] + tokens["output"] == sum(durable.values()) + sum(attempts[second].values())
    results = run.results()
    assert [row["row_id"] for row in results] == list(range(ROWS))
    assert all(row["output"].strip() for row in results)
