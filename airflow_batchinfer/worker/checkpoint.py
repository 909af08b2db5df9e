"""Parts and commits: written in a thread of their own, so that a slow store never holds up the engine."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_batchinfer import __version__
from airflow_batchinfer.errors import BatchInferError, StoreError
from airflow_batchinfer.run.commit import Commit, CommittedPart, Tokens
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.parquet import WRITE_OPTIONS
from airflow_batchinfer.run.shard import PART_SCHEMA
from airflow_batchinfer.store import Store
from airflow_batchinfer.worker.engines.base import EngineInfo
from airflow_batchinfer.worker.resume import RELEASE_METADATA, ROWS_METADATA, part_metadata
from airflow_batchinfer.worker.retrying import with_retries
from airflow_batchinfer.worker.work import Result, ShardRun

log = logging.getLogger(__name__)


class PartWriter:
    """Makes results durable, in the order they are handed over."""

    def __init__(self, store: Store, layout: RunLayout, fingerprint: str, held: Callable[[], float]) -> None:
        """Start the thread.

        Args:
            store: where.
            layout: the run's keys.
            fingerprint: the plan's.
            held: seconds this process has been held so far.
        """
        self._store = store
        self._layout = layout
        self._fingerprint = fingerprint
        self._held = held
        self._held_before = 0.0
        self._parts: dict[int, list[CommittedPart]] = {}
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.error: BatchInferError | None = None
        """Why nothing more will become durable; none while all is well."""
        self.backlog = 0
        """Results handed over and not durable yet."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="part-writer", daemon=True)
        self._thread.start()

    def flush(self, shard: ShardRun) -> None:
        """Hand over what the shard has in its buffer as its next part."""
        with self._lock:
            if not shard.buffer:
                return
            results, shard.buffer = shard.buffer, []
            index, shard.parts_begun = shard.parts_begun, shard.parts_begun + 1
            self.backlog += len(results)
        self._queue.put(lambda: self._write_part(shard, index, results))

    def commit(self, shard: ShardRun, engine: EngineInfo | None) -> None:
        """Hand over the commit of a shard whose rows all have been handed over."""
        self._queue.put(lambda: self._write_commit(shard, engine))

    def close(self) -> None:
        """Wait until all is durable, or has failed (see `error`)."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if self.error is not None:
                continue
            try:
                with_retries(job)
            except BatchInferError as error:
                self.error = error
            except Exception as error:  # a bug must end the worker, not its checkpoints alone
                log.exception("the part writer failed")
                self.error = StoreError(f"cannot write results: {type(error).__name__}: {error}")

    def _write_part(self, shard: ShardRun, index: int, results: Sequence[Result]) -> None:
        data = encode_part(results, part_metadata(self._fingerprint, shard.epoch, shard.planned))
        key = self._layout.part(shard.shard, shard.epoch, index)
        self._store.write_bytes(key, data)
        part = CommittedPart(
            key=key, rows=len(results), bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
        )
        self._parts.setdefault(shard.shard, []).append(part)
        with self._lock:
            self.backlog -= len(results)
        shard.durable += len(results)

    def _write_commit(self, shard: ShardRun, engine: EngineInfo | None) -> None:
        shard.check()
        resumed, paid, held = shard.resumed, shard.paid, self._held()
        own = self._parts.get(shard.shard, [])
        commit = Commit(
            shard=shard.shard,
            epoch=shard.epoch,
            fingerprint=self._fingerprint,
            created_at=datetime.now(UTC).isoformat(),
            rows_sha256=shard.planned.rows_sha256,
            rows=shard.planned.rows,
            sent=shard.planned.sent,
            counts=dict(shard.counts),
            reasons=dict(shard.reasons),
            tokens=Tokens(
                prompt=resumed.tokens.prompt + paid.prompt,
                output=resumed.tokens.output + paid.output,
                cached=resumed.tokens.cached + paid.cached,
            ),
            parts=[*resumed.parts, *own],
            overlapping_rows=resumed.overlapping_rows,
            attempts=len(resumed.epochs | {shard.epoch}),
            held_seconds=held - self._held_before,  # so that several shards' seconds add up
            engine={}
            if engine is None
            else {"name": engine.name, "version": engine.version, **engine.options},
        )
        commit.write(self._store, self._layout.commit(shard.shard, shard.epoch))
        self._parts.pop(shard.shard, None)  # only now: a write that fails is tried again
        self._held_before = held
        shard.committed = True
        log.info("shard %d committed: %s", shard.shard, dict(shard.counts))


def encode_part(results: Sequence[Result], metadata: dict[str, str]) -> bytes:
    """A part's bytes. Text that is no Unicode (half a surrogate pair) is mended."""
    columns = [
        _column(values, field.type)
        for values, field in zip(zip(*results, strict=True), PART_SCHEMA, strict=True)
    ]
    stated = metadata | {ROWS_METADATA: str(len(results)), RELEASE_METADATA: __version__}
    table = pa.Table.from_arrays(columns, schema=PART_SCHEMA.with_metadata(stated))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **WRITE_OPTIONS)
    return bytes(sink.getvalue())


def _column(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([_mended(value) for value in values], kind)


def _mended(value: object) -> object:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
