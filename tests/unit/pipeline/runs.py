"""Runs without an engine: inputs written, shards committed at once with made-up answers."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_batchinfer.outcome import Reason, outcome_of
from airflow_batchinfer.pipeline.merge import MergeResult, merge
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.run.commit import Commit, CommittedPart, Tokens
from airflow_batchinfer.run.epoch import new_epoch
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan, PlannedShard
from airflow_batchinfer.run.shard import PART_SCHEMA
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store

Answer = Callable[[dict[str, Any]], Any]
Dead = Callable[[int], Reason | None]


def job(folder: Path, **fields: Any) -> JobSpec:
    """A job over `folder/in`; `fields` replace whole sections."""
    spec: dict[str, Any] = {
        "name": "job",
        "store": str(folder / "store"),
        "input": {"path": str(folder / "in")},
        "prompt": {"template": "{{ text }}"},
        "model": {"name": "none", "backend": "tests.engines:InstantEngine"},
    }
    return JobSpec.parse(spec | fields)


def write_input(folder: Path, rows: pa.Table | Sequence[dict[str, Any]], name: str = "a.parquet") -> Path:
    """Write a Parquet input below `folder/in`."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows))
    path = folder / "in" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def answer_text(row: dict[str, Any]) -> str:
    """The answer of a row, which tells whose it is."""
    return f"answer to {row['input']}"


def nobody(_: int) -> Reason | None:
    """No row dies."""
    return None


def commit_shard(
    store: Store,
    plan: Plan,
    shard: PlannedShard,
    *,
    answer: Answer = answer_text,
    dead: Dead = nobody,
    parts: int = 2,
    overlap: int = 0,
) -> Commit:
    """Write one shard's parts and commit, as a worker would.

    Args:
        store: the run's.
        plan: the run's.
        shard: which.
        answer: a row's output, text or vector.
        dead: by row id, why a row did not succeed.
        parts: how many parts.
        overlap: rows of each part that stand in the next one too, with another answer there.
    """
    layout, epoch = RunLayout(plan.folder), new_epoch()
    rows = read(store, shard.rows_key).to_pylist()
    step = max(1, -(-len(rows) // parts))
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    committed, overlapping = [], 0
    for row in rows:
        reason = dead(row["row_id"])
        counts[outcome_of(reason).value] += 1 + row["copies"]
        if reason:
            reasons[reason.value] += 1 + row["copies"]
    for index, first in enumerate(range(0, len(rows), step)):
        again = min(overlap, first)
        overlapping += again
        lines = [_line(r, dead(r["row_id"]), "wrong: a duplicate") for r in rows[first - again : first]]
        lines += [_line(r, dead(r["row_id"]), answer(r)) for r in rows[first : first + step]]
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(lines, schema=PART_SCHEMA), sink)
        data, key = sink.getvalue(), layout.part(shard.shard, epoch, index)
        store.write_bytes(key, data)
        digest = hashlib.sha256(data).hexdigest()
        committed.append(CommittedPart(key=key, rows=len(lines), bytes=len(data), sha256=digest))
    commit = Commit(
        shard=shard.shard,
        epoch=epoch,
        fingerprint=plan.fingerprint,
        created_at="2026-01-01T00:00:00Z",
        rows_sha256=shard.rows_sha256,
        rows=shard.rows,
        sent=shard.sent,
        counts=dict(counts),
        reasons=dict(reasons),
        tokens=Tokens(prompt=5 * len(rows), output=2 * len(rows)),
        parts=committed,
        overlapping_rows=overlapping,
    )
    commit.write(store, layout.commit(shard.shard, epoch))
    return commit


def commit_run(store: Store, plan: Plan, **how: Any) -> None:
    """Commit all shards; `how` as for `commit_shard`."""
    for shard in plan.shards:
        commit_shard(store, plan, shard, **how)


def publish_run(store: Store, plan: Plan, **how: Any) -> MergeResult:
    """Commit, reconcile and merge."""
    commit_run(store, plan, **how)
    reconcile(store, plan.folder)
    return merge(store, plan.folder)


def read(store: Store, key: str) -> pa.Table:
    """A Parquet object."""
    filesystem, root = store.filesystem()
    return pq.read_table(f"{root}/{key}", filesystem=filesystem)


def table_rows(store: Store, key: str, **where: str) -> list[dict[str, Any]]:
    """Rows of a Delta table with the given column values, by row id."""
    from deltalake import DeltaTable

    table = DeltaTable(store.uri_of(key), storage_options=store.delta_options() or None)
    rows = pa.table(table.to_pyarrow_table()).to_pylist()
    chosen = [row for row in rows if all(row[name] == value for name, value in where.items())]
    return sorted(chosen, key=lambda row: (str(row["run_id"]), int(row["row_id"])))


def frozen_rows(store: Store, plan: Plan) -> list[dict[str, Any]]:
    """All rows of a plan's shards, each with its `shard`."""
    return [{**r, "shard": s.shard} for s in plan.shards for r in read(store, s.rows_key).to_pylist()]


def frozen_copies(store: Store, plan: Plan) -> list[dict[str, Any]]:
    """All copies of a plan's shards, each with its `shard`."""
    return [
        {**row, "shard": shard.shard}
        for shard in plan.shards
        if shard.copies_key
        for row in read(store, shard.copies_key).to_pylist()
    ]


def _line(row: dict[str, Any], reason: Reason | None, answer: Any) -> dict[str, Any]:
    return {
        "row_id": row["row_id"],
        "outcome": outcome_of(reason).value,
        "reason": reason.value if reason else None,
        "message": f"it is {reason}" if reason else None,
        "output": answer if isinstance(answer, str) else None,
        "vector": answer if isinstance(answer, list) else None,
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "output_tokens": 2,
        "cached_tokens": 0,
        "attempts": 1,
        "finished_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
