"""Runs made by hand: a plan, rows, parts, commits and a ledger, as the real steps write them."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_batchinfer.outcome import Outcome, Reason, outcome_of
from airflow_batchinfer.run.commit import Commit, CommittedPart, Tokens
from airflow_batchinfer.run.epoch import new_epoch
from airflow_batchinfer.run.fingerprint import fingerprint
from airflow_batchinfer.run.layout import RunLayout, run_dir
from airflow_batchinfer.run.ledger import Ledger, LedgerShard
from airflow_batchinfer.run.plan import InputFile, InputSnapshot, Plan, PlannedShard
from airflow_batchinfer.run.progress import Progress
from airflow_batchinfer.run.shard import PART_SCHEMA, copies_schema, rows_schema
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import LocalStore, Store

START = datetime(2026, 11, 29, 17, 0, tzinfo=UTC)
LABELS = ["billing", "bug", "praise"]

Answer = dict[str, Any]
"""Columns of a part by name; `reason` makes the row dead, the rest have defaults."""


def make_spec(store: str | Path, **changes: Any) -> JobSpec:
    data: dict[str, Any] = {
        "name": "tickets",
        "input": {"path": "tickets.parquet", "id_column": "id", "truth": "label", "carry": ["channel"]},
        "prompt": {"system": "You sort tickets.", "template": "Ticket: {{ text }}"},
        "model": {"name": "tiny"},
        "store": str(store),
        "task": {"type": "choice", "labels": LABELS},
        "failure": {"max_dead_fraction": 0.2},
    }
    return JobSpec.parse({**data, **changes})


def tickets(n: int) -> list[dict[str, Any]]:
    """Input rows; the true label goes round."""
    return [
        {
            "id": f"T{i}",
            "text": f"ticket {i} about {LABELS[i % 3]}",
            "label": LABELS[i % 3],
            "channel": "mail",
        }
        for i in range(n)
    ]


def truthful(row: dict[str, Any]) -> Answer:
    return {"output": row["label"]}


class MadeRun:
    """A run in a store, and the means to take it further."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self.store, self.plan, self.folder = store, plan, plan.folder
        self.layout = RunLayout(plan.folder)

    def lose_attempt(self, shard: int, tokens: Tokens) -> None:
        """Leave what a killed attempt leaves that had no part yet: its progress."""
        epoch = new_epoch()
        Progress(
            shard=shard,
            epoch=epoch,
            state="running",
            updated_at=START.isoformat(),
            sent=self.plan.shards[shard].sent,
            done=1,
            durable=0,
            counts={},
            tokens=tokens,
            held_seconds=20.0,
        ).write(self.store, self.layout.progress(shard, epoch))

    def reconcile(self) -> Ledger:
        """The ledger that `reconcile` would write for complete shards."""
        lines = []
        for planned in self.plan.shards:
            commits = [
                Commit.read(self.store, i.key)
                for i in self.store.list(self.layout.shard(planned.shard))
                if i.key.endswith("commit.json")
            ]
            commit = commits[0] if commits else None
            lines.append(
                LedgerShard(
                    shard=planned.shard,
                    rows=planned.rows,
                    sent=planned.sent,
                    epoch=commit.epoch if commit else None,
                    commit_sha256=commit.digest() if commit else None,
                    counts=commit.counts if commit else {"unprocessed": planned.rows},
                    reasons=commit.reasons if commit else {},
                    tokens=commit.tokens if commit else Tokens(),
                )
            )
        complete = all(line.epoch for line in lines)
        ledger = Ledger(
            job=self.plan.job,
            run_id=self.plan.run_id,
            generation=1,
            fingerprint=self.plan.fingerprint,
            plan_sha256=self.plan.digest(),
            created_at=(START + timedelta(seconds=70)).isoformat(),
            complete=complete,
            rows=self.plan.rows,
            counts=dict(sum((Counter(line.counts) for line in lines), Counter())),
            reasons=dict(sum((Counter(line.reasons) for line in lines), Counter())),
            tokens=Tokens(
                prompt=sum(line.tokens.prompt for line in lines),
                output=sum(line.tokens.output for line in lines),
            ),
            problems=[]
            if complete
            else [f"shard {line.shard:04d} has no commit" for line in lines if not line.epoch],
            shards=lines,
        )
        ledger.write(self.store, self.layout.ledger)
        return ledger


