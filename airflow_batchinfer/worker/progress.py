"""`progress.json` of each shard that this worker has begun: how far, how fast, how long still."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Literal

from airflow_batchinfer.errors import StoreError
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.progress import Progress
from airflow_batchinfer.store import Store
from airflow_batchinfer.worker.work import ShardRun

log = logging.getLogger(__name__)

State = Literal["loading", "running", "draining", "committed", "reclaimed", "stopped", "failed"]

_WINDOW_SECONDS = 60.0


class ProgressWriter:
    """Writes progress; rates are over the last minute. Any thread may call, and waits for others."""

    def __init__(
        self, store: Store, layout: RunLayout, shards: Sequence[ShardRun], held: Callable[[], float]
    ) -> None:
        """Set up.

        Args:
            store: where.
            layout: the run's keys.
            shards: all shard runs of the worker.
            held: seconds the process has been held so far.
        """
        self._store = store
        self._layout = layout
        self._shards = shards
        self._held = held
        self._samples: deque[tuple[float, int, int]] = deque()
        self._settled: set[int] = set()
        self._lock = threading.Lock()

    def write(self, state: State, *, in_flight: int, restarts: int, message: str = "") -> None:
        """Write the progress of each begun shard that has no commit yet, and once of one that has."""
        with self._lock:
            self._write(state, in_flight, restarts, message)

    def _write(self, state: State, in_flight: int, restarts: int, message: str) -> None:
        rows_rate, tokens_rate = self._rates(state)
        left = sum(s.planned.sent - s.done for s in self._shards)
        for shard in self._shards:
            if not shard.started or shard.shard in self._settled:
                continue
            progress = Progress(
                shard=shard.shard,
                epoch=shard.epoch,
                state="committed" if shard.committed else state,
                message="" if shard.committed else message,
                updated_at=datetime.now(UTC).isoformat(),
                sent=shard.planned.sent,
                done=shard.done,
                durable=shard.durable,
                resumed=len(shard.resumed.done),
                counts=dict(shard.counts),
                tokens=shard.paid,
                rows_per_second=rows_rate,
                tokens_per_second=tokens_rate,
                in_flight=in_flight,
                engine_restarts=restarts,
                held_seconds=self._held(),
                seconds_left=left / rows_rate if rows_rate and tokens_rate else None,
            )
            try:
                progress.write(self._store, self._layout.progress(shard.shard, shard.epoch))
            except StoreError as error:  # progress is for eyes only; parts and commits say what is true
                log.warning("%s", error)
                return
            if shard.committed:
                self._settled.add(shard.shard)

    def _rates(self, state: State) -> tuple[float, float]:
        """Rows and tokens a second over the last minute; rows that were resumed do not count.

        The engine's start is in no rate: it would make the time left look endless.
        """
        now = time.monotonic()
        if state == "loading":
            self._samples.clear()
        rows = sum(s.done - len(s.resumed.done) for s in self._shards)
        tokens = sum(s.prompt_tokens + s.output_tokens for s in self._shards)
        self._samples.append((now, rows, tokens))
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_SECONDS:
            self._samples.popleft()
        then, rows_then, tokens_then = self._samples[0]
        seconds = now - then
        return ((rows - rows_then) / seconds, (tokens - tokens_then) / seconds) if seconds else (0.0, 0.0)
