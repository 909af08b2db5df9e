"""Measurements on disk, a JSON line each: a benchmark that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from benchmarks.peers.measure import Measured


@dataclass(frozen=True)
class Record:
    """One peer in one run of one round. Seconds are rounded to a hundredth.

    Attributes:
        round: name of a round, `killed`, or a prompt set with a fault.
        run: number of the run, from 0; ratios are taken within one run.
        rows: rows of the prompt set.
        first_durable: seconds until an accepted row was seen on disk; null if not before the exit.
        peak: MiB that all its processes held together at most; null where it was not sampled.
        killed_at: tokens computed when it was killed, where it was.
        around: ours: seconds of split, reconcile and merge, for which nothing is held; null if not taken.
        at: when it was measured. code: the commit that was, `+` if there were changes.
    """

    round: str
    peer: str
    run: int
    rows: int
    held: float
    accepted: int
    engine: float
    steps: int
    tokens: int
    first_durable: float | None
    returncode: int
    peak: float | None = None
    killed_at: int | None = None
    around: float | None = None
    at: str | None = None
    code: str | None = None

    @classmethod
    def of(
        cls,
        round_: str,
        peer: str,
        run: int,
        rows: int,
        measured: Measured,
        *,
        code: str | None = None,
    ) -> Self:
        """What is kept of a measurement."""
        first = measured.first_durable
        return cls(
            round=round_,
            peer=peer,
            run=run,
            rows=rows,
            held=round(measured.held, 2),
            accepted=measured.accepted,
            engine=round(measured.engine, 2),
            steps=int(measured.steps),
            tokens=int(measured.tokens),
            first_durable=None if first is None else round(first, 2),
            returncode=measured.returncode,
            peak=None if measured.peak is None else round(measured.peak),
            killed_at=None if measured.killed_at is None else int(measured.killed_at),
            around=None if measured.around is None else round(measured.around, 2),
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            code=code,
        )

    @property
    def held_rate(self) -> float:
        """Accepted rows per second that the process was held, start to exit, restarts included."""
        return self.accepted / self.held if self.held else 0.0

    @property
    def engine_rate(self) -> float:
        """Accepted rows per second from the engine's first step to its last."""
        return self.accepted / self.engine if self.engine else 0.0


class Records:
    """The file of measurements: appended to, never rewritten."""

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._found = [Record(**json.loads(line)) for line in lines]

    def add(self, record: Record) -> None:
        """Keep a measurement."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        self._found.append(record)

    def has(self, round_: str, peer: str, run: int) -> bool:
        """Whether that was measured."""
        return any((r.round, r.peer, r.run) == (round_, peer, run) for r in self._found)

    def runs(self, round_: str, peer: str) -> int:
        """How often that was measured."""
        return sum((r.round, r.peer) == (round_, peer) for r in self._found)

    def next_run(self, round_: str) -> int:
        """Number of the run that follows the last on record."""
        return max((r.run + 1 for r in self._found if r.round == round_), default=0)

    def of(self, round_: str) -> list[Record]:
        """All of a round, in the order they were measured."""
        return [r for r in self._found if r.round == round_]


def by_peer(records: Iterable[Record]) -> dict[str, dict[int, Record]]:
    """Records by peer and run."""
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        found.setdefault(record.peer, {})[record.run] = record
    return found
