"""Runs a job's Great Expectations over a run, one frame in memory at a time, and sums them up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from airflow_batchinfer.pipeline.answers import ShardAnswers
from airflow_batchinfer.pipeline.data_docs import data_docs
from airflow_batchinfer.pipeline.expectations import Expected, expectations_of, title
from airflow_batchinfer.pipeline.frames import all_frames, build_frame
from airflow_batchinfer.pipeline.gx import EXAMPLES, exception_of, validate_frame
from airflow_batchinfer.pipeline.quarantine import Quarantine, QuarantinedShard, QuarantineWriter
from airflow_batchinfer.pipeline.sampling import ranks
from airflow_batchinfer.pipeline.shown import cut, one_line
from airflow_batchinfer.pipeline.verdict import Check
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.shard import ROW_ID
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store

_LISTS = frozenset({"unexpected_list", "unexpected_index_list", "unexpected_index_query"})
_LONGEST_VALUE = 200
"""Characters of one value that are shown: an answer may be a megabyte."""


@dataclass
class _Total:
    """One expectation's results over the shards so far."""

    expected: Expected
    checked: int = 0
    missing: int = 0
    unexpected: int = 0
    success: bool = True
    observed: str = ""
    error: str | None = None
    examples: list[dict[str, Any]] = field(default_factory=list)
    dead_lettered: int = 0
    values: list[Any] = field(default_factory=list)
    """A few that failed, for data docs."""
    last: dict[str, Any] = field(default_factory=dict)
    """Great Expectations' last result; of one that raised, that."""


class ExpectationRunner:
    """Runs a job's expectations over shards as they go by, then over a sample of the run."""

    def __init__(self, store: Store, layout: RunLayout, spec: JobSpec) -> None:
        expected = expectations_of(spec) if spec.validation.enabled else []
        deadly = [e for e in expected if e.on_failure == "dead_letter"]
        others = [e for e in expected if e.on_failure != "dead_letter"]
        self._deadly = [_Total(e) for e in deadly]
        self._by_row = [_Total(e) for e in others if e.row_by_row]
        self._whole = [_Total(e) for e in others if not e.row_by_row]
        self._store, self._layout, self._spec = store, layout, spec
        self._columns = frozenset().union(*(e.columns for e in others))
        self._deadly_columns = frozenset().union(*(e.columns for e in deadly))
        self._quarantined: list[QuarantinedShard] = []
        self._sample = pd.DataFrame()
        self.rows_checked = 0
        self.details: list[str] = []

    @property
    def holds(self) -> bool:
        """Whether a failure keeps the results back; know it after `finish`."""
        return any(_check(t).blocks and t.expected.on_failure != "warn" for t in self._totals)

    @property
    def _totals(self) -> list[_Total]:
        return [*self._deadly, *self._by_row, *self._whole]

    def quarantine(self, shard: ShardAnswers) -> QuarantinedShard | None:
        """Run the expectations that make dead letters over all the shard's rows; write down who fails."""
        if not self._deadly:
            return None
        number, failing = shard.planned.shard, QuarantineWriter()
        frames = all_frames(shard, self._deadly_columns, self._spec.validation.sample_rows)
        for index, frame in enumerate(frames):
            if not self._by_row and not self._whole:
                self.rows_checked += len(frame)
            name = f"shard-{number:05d}-rows-{index:03d}"
            for total, result in self._run(frame, self._deadly, name, all_failing=True):
                for row in (result.get("result") or {}).get("unexpected_index_list") or []:
                    total.dead_lettered += 1
                    failing.add(int(row[ROW_ID]), _words(total.expected, row))
        line = failing.write(self._store, self._layout, number)
        if line is not None:
            self._quarantined.append(line)
        return line

    def quarantined(self) -> Quarantine:
        """What `quarantine` has found in all shards."""
        counts: Counter[str] = Counter()
        for total in self._deadly:
            if total.dead_lettered:
                counts[title(total.expected.type, total.expected.kwargs)] += total.dead_lettered
        return Quarantine(shards=self._quarantined, expectations=dict(counts))

    def see(self, shard: ShardAnswers) -> None:
        """Check one shard's rows that are not quarantined."""
        if not self._by_row and not self._whole:
            return
        most = self._spec.validation.sample_rows
        frame = build_frame(shard, self._columns, most)
        if frame.empty:
            return
        self.rows_checked += len(frame)
        if self._whole:
            both = pd.concat([self._sample, frame], ignore_index=True)
            rank = pd.Series(ranks(both[ROW_ID].to_numpy(), seed=0))
            self._sample = both.loc[rank.nsmallest(most).index]
        self._run(frame, self._by_row, f"shard-{shard.planned.shard:05d}")

    def finish(self) -> list[Check]:
        """Check the run's sample, and sum up."""
        if self._whole and not self._sample.empty:
            self._run(self._sample.reset_index(drop=True), self._whole, "run")
        return [_check(total) for total in self._totals]

    def write_data_docs(self, plan: Plan, time: str) -> str | None:
        """Write Great Expectations' page of the run; its key, or none if nothing was expected."""
        if not self._totals:
            return None
        results = [_summed(total) for total in self._totals]
        page = data_docs(plan.job, plan.run_id, time, results)
        self._store.write_bytes(self._layout.data_docs, page.encode())
        return self._layout.data_docs

    def _run(
        self, frame: pd.DataFrame, totals: Sequence[_Total], name: str, *, all_failing: bool = False
    ) -> list[tuple[_Total, dict[str, Any]]]:
        """Check one frame, add up, keep the results in the store, and return them with their totals."""
        if not totals:
            return []
        expectations = [t.expected.expectation for t in totals]
        results = validate_frame(frame, expectations, ROW_ID, all_failing=all_failing)
        for total, result in zip(totals, results, strict=True):
            _add(total, result)
        key = self._layout.expectations(name)
        kept = [_without_lists(result) for result in results]
        self._store.write_bytes(key, json.dumps(kept, indent=1, default=str).encode())
        self.details.append(key)
        return list(zip(totals, results, strict=True))


