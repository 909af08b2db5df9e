"""Who enters the engine next: rows that are ready, retries that are due, never more than the window."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator

from airflow_batchinfer.worker.work import Piece, Row


class Admission:
    """The queue before the engine and the list of what is in it. There is no barrier anywhere in it."""

    def __init__(self) -> None:
        self.in_flight: dict[str, Piece] = {}
        """By key, the oldest first."""
        self._ready: deque[Piece] = deque()
        self._held: deque[Piece] | None = None
        """What waits while other rows run apart; none if none do."""
        self._retries: list[tuple[float, int, Piece]] = []
        self._number = itertools.count()
        self._queued: deque[Piece] = deque()
        """Submitted, and not known to have left the engine's own queue; some may have been dropped."""

    @property
    def waiting(self) -> int:
        """Requests that wait, retries that are not yet due included."""
        return len(self._ready) + len(self._retries) + len(self._held or ())

    @property
    def ready(self) -> deque[Piece]:
        """Requests that wait, in the order in which they go."""
        return self._ready

    def add(self, rows: Iterable[Row]) -> None:
        """Queue rows behind all others."""
        for row in rows:
            self._ready.extend(row.begin())

    def set_apart(self, rows: Iterable[Row]) -> None:
        """Let only these rows enter from now on, until `release`. Nothing is in flight."""
        if self._held is None:
            self._held = deque(piece for _, _, piece in sorted(self._retries))
            self._held.extend(self._ready)
        self._retries.clear()
        self._ready = deque(piece for row in rows for piece in unanswered(row))
        for piece in self._held:
            piece.row.announced = 0

    def release(self, rows: Iterable[Row] = ()) -> None:
        """Let all enter again, these rows first; a request that waits already keeps its place."""
        waiting = {*self._ready, *(piece for _, _, piece in self._retries)}
        freed = deque(piece for row in rows for piece in unanswered(row) if piece not in waiting)
        freed.extend(self._ready)
        freed.extend(self._held or ())
        self._ready, self._held = freed, None
        for piece in freed:
            piece.row.announced = 0

    def retry(self, piece: Piece, delay: float) -> None:
        """Queue a request again, to go after `delay` seconds and before what has not been tried."""
        heapq.heappush(self._retries, (time.monotonic() + delay, next(self._number), piece))

    def take(self, room: int, announced: int) -> list[Piece]:
        """Up to `room` requests to submit now; they count as in flight from here on.

        Args:
            room: how many.
            announced: number of the newest announcement on disk; rows it does not cover wait.
        """
        taken: list[Piece] = []
        now = time.monotonic()
        while self._retries and len(taken) < room and self._retries[0][0] <= now:
            taken.append(heapq.heappop(self._retries)[2])
        ready = self._ready
        while ready and len(taken) < room and 0 < ready[0].row.announced <= announced:
            taken.append(ready.popleft())
        for piece in taken:
            piece.tries += 1
            piece.key = f"{piece.row.row_id}/{piece.index}/{piece.tries}"
            piece.number, piece.running_since = next(self._number), None
            self.in_flight[piece.key] = piece
        self._queued.extend(taken)
        return taken

    def put_back(self, pieces: list[Piece]) -> None:
        """Let requests wait again, before all others, that were taken and have not reached the engine."""
        for piece in pieces:
            del self.in_flight[piece.key]
            piece.tries -= 1
        taken = set(map(id, pieces))
        self._queued = deque(piece for piece in self._queued if id(piece) not in taken)
        self._ready.extendleft(reversed(pieces))

    def answered(self, key: str, now: float) -> Piece | None:
        """Take the request that came back from what is in flight; none if nobody waits for it.

        An engine's queue is first in, first out: whatever was submitted before has left it too.
        """
        piece = self.in_flight.pop(key, None)
        if piece is not None:
            while self._queued and self._queued[0].number <= piece.number:
                self._runs(self._queued.popleft(), now)
        return piece

    def overdue(self, limit: float, now: float) -> Piece | None:
        """The request that has been running for longest, if that is more than `limit` seconds.

        Time in the engine's queue does not count. It may be most of the time in flight: the window holds
        twice the engine's batch. The oldest request runs, if anything does.
        """
        oldest = next(iter(self.in_flight.values()), None)
        return oldest if oldest is not None and now - self._runs(oldest, now) > limit else None

    @staticmethod
    def _runs(piece: Piece, now: float) -> float:
        """Note that a request is running, if that is news; since when."""
        if piece.running_since is None:
            piece.running_since = now
        return piece.running_since

    def drop(self, row: Row) -> list[str]:
        """Forget all requests of a row that has its outcome; returns the keys that are in flight."""
        keys = [key for key, piece in self.in_flight.items() if piece.row is row]
        for key in keys:
            del self.in_flight[key]
        self._ready = deque(piece for piece in self._ready if piece.row is not row)
        self._retries = [item for item in self._retries if item[2].row is not row]
        heapq.heapify(self._retries)
        return keys

    def retrying(self) -> Iterator[Row]:
        """Rows with a retry that waits."""
        return (piece.row for _, _, piece in self._retries)

    def next_retry(self) -> float | None:
        """Seconds until the next retry is due."""
        return max(0.0, self._retries[0][0] - time.monotonic()) if self._retries else None

    def died(self) -> list[Row]:
        """Empty the engine, which is dead; returns the rows that were in flight, once each."""
        rows = list(dict.fromkeys(piece.row for piece in self.in_flight.values()))
        self.in_flight.clear()
        self._queued.clear()
        held = set(map(id, rows))
        self._retries = [item for item in self._retries if id(item[2].row) not in held]
        heapq.heapify(self._retries)
        self._ready = deque(piece for piece in self._ready if id(piece.row) not in held)
        return rows


def unanswered(row: Row) -> list[Piece]:
    """A row's requests that have no answer; none if it has its outcome."""
    return [] if row.finished else [p for p in row.requests if row.answers[p.index] is None]
