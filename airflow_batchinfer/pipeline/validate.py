"""Validate a complete run: Great Expectations and the job's limits, aggregated to one verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from airflow_batchinfer.errors import GateError, IncompleteRunError
from airflow_batchinfer.pipeline.answers import ShardAnswers, shards_of
from airflow_batchinfer.pipeline.drift import check_drift
from airflow_batchinfer.pipeline.expectations import Expected, expectations_of, title
from airflow_batchinfer.pipeline.frames import build_frame
from airflow_batchinfer.pipeline.gx import EXAMPLES, validate_frame
from airflow_batchinfer.pipeline.labels import LabelCounter
from airflow_batchinfer.pipeline.limits import check_limits
from airflow_batchinfer.pipeline.profile import Profile, profile_shard
from airflow_batchinfer.pipeline.sampling import ranks
from airflow_batchinfer.pipeline.shown import RowPicker
from airflow_batchinfer.pipeline.verdict import Check, Verdict
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.shard import ROW_ID
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store


def validate(store: Store, folder: str) -> Verdict:
    """Judge the run at `folder`, write `validation.json`, and raise if its results must be held.

    One shard is in memory at a time. Expectations that judge rows one by one run over every shard (at
    most `validation.sample_rows` of it), and their counts add up; others (means, quantiles, distinct
    values) run once over a sample of the whole run of that size.

    Raises:
        IncompleteRunError: the run has no complete ledger.
        GateError: a limit is broken, or an expectation with `on_failure: hold`; the verdict is written.
        SpecError: an expectation cannot be built (split refuses these before anything is spent).
        CorruptError: a part cannot be read, naming it.
    """
    layout = RunLayout(folder)
    plan = Plan.read(store, layout.plan)
    ledger = _complete_ledger(store, layout)
    spec = plan.spec
    runner = _ExpectationRunner(store, layout, spec)
    profile, labels = Profile(), LabelCounter(spec)
    picker = RowPicker(succeeded=0, dead_of_each_reason=3, seed=spec.report.seed)
    opened: dict[int, ShardAnswers] = {}
    for shard in shards_of(store, plan):
        opened[shard.planned.shard] = shard
        profile = profile.plus(profile_shard(shard))
        labels.see(shard)
        picker.see(shard)
        runner.see(shard)
    scores = labels.scores()
    limits = check_limits(plan, ledger, picker.dead(opened), scores)
    drift = check_drift(store, plan, profile)
    expectations = runner.finish()
    checks = [*limits, *drift, *expectations]
    broken = any(c.blocks for c in [*limits, *drift])
    unmet = any(c.blocks for c in expectations)
    verdict = Verdict(
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        ledger_sha256=ledger.digest(),
        success=not broken and not unmet,
        publish=not broken and not (unmet and spec.validation.on_failure == "hold"),
        message=_message(checks, hold=broken or spec.validation.on_failure == "hold"),
        checks=checks,
        rows_checked=runner.rows_checked,
        details=runner.details,
        profile=profile,
        labels=scores,
    )
    verdict.write(store, layout.validation)
    if not verdict.publish:
        raise GateError(verdict.message)
    return verdict


def _complete_ledger(store: Store, layout: RunLayout) -> Ledger:
    try:
        ledger = Ledger.read(store, layout.ledger)
    except FileNotFoundError as error:
        raise IncompleteRunError(f"{layout.folder} has no ledger: run reconcile first.") from error
    if not ledger.complete:
        raise IncompleteRunError(
            f"{layout.folder} is not complete, so there is nothing to validate: "
            + "; ".join(ledger.problems[:5])
        )
    return ledger


def _message(checks: Sequence[Check], hold: bool) -> str:
    """One sentence: the worst failure with examples, and what to do."""
    failed = sorted((c for c in checks if not c.success), key=lambda c: (not c.blocks, c.origin != "limit"))
    if not failed:
        return f"All {len(checks)} checks passed."
    first = failed[0]
    found = first.error or first.observed
    text = f"{first.name}: found {found}, required {first.required or 'success'}"
    examples = "; ".join(
        ", ".join(f"{k} {v}" for k, v in example.items() if v is not None) for example in first.examples[:3]
    )
    if examples:
        text += f" (for instance {examples})"
    if len(failed) > 1:
        text += f"; {len(failed) - 1} more of {len(checks)} checks failed"
    if not any(c.blocks for c in checks):
        return f"Passed with warnings: {text}."
    if hold:
        return f"Results held back: {text}. See the report; fix the job and start a new run."
    return f"Published with warnings: {text}."


@dataclass
class _Total:
    """One expectation's results over the shards so far."""

    expected: Expected
    checked: int = 0
    unexpected: int = 0
    success: bool = True
    observed: str = ""
    error: str | None = None
    examples: list[dict[str, Any]] = field(default_factory=list)


