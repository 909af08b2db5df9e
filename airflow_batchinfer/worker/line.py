"""Stop-the-line: watches what comes out of the engine and says when it is not worth going on."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from airflow_batchinfer.outcome import Outcome
from airflow_batchinfer.spec import LineSpec


class _Seen(NamedTuple):
    dead: bool
    empty: bool
    length: bool
    output: int | None
    """Hash of the output; none if there is none."""


class Line:
    """A rolling window over the rows of one worker. Feed it every row that gets an outcome."""

    def __init__(self, limits: LineSpec) -> None:
        self._limits = limits
        self._window: deque[_Seen] = deque()
        self._dead = self._empty = self._length = 0
        self._outputs: Counter[int] = Counter()

    def see(self, outcome: Outcome, output: str | None, finish_reason: str | None) -> str | None:
        """Take in one row, and say why to stop, or nothing.

        Args:
            outcome: what became of the row. Rejected rows are ignored: the engine never saw them.
            output: the answer or last raw output, none if there is none (or it is a vector).
            finish_reason: the engine's.
        """
        if outcome is Outcome.REJECTED:
            return None
        seen = _Seen(
            dead=outcome is not Outcome.SUCCEEDED,
            empty=output is not None and not output.strip(),
            length=finish_reason == "length",
            output=None if output is None else hash(output),
        )
        self._window.append(seen)
        self._count(seen, 1)
        if len(self._window) > self._limits.window:
            self._count(self._window.popleft(), -1)
        return self._verdict(seen) if len(self._window) >= self._limits.min_rows else None

    def _count(self, seen: _Seen, step: int) -> None:
        self._dead += step * seen.dead
        self._empty += step * seen.empty
        self._length += step * seen.length
        if seen.output is not None:
            self._outputs[seen.output] += step
            if not self._outputs[seen.output]:
                del self._outputs[seen.output]

    def _verdict(self, newest: _Seen) -> str | None:
        # Only the newest row's output can have become more frequent, so there is no need to search.
        identical = 0 if newest.output is None else self._outputs[newest.output]
        for field, what, count in (
            ("max_dead", "did not succeed", self._dead),
            ("max_empty", "have a blank output", self._empty),
            ("max_length", "were cut at `sampling.max_tokens`", self._length),
            ("max_identical", "have one and the same output", identical),
        ):
            limit: float | None = getattr(self._limits, field)
            rows = len(self._window)
            if limit is not None and count > limit * rows:
                return (
                    f"{count} of the last {rows} rows {what} ({count / rows:.0%}), "
                    f"more than `line.{field}` {limit:.0%}"
                )
        return None
