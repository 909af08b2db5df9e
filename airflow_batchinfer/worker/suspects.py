"""Suspects on disk: the rows that may be in the engine, written before they are.

When the kernel kills a whole worker for want of memory, nothing is left to say which row did it. So a
row enters the engine only after a small object names it. The write is ahead of need and in a thread of
its own, so the engine does not wait for it; it names a few rows more than are in the engine.

One such object is no proof: a spot node that vanishes leaves one as well. A row counts one *death* for
each attempt that ended without a word while it was named. See `docs/worker.md` for the rules.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from pydantic import Field

from airflow_batchinfer.errors import StoreError, UnreadableError
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.progress import Progress, silent_after
from airflow_batchinfer.store import Store
from airflow_batchinfer.worker.processes import is_gone
from airflow_batchinfer.worker.retrying import with_retries
from airflow_batchinfer.worker.work import DEATHS_ALONE

log = logging.getLogger(__name__)


class Suspects(Document):
    """What one attempt may have in the engine. An end that is not the engine's removes it."""

    shard: int
    epoch: str
    worker: str = Field(description="Identity of the worker's process.")
    apart: bool = Field(description="These rows run apart from all others, to find one that kills.")
    rows: list[int]


@dataclass(frozen=True, slots=True)
class EarlierDeaths:
    """What earlier attempts at a shard left: deaths by row, and rows that have killed while alone."""

    deaths: Counter[int] = field(default_factory=Counter)
    culprits: dict[int, str] = field(default_factory=dict)
    """Rows that stand convicted, with the evidence."""


def earlier_deaths(
    store: Store, layout: RunLayout, shard: int, epoch: str, poisoned: Iterable[int], interval: float
) -> EarlierDeaths:
    """Read the suspects of all attempts but `epoch`.

    Args:
        store: where.
        layout: the run's keys.
        shard: the shard.
        epoch: the attempt that asks.
        poisoned: rows already known to kill: what died with one of them in it is explained.
        interval: seconds between the progress of a live worker.
    """
    known = set(poisoned)
    left = [
        suspects
        for info in store.list(layout.shard(shard))
        if info.key.endswith("/suspects.json") and (suspects := _read(store, info.key)) is not None
        if suspects.epoch != epoch and not known.intersection(suspects.rows)
    ]
    found = EarlierDeaths()
    for suspects in left:
        found.deaths.update(suspects.rows)
    alone: dict[int, list[str]] = defaultdict(list)
    for suspects in left:
        if suspects.apart and len(suspects.rows) == 1 and _has_died(store, layout, suspects, interval):
            alone[suspects.rows[0]].append(suspects.epoch)
    for row, epochs in alone.items():
        if len(epochs) >= DEATHS_ALONE:
            found.culprits[row] = (
                f"the worker died {found.deaths[row]} times while this row was in the engine, "
                f"{len(epochs)} of them with no other row beside it (attempts {', '.join(sorted(epochs))})"
            )
    return found


def _read(store: Store, key: str) -> Suspects | None:
    try:
        return Suspects.read(store, key)
    except (UnreadableError, FileNotFoundError):  # of a dying disk or another release, or just removed
        return None


def _has_died(store: Store, layout: RunLayout, suspects: Suspects, interval: float) -> bool:
    """Whether an attempt is over: its process is gone, or it has been silent for long."""
    gone = is_gone(suspects.worker)
    if gone is not None:
        return gone
    key = layout.progress(suspects.shard, suspects.epoch)
    try:
        return Progress.read(store, key).is_silent(interval)
    except FileNotFoundError:  # the first may be yet to come
        key = layout.suspects(suspects.shard, suspects.epoch)
    except UnreadableError:  # whoever writes it may be alive all the same
        pass
    info = store.info(key)
    return info is None or time.time() - info.modified > silent_after(interval)


class Announcer:
    """Writes suspects in a thread of its own. Only the newest announcement matters."""

    def __init__(self, store: Store, key_of: Callable[[int], tuple[str, str]], worker: str) -> None:
        """Start the thread.

        Args:
            store: where.
            key_of: by shard, its attempt's epoch and the key of its suspects.
            worker: identity of this worker.
        """
        self._store = store
        self._key_of = key_of
        self._worker = worker
        self.error: StoreError | None = None
        """Why nothing more will be announced, so nothing more may enter the engine; none if all is well."""
        self.durable = 0
        """Number of the newest announcement that is on disk."""
        self._number = 0
        self._named: set[int] = set()
        self._queue: queue.SimpleQueue[tuple[int, bool, Mapping[int, list[int]]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="announcer", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether all announcements are on disk."""
        return self.durable == self._number

    def announce(self, rows: Mapping[int, list[int]], *, apart: bool) -> int:
        """Begin to write the rows, by shard, that may be in the engine; returns the number of this write."""
        self._number += 1
        self._queue.put((self._number, apart, rows))
        return self._number

    def close(self, *, forget: bool) -> None:
        """End the thread; `forget` removes what was written, if the end says nothing against those rows."""
        self._queue.put(None)
        self._thread.join()
        for shard in self._named if forget else ():
            try:
                self._store.delete(self._key_of(shard)[1])
            except StoreError as error:  # it stays as after a kill: one such says little
                log.warning("%s", error)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            number, apart, rows = item
            try:
                with_retries(partial(self._write, apart, rows))
            except StoreError as error:
                self.error = error
                return
            except Exception as error:  # a bug must end the worker, not leave it waiting
                log.exception("the announcer failed")
                self.error = StoreError(f"cannot announce rows: {type(error).__name__}: {error}")
                return
            self.durable = number

    def _write(self, apart: bool, rows: Mapping[int, list[int]]) -> None:
        for shard, row_ids in rows.items():
            epoch, key = self._key_of(shard)
            suspects = Suspects(shard=shard, epoch=epoch, worker=self._worker, apart=apart, rows=row_ids)
            self._named.add(shard)  # a write that fails may have gone through
            suspects.write(self._store, key)
        for shard in self._named - rows.keys():
            self._store.delete(self._key_of(shard)[1])
            self._named.discard(shard)