def make_run(
    root: Path,
    rows: Sequence[dict[str, Any]],
    answer: Callable[[dict[str, Any]], Answer] = truthful,
    *,
    spec: JobSpec | None = None,
    shards: int = 3,
    run_id: str = "manual-1",
    copies_of: dict[int, int] | None = None,
    uncommitted: Sequence[int] = (),
    parts: int = 2,
    warnings: Sequence[str] = (),
    pilot: bool = False,
) -> MadeRun:
    """Plan, rows, parts and commits for `rows`, cut into `shards` of about equal size.

    `copies_of` maps a row's index to the index of the row (in the same shard) whose answer it takes.
    """
    store = LocalStore(root)
    spec = spec or make_spec(root)
    folder = run_dir(spec.name, run_id)
    layout = RunLayout(folder)
    copies = copies_of or {}
    prompt_columns = [c for c in ("text",) if c in rows[0]] or list(rows[0])
    carried = [c for c in spec.carried if c not in prompt_columns]
    sample = pa.Table.from_pylist(list(rows)).schema
    input_type = pa.struct([sample.field(c) for c in prompt_columns])
    carry_type = pa.struct([sample.field(c) for c in carried]) if carried else None
    size = -(-len(rows) // shards)
    planned = []
    for shard in range(shards):
        epoch = new_epoch()
        members = list(range(shard * size, min(len(rows), (shard + 1) * size)))
        sent = [i for i in members if i not in copies]
        key = layout.rows(shard, epoch)
        blob = _parquet(
            [
                {
                    "row_id": i,
                    "custom_id": rows[i].get("id"),
                    "copies": sum(1 for c in members if copies.get(c) == i),
                    "input": {c: rows[i][c] for c in prompt_columns},
                    "carry": {c: rows[i][c] for c in carried},
                }
                for i in sent
            ],
            rows_schema(input_type, carry_type),
        )
        store.write_bytes(key, blob)
        copies_key = None
        if len(sent) < len(members):
            copies_key = layout.copies(shard, epoch)
            store.write_bytes(
                copies_key,
                _parquet(
                    [
                        {
                            "row_id": i,
                            "copy_of": copies[i],
                            "custom_id": rows[i].get("id"),
                            "carry": {c: rows[i][c] for c in carried},
                        }
                        for i in members
                        if i in copies
                    ],
                    copies_schema(carry_type),
                ),
            )
        planned.append(
            PlannedShard(
                shard=shard,
                rows=len(members),
                sent=len(sent),
                predicted_tokens=40 * len(sent),
                rows_key=key,
                rows_bytes=len(blob),
                rows_sha256=hashlib.sha256(blob).hexdigest(),
                copies_key=copies_key,
                pilot=pilot and shard == 0,
            )
        )
        _attempt(
            store,
            layout,
            planned[-1],
            [(i, answer(rows[i])) for i in sent],
            Counter(copies.values()),
            spec,
            parts,
            commit=shard not in uncommitted,
        )
    plan = Plan(
        job=spec.name,
        run_id=run_id,
        folder=folder,
        created_at=START.isoformat(),
        epoch=new_epoch(),
        fingerprint=fingerprint(spec),
        spec=spec,
        input=InputSnapshot(
            files=[InputFile(uri="tickets.parquet", size=1, version="1")], rows=len(rows), columns={}
        ),
        shards=planned,
        warnings=list(warnings),
    )
    plan.write(store, layout.plan)
    return MadeRun(store, plan)


def _attempt(
    store: Store,
    layout: RunLayout,
    planned: PlannedShard,
    answers: list[tuple[int, Answer]],
    copies: Counter[int],
    spec: JobSpec,
    parts: int,
    commit: bool,
) -> None:
    """One attempt's parts and commit; without a commit it was reclaimed after its first part."""
    epoch = new_epoch()
    records = [_record(row_id, a) for row_id, a in answers]
    size = max(1, -(-len(records) // parts))
    chunks = [records[i : i + size] for i in range(0, len(records), size)]
    if not commit:
        chunks = chunks[:1]
    written = []
    metadata = {
        "batchinfer.fingerprint": fingerprint(spec),
        "batchinfer.epoch": epoch,
        "batchinfer.shard": str(planned.shard),
    }
    for index, chunk in enumerate(chunks):
        key = layout.part(planned.shard, epoch, index)
        blob = _parquet(chunk, PART_SCHEMA.with_metadata(metadata))
        store.write_bytes(key, blob)
        written.append(
            CommittedPart(key=key, rows=len(chunk), bytes=len(blob), sha256=hashlib.sha256(blob).hexdigest())
        )
    done = [r for chunk in chunks for r in chunk]
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for record in done:
        weight = 1 + copies.get(record["row_id"], 0)
        counts[record["outcome"]] += weight
        if record["reason"]:
            reasons[record["reason"]] += weight
    tokens = Tokens(
        prompt=sum(r["prompt_tokens"] for r in done),
        output=sum(r["output_tokens"] for r in done),
        cached=sum(r["cached_tokens"] for r in done),
    )
    ended = START + timedelta(seconds=60 + planned.shard)
    Progress(
        shard=planned.shard,
        epoch=epoch,
        state="committed" if commit else "reclaimed",
        updated_at=ended.isoformat(),
        sent=planned.sent,
        done=len(done),
        durable=len(done),
        counts=dict(counts),
        tokens=tokens,
        held_seconds=40.0,
    ).write(store, layout.progress(planned.shard, epoch))
    if commit:
        Commit(
            shard=planned.shard,
            epoch=epoch,
            fingerprint=fingerprint(spec),
            created_at=ended.isoformat(),
            rows_sha256=planned.rows_sha256,
            rows=planned.rows,
            sent=planned.sent,
            counts=dict(counts),
            reasons=dict(reasons),
            tokens=tokens,
            parts=written,
            held_seconds=40.0,
            engine={"name": "instant", "version": "1"},
        ).write(store, layout.commit(planned.shard, epoch))


def _record(row_id: int, answer: Answer) -> dict[str, Any]:
    reason = answer.get("reason")
    outcome = outcome_of(Reason(reason) if reason else None)
    sent = outcome is not Outcome.REJECTED
    return {
        "row_id": row_id,
        "outcome": outcome.value,
        "reason": reason,
        "message": answer.get("message", f"row {row_id}: {reason}" if reason else None),
        "output": answer.get("output"),
        "vector": answer.get("vector"),
        "finish_reason": answer.get("finish_reason", "stop" if not reason else None),
        "prompt_tokens": answer.get("prompt_tokens", 30 if sent else 0),
        "output_tokens": answer.get("output_tokens", 3 if sent else 0),
        "cached_tokens": answer.get("cached_tokens", 10 if sent else 0),
        "attempts": answer.get("attempts", 1 if sent else 0),
        "finished_at": START + timedelta(seconds=answer.get("at", 50)),
    }


def _parquet(records: list[dict[str, Any]], schema: pa.Schema) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records, schema=schema), sink)
    return sink.getvalue()