class _ExpectationRunner:
    """Runs a job's expectations over shards as they go by, then over a sample of the run."""

    def __init__(self, store: Store, layout: RunLayout, spec: JobSpec) -> None:
        expected = expectations_of(spec) if spec.validation.enabled else []
        self._by_row = [_Total(e) for e in expected if e.row_by_row]
        self._whole = [_Total(e) for e in expected if not e.row_by_row]
        self._store, self._layout, self._spec = store, layout, spec
        self._columns = frozenset().union(*(e.columns for e in expected))
        self._sample = pd.DataFrame()
        self.rows_checked = 0
        self.details: list[str] = []

    def see(self, shard: ShardAnswers) -> None:
        """Check one shard."""
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
        return [_check(total) for total in [*self._by_row, *self._whole]]

    def _run(self, frame: pd.DataFrame, totals: Sequence[_Total], name: str) -> None:
        if not totals:
            return
        results = validate_frame(frame, [t.expected.expectation for t in totals], ROW_ID)
        for total, result in zip(totals, results, strict=True):
            _add(total, result)
        key = self._layout.expectations(name)
        self._store.write_bytes(key, json.dumps(results, indent=1, default=str).encode())
        self.details.append(key)


def _add(total: _Total, result: dict[str, Any]) -> None:
    """Add one frame's result."""
    values = result.get("result") or {}
    raised = _exception(result)
    if raised is not None:
        total.success, total.error = False, raised
    elif "unexpected_count" in values and "element_count" in values:
        total.checked += values["element_count"] - (values.get("missing_count") or 0)
        total.unexpected += values["unexpected_count"]
    else:
        total.success = total.success and bool(result["success"])
        total.observed = f"{values.get('observed_value')}"
    room = EXAMPLES - len(total.examples)
    total.examples += list(values.get("partial_unexpected_index_list") or [])[:room]


def _check(total: _Total) -> Check:
    expected = total.expected
    mostly = float(expected.kwargs.get("mostly", 1.0))
    good = total.checked - total.unexpected
    enough = total.checked == 0 or good / total.checked >= mostly
    counted = expected.row_by_row and not total.observed
    return Check(
        name=title(expected.type, expected.kwargs),
        kind=expected.type,
        origin=expected.origin,
        severity=expected.severity,
        success=total.success and enough,
        observed=f"{total.unexpected:,} of {total.checked:,} values fail" if counted else total.observed,
        required=_required(expected, mostly),
        checked=total.checked if counted else None,
        unexpected=total.unexpected if counted else None,
        examples=total.examples,
        error=total.error,
    )


def _required(expected: Expected, mostly: float) -> str:
    arguments = {k: v for k, v in expected.kwargs.items() if k not in ("column", "mostly")}
    text = ", ".join(f"{k} {json.dumps(v, default=str)}" for k, v in arguments.items())
    text = text if len(text) <= 160 else text[:159] + "…"
    return f"at least {mostly:.1%}{': ' + text if text else ''}" if mostly < 1 else text


def _exception(result: dict[str, Any]) -> str | None:
    """The message of an expectation that raised; GX nests one entry a metric, or has none."""
    info = result.get("exception_info") or {}
    entries = [info] if "raised_exception" in info else list(info.values())
    for entry in entries:
        if isinstance(entry, dict) and entry.get("raised_exception"):
            return str(entry.get("exception_message")).strip().splitlines()[0]
    return None
