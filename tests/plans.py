"""Plans and rows files made directly, for tests of what comes after `split`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_batchinfer.run.epoch import new_epoch
from airflow_batchinfer.run.fingerprint import fingerprint
from airflow_batchinfer.run.layout import RunLayout, run_dir
from airflow_batchinfer.run.plan import InputFile, InputSnapshot, Plan, PlannedShard
from airflow_batchinfer.run.shard import rows_schema
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import open_store

UNUSUAL_SAMPLING: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "stop": ["x"],
}
"""Every field that decides a draw, none at its default."""


def job(store: Path | str, **overrides: Any) -> JobSpec:
    """A job over a column `text` with an instant engine; `overrides` replace whole fields."""
    fields: dict[str, Any] = {
        "name": "job",
        "input": {"path": "input.parquet"},
        "prompt": {"template": "Answer: {{ text }}"},
        "model": {"name": "none", "backend": "tests.engines:InstantEngine"},
        "store": str(store),
    }
    return JobSpec.parse(fields | overrides)


def plan_run(
    spec: JobSpec, shards: Sequence[Iterable[str | None]], *, copies: dict[int, int] | None = None
) -> Plan:
    """Freeze texts as a run's shards in `spec.store` and write the plan; row ids count through.

    Args:
        spec: the job; its prompt reads the column `text`.
        shards: the texts of each shard.
        copies: by row id, how many other input rows take this row's answer.
    """
    store = open_store(spec.store, spec.storage_options)
    folder = run_dir(spec.name, "run")
    layout, epoch = RunLayout(folder), new_epoch()
    schema = rows_schema(pa.struct([("text", pa.string())]), None)
    planned, first = [], 0
    for shard, texts in enumerate(shards):
        listed = list(texts)
        weights = [(copies or {}).get(first + i, 0) for i in range(len(listed))]
        table = pa.table(
            {
                "row_id": pa.array(range(first, first + len(listed)), pa.int64()),
                "custom_id": pa.nulls(len(listed), pa.string()),
                "copies": pa.array(weights, pa.int32()),
                "input": pa.array([{"text": t} for t in listed], schema.field("input").type),
            },
            schema=schema,
        )
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=8192)
        data = sink.getvalue().to_pybytes()
        key = layout.rows(shard, epoch)
        store.write_bytes(key, data)
        planned.append(
            PlannedShard(
                shard=shard,
                rows=len(listed) + sum(weights),
                sent=len(listed),
                predicted_tokens=len(listed) * 10,
                rows_key=key,
                rows_bytes=len(data),
                rows_sha256=hashlib.sha256(data).hexdigest(),
            )
        )
        first += len(listed)
    plan = Plan(
        job=spec.name,
        run_id="run",
        folder=folder,
        created_at="2026-01-01T00:00:00Z",
        epoch=epoch,
        fingerprint=fingerprint(spec),
        spec=spec,
        input=InputSnapshot(
            files=[InputFile(uri="input.parquet", size=0, version="0")],
            rows=sum(s.rows for s in planned),
            columns={"text": "string"},
        ),
        shards=planned,
    )
    plan.write(store, layout.plan)
    return plan
