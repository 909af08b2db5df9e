"""Judge the pilot: may the fleet start? With the evidence, and a forecast of what it will cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from airflow_batchinfer.errors import GateError, IncompleteRunError
from airflow_batchinfer.outcome import Outcome, Reason
from airflow_batchinfer.pipeline.answers import ShardAnswers, shards_of
from airflow_batchinfer.pipeline.attempts import attempts_of, paid_by
from airflow_batchinfer.pipeline.forecast import Forecast, Interval, forecast
from airflow_batchinfer.pipeline.labels import LabelCounter, LabelScores
from airflow_batchinfer.pipeline.limits import check_accuracy
from airflow_batchinfer.pipeline.profile import Profile, profile_shard
from airflow_batchinfer.pipeline.shown import RowPicker, ShownRow, one_line
from airflow_batchinfer.pipeline.split import load_plan
from airflow_batchinfer.pipeline.statistics import wilson
from airflow_batchinfer.pipeline.verdict import Check
from airflow_batchinfer.pipeline.words import amount, duration
from airflow_batchinfer.run.document import Document, FormatVersion, Timestamp
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store

_WORST = 5


class PilotVerdict(Document):
    """What the pilot showed. Counts are of input rows, as everywhere."""

    format_version: FormatVersion = 1
    created_at: Timestamp
    shard: int | None = Field(description="The pilot's shard; none if the plan has no pilot.")
    success: bool
    approval: Literal["none", "required"] = "none"
    message: str = Field(description="One sentence for the log.")
    checks: list[Check] = Field(default_factory=list)
    profile: Profile = Profile()
    labels: LabelScores | None = None
    forecast: Forecast | None = None
    spent_tokens: int = Field(0, description="What the pilot paid, all its attempts together.")
    worst: list[ShownRow] = Field(default_factory=list, description="Rows to look at, prompts as rendered.")


def judge_pilot(store: Store, folder: str) -> PilotVerdict:
    """Judge the pilot of the run at `folder` by the job's `gate`, and write `pilot.json`.

    A plan without a pilot (none asked for, or the input is too small) passes.

    Raises:
        InputError: the run has no plan.
        IncompleteRunError: the pilot's shard has no commit.
        GateError: a limit is broken; names it, what was spent and saved, and the worst rows.
        CorruptError: a part cannot be read.
    """
    layout = RunLayout(folder)
    plan = load_plan(store, folder)
    number = next((s.shard for s in plan.shards if s.pilot), None)
    if number is None:
        verdict = PilotVerdict(
            created_at=_now(), shard=None, success=True, message="The plan has no pilot: nothing to judge."
        )
        verdict.write(store, layout.pilot)
        return verdict
    shard = next(shards_of(store, plan, [number]))
    if shard.commit is None:
        raise IncompleteRunError(
            f"the pilot (shard {number:04d} of {folder}) has no commit: clear the pilot's task"
        )
    verdict = _judge(plan, shard)
    verdict.write(store, layout.pilot)
    if not verdict.success:
        raise GateError(verdict.message)
    return verdict


def read_pilot(store: Store, folder: str) -> PilotVerdict | None:
    """The judgement that `judge_pilot` left, or none. Raises `CorruptError`."""
    return PilotVerdict.find(store, RunLayout(folder).pilot)


def _judge(plan: Plan, shard: ShardAnswers) -> PilotVerdict:
    profile = profile_shard(shard)
    counter = LabelCounter(plan.spec)
    counter.see(shard)
    scores = counter.scores()
    expected = forecast(plan, shard)
    checks = [
        *_shares(plan.spec, profile, _most_frequent(shard)),
        *check_accuracy(plan.spec, scores, "gate"),
        *_budget(plan.spec, expected),
    ]
    attempts = attempts_of(shard.store, RunLayout(plan.folder), shard.planned.shard)
    spent = paid_by(attempts, profile.tokens).total
    worst = _worst_rows(shard)
    return PilotVerdict(
        created_at=_now(),
        shard=shard.planned.shard,
        success=not any(c.blocks for c in checks),
        approval=plan.spec.gate.approval,
        message=_message(checks, profile, expected, spent, worst),
        checks=checks,
        profile=profile,
        labels=scores,
        forecast=expected,
        spent_tokens=spent,
        worst=worst,
    )


def _shares(spec: JobSpec, profile: Profile, identical: int) -> Iterator[Check]:
    rows, sent = profile.rows, profile.sent
    dead = rows - profile.counts.get(Outcome.SUCCEEDED, 0)
    empty = profile.reasons.get(Reason.EMPTY_OUTPUT, 0)
    worst = max(profile.reasons, key=lambda r: profile.reasons[r], default=None)
    mostly = f", mostly {worst} ({profile.reasons[worst]:,})" if worst else ""
    cut_off = profile.finish_reasons.get("length", 0) + profile.reasons.get(Reason.TRUNCATED_OUTPUT, 0)
    for field, name, count, of, more in (
        ("max_dead_fraction", "pilot rows that did not succeed", dead, rows, mostly),
        ("max_empty_fraction", "blank outputs", empty, rows, ""),
        ("max_length_fraction", "answers cut at `sampling.max_tokens`", cut_off, rows, ""),
        ("max_refusal_fraction", "refusals", profile.refusals, rows, ""),
        # Copies say nothing about the model: that they have one output is no wonder.
        ("max_identical_fraction", "sent rows with the most frequent output", identical, sent, ""),
    ):
        limit: float | None = getattr(spec.gate, field)
        if limit is None:
            continue
        low, high = wilson(count, of)
        share = count / of if of else 0.0
        yield Check(
            name=name,
            kind=f"gate.{field}",
            origin="limit",
            success=share <= limit,
            observed=f"{share:.1%} ({count:,} of {of:,}; {low:.0%} to {high:.0%} in the run){more}",
            required=f"at most {limit:.1%} (`gate.{field}`)",
            checked=of,
            unexpected=count,
        )


def _budget(spec: JobSpec, expected: Forecast) -> Iterator[Check]:
    """Forecast against budget. An amount that the pilot cannot tell is no reason to stop."""
    gate = spec.gate
    hours = 3600.0
    for field, name, limit, interval, unit in (
        ("max_tokens", "forecast tokens", gate.max_tokens, expected.tokens, 1.0),
        ("max_held_hours", "forecast worker hours", gate.max_held_hours, expected.held_seconds, hours),
        ("max_hours", "forecast hours", gate.max_hours, expected.wall_seconds, hours),
        ("max_cost", f"forecast cost in {expected.currency}", gate.max_cost, expected.cost, 1.0),
    ):
        if limit is None:
            continue
        yield Check(
            name=name,
            kind=f"gate.{field}",
            origin="limit",
            severity="critical" if interval else "warning",
            success=interval is not None and interval.expected / unit <= limit,
            observed=_range(interval, unit) if interval else "the pilot was too short to tell",
            required=f"at most {limit:,.10g} (`gate.{field}`)",
        )


def _range(interval: Interval, unit: float) -> str:
    values = (interval.low, interval.expected, interval.high)
    low, expected, high = (amount(value / unit) for value in values)
    return f"{expected} ({low} to {high})"


def _message(
    checks: Sequence[Check],
    profile: Profile,
    expected: Forecast,
    spent: int,
    worst: Sequence[ShownRow],
) -> str:
    failed = [c for c in checks if c.blocks]
    if not failed:
        held = "" if expected.held_seconds is None else f", {duration(expected.held_seconds.expected)} held"
        cost = "" if expected.cost is None else f", {_range(expected.cost, 1)} {expected.currency}"
        return (
            f"The pilot passed: {profile.counts.get(Outcome.SUCCEEDED, 0):,} of {profile.rows:,} rows "
            f"succeeded; forecast for the run: {_range(expected.tokens, 1)} tokens{held}{cost}."
        )
    faults = "; ".join(f"{c.name}: {c.observed}, required {c.required}" for c in failed)
    saved = max(0.0, expected.tokens.expected - spent)
    shown = "; ".join(_in_short(row) for row in worst[:3])
    return (
        f"The pilot failed, so the fleet was not started: {faults}. Spent {spent:,} tokens, saved about "
        f"{saved:,.0f}. {'For instance ' + shown + '. ' if shown else ''}"
        "Fix the job and start a new run, or change `gate` and clear split with its downstream tasks: the "
        "pilot's rows are not paid again."
    )


def _in_short(row: ShownRow) -> str:
    prompt = row.prompt[-1]["content"] if row.prompt else ""
    what = f"{row.reason}: {one_line(row.message)}" if row.reason else "succeeded"
    return f"row {row.row_id} ({what}): prompt {one_line(prompt)} gave {one_line(row.output or '')}"


def _worst_rows(shard: ShardAnswers) -> list[ShownRow]:
    """Dead rows first, of each reason in turn; then rows that succeeded."""
    picker = RowPicker(_WORST, _WORST, seed=0)
    picker.see(shard)
    opened = {shard.planned.shard: shard}
    dead = picker.dead(opened)
    in_turn = [row for i in range(_WORST) for rows in dead.values() for row in rows[i : i + 1]]
    return [*in_turn, *picker.succeeded(opened)][:_WORST]


def _most_frequent(shard: ShardAnswers) -> int:
    """Sent rows that have the most frequent output."""
    outputs = shard.answers(["output"])["output"].drop_null()
    counted: Counter[str] = Counter(outputs.to_pylist())
    return counted.most_common(1)[0][1] if counted else 0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