def _words(expected: Expected, row: dict[str, Any]) -> str:
    """What a failing row's dead letter says."""
    found = ", ".join(f"{k} {json.dumps(v, default=str)}" for k, v in row.items() if k != ROW_ID)
    return f"{title(expected.type, expected.kwargs)} ({expected.type}): found {cut(found, _LONGEST_VALUE)}"


def _without_lists(result: dict[str, Any]) -> dict[str, Any]:
    """A result without its lists of all failing rows: the quarantine has them."""
    values = {k: v for k, v in (result.get("result") or {}).items() if k not in _LISTS}
    return result | {"result": values}


def _add(total: _Total, result: dict[str, Any]) -> None:
    """Add one frame's result."""
    values = result.get("result") or {}
    raised = exception_of(result)
    if raised is not None:
        total.success, total.error = False, cut(raised, 2 * _LONGEST_VALUE)
    elif "unexpected_count" in values and "element_count" in values:
        total.checked += values["element_count"] - (values.get("missing_count") or 0)
        total.missing += values.get("missing_count") or 0
        total.unexpected += values["unexpected_count"]
    else:
        total.success = total.success and bool(result["success"])
        total.observed = one_line(values.get("observed_value"))
    total.last = result if raised is not None or not exception_of(total.last) else total.last
    failing = list(values.get("partial_unexpected_list") or [])
    total.values += map(_short, failing[: EXAMPLES - len(total.values)])
    rows = list(values.get("partial_unexpected_index_list") or [])
    total.examples += [
        {name: _short(value) for name, value in row.items()} for row in rows[: EXAMPLES - len(total.examples)]
    ]


def _short(value: Any) -> Any:
    """The value, or the start of its text if that is long."""
    text = str(value)
    return value if len(text) <= _LONGEST_VALUE else cut(text, _LONGEST_VALUE)


def _check(total: _Total) -> Check:
    expected = total.expected
    mostly = float(expected.kwargs.get("mostly", 1.0))
    good = total.checked - total.unexpected
    enough = total.checked == 0 or good / total.checked >= mostly
    counted = expected.row_by_row and not total.observed
    observed = f"{total.unexpected:,} of {total.checked:,} values fail" if counted else total.observed
    if total.dead_lettered:
        observed += "; those rows are dead letters"
        # What fails is out of the results; only a tolerance that the job states can be exceeded.
        enough = enough or "mostly" not in expected.kwargs
    return Check(
        name=title(expected.type, expected.kwargs),
        kind=expected.type,
        origin=expected.origin,
        severity=expected.severity,
        success=total.success and enough,
        observed=observed,
        required=_required(expected, mostly),
        checked=total.checked if counted else None,
        unexpected=total.unexpected if counted else None,
        dead_lettered=total.dead_lettered,
        examples=total.examples,
        error=total.error,
    )


def _summed(total: _Total) -> dict[str, Any]:
    """An expectation's results over all frames as one of Great Expectations' own."""
    values = dict(total.last.get("result") or {})
    if total.checked or total.missing:
        rows = total.checked + total.missing
        share = 100 * total.unexpected / total.checked if total.checked else 0.0
        values = {
            "element_count": rows,
            "missing_count": total.missing,
            "missing_percent": 100 * total.missing / rows,
            "unexpected_count": total.unexpected,
            "unexpected_percent": share,
            "unexpected_percent_nonmissing": share,
            "unexpected_percent_total": 100 * total.unexpected / rows,
            "partial_unexpected_list": total.values,
        }
    return {
        "success": _check(total).success,
        "expectation_config": {"type": total.expected.type, "kwargs": dict(total.expected.kwargs)},
        "result": values,
        "exception_info": total.last.get("exception_info") or {"raised_exception": False},
    }


def _required(expected: Expected, mostly: float) -> str:
    arguments = {k: v for k, v in expected.kwargs.items() if k not in ("column", "mostly")}
    text = ", ".join(f"{k} {json.dumps(v, default=str)}" for k, v in arguments.items())
    text = text if len(text) <= 160 else text[:159] + "…"
    return f"at least {mostly:.1%}{': ' + text if text else ''}" if mostly < 1 else text
