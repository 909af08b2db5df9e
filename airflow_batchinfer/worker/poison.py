"""The search for a row that kills the engine: suspects run apart, in halves, until one stands alone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from airflow_batchinfer.worker.work import DEATHS_ALONE, Row


class Search:
    """One search among rows of which one is thought to kill.

    `group` runs with nothing else in the engine. Whoever runs it says what came of it: `survived`, or
    `died` with the rows that were in flight. Each death halves the suspects, so a search among n rows
    ends after at most ceil(log2 n) + `DEATHS_ALONE` deaths, the last ones with one row alone.
    """

    def __init__(self, suspects: Sequence[Row] = ()) -> None:
        """Begin with `suspects`, or with those of the first death."""
        self._groups: deque[list[Row]] = deque()
        self._deaths_alone: Counter[Row] = Counter()
        self._split(list(suspects))

    @property
    def group(self) -> list[Row]:
        """The rows to run apart now; empty when the search is over."""
        return self._groups[0] if self._groups else []

    def survived(self) -> None:
        """The group is through: its rows are innocent."""
        self._groups.popleft()
        # The last group must hold the culprit, if there is one: no need to see it die as a whole.
        if len(self._groups) == 1 and len(self.group) > 1:
            self._split(self._groups.popleft())

    def died(self, suspects: Sequence[Row]) -> tuple[Row | None, list[Row]]:
        """The engine died with `suspects` of the group in flight.

        Returns:
            The culprit, if it has stood alone at `DEATHS_ALONE` deaths, and the rows that are free to go:
            those that had no part in this death.
        """
        held = {id(row) for row in suspects}
        freed = [row for group in self._groups for row in group if id(row) not in held and not row.finished]
        self._groups.clear()
        if len(suspects) == 1:
            self._deaths_alone.update(suspects)
            if self._deaths_alone[suspects[0]] >= DEATHS_ALONE:
                return suspects[0], freed
        if suspects:
            self._split(list(suspects))
        return None, freed

    def _split(self, rows: list[Row]) -> None:
        middle = (len(rows) + 1) // 2
        self._groups.extend(half for half in (rows[:middle], rows[middle:]) if half)
