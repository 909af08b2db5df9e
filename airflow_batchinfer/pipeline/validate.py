"""Validate a complete run: Great Expectations and the job's limits, aggregated to one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from airflow_batchinfer.errors import GateError, IncompleteRunError, InputError, UnreadableError
from airflow_batchinfer.pipeline.accounting import Account
from airflow_batchinfer.pipeline.answers import ShardAnswers, shards_of
from airflow_batchinfer.pipeline.drift import check_drift
from airflow_batchinfer.pipeline.expectation_runner import ExpectationRunner
from airflow_batchinfer.pipeline.judge import judge_folder
from airflow_batchinfer.pipeline.judge_scores import JudgeScores, read_scores
from airflow_batchinfer.pipeline.labels import LabelCounter
from airflow_batchinfer.pipeline.limits import check_limits
from airflow_batchinfer.pipeline.profile import Profile, profile_shard
from airflow_batchinfer.pipeline.quarantine import Quarantine
from airflow_batchinfer.pipeline.shown import RowPicker, one_line
from airflow_batchinfer.pipeline.split import load_plan
from airflow_batchinfer.pipeline.verdict import Check, Verdict
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store


def validate(store: Store, folder: str) -> Verdict:
    """Judge the run at `folder`, write `validation.json`, and raise if its results must be held.

    One shard is in memory at a time. Expectations that judge rows one by one run over every shard (at
    most `validation.sample_rows` of it), and their counts add up; others (means, quantiles, distinct
    values) run once over a sample of the whole run of that size. Expectations with `on_failure:
    dead_letter` run first, over every row; the rows that fail are quarantined, and everything else here
    judges what is left.

    Raises:
        InputError: the run has no plan.
        IncompleteRunError: the run has no complete ledger, or its judge is not done.
        GateError: a limit is broken, or an expectation with `on_failure: hold`; the verdict is written.
        SpecError: an expectation cannot be built (split refuses these before anything is spent).
        CorruptError: a part cannot be read, naming it.
    """
    layout = RunLayout(folder)
    plan = load_plan(store, folder)
    ledger = _complete_ledger(store, layout)
    spec = plan.spec
    runner = ExpectationRunner(store, layout, spec)
    profile, labels, now = Profile(), LabelCounter(spec), datetime.now(UTC).isoformat(timespec="milliseconds")
    picker = RowPicker(succeeded=0, dead_of_each_reason=3, seed=spec.report.seed)
    opened: dict[int, ShardAnswers] = {}
    for committed in shards_of(store, plan):
        shard = replace(committed, quarantined=runner.quarantine(committed))
        opened[shard.planned.shard] = shard
        profile = profile.plus(profile_shard(shard))
        labels.see(shard)
        picker.see(shard)
        runner.see(shard)
    scores = labels.scores()
    account = Account(ledger, runner.quarantined())
    judged = _judged(store, plan, account)
    limits = check_limits(plan, account, picker.dead(opened), scores, judged)
    drift = check_drift(store, plan, profile)
    expectations = runner.finish()
    checks = [*limits, *drift, *expectations]
    publish = not any(c.blocks for c in [*limits, *drift]) and not runner.holds
    verdict = Verdict(
        created_at=now,
        ledger_sha256=ledger.digest(),
        success=not any(c.blocks for c in checks),
        publish=publish,
        message=_message(checks, account.quarantine, publish=publish),
        quarantine=account.quarantine,
        checks=checks,
        rows_checked=runner.rows_checked,
        details=runner.details,
        data_docs=runner.write_data_docs(plan, now),
        profile=profile,
        judge=judged,
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


def _judged(store: Store, plan: Plan, account: Account) -> JudgeScores | None:
    """What the job's judge said; none if it has no judge."""
    judge = plan.spec.judge
    if judge is None:
        return None
    try:
        asked = load_plan(store, judge_folder(plan, judge, account.ledger))
    except UnreadableError:
        raise
    except InputError as error:
        raise IncompleteRunError(
            f"{plan.folder} was not judged since its newest answers, and the job has a `judge`: clear "
            "prepare_judge with its downstream tasks"
        ) from error
    return read_scores(store, asked, judge, account.quarantine)


def _message(checks: Sequence[Check], quarantine: Quarantine, *, publish: bool) -> str:
    """One sentence: the worst failure with examples, and what to do; and what was quarantined."""
    failed = sorted((c for c in checks if not c.success), key=lambda c: (not c.blocks, c.origin != "limit"))
    if quarantine.rows:
        by_expectation = ", ".join(f"{name} ({n:,})" for name, n in quarantine.expectations.items())
        became = f" {quarantine.rows:,} rows fail an expectation and are dead letters: {by_expectation}."
    else:
        became = ""
    if not failed:
        return f"All {len(checks)} checks passed.{became}"
    first = failed[0]
    found = first.error or first.observed
    text = f"{first.name}: found {found}, required {first.required or 'success'}"
    examples = "; ".join(
        ", ".join(f"{k} {one_line(v)}" for k, v in example.items() if v is not None)
        for example in first.examples[:3]
    )
    if examples:
        text += f" (for instance {examples})"
    if len(failed) > 1:
        text += f"; {len(failed) - 1} more of {len(checks)} checks failed"
    if not any(c.blocks for c in checks):
        return f"Passed with warnings: {text}.{became}"
    if not publish:
        return (
            f"Results held back: {text}.{became} See the report. If the limit or expectation is wrong, "
            "change it and clear split with its downstream tasks: no row is paid again. If the answers are, "
            "fix the job and start a new run."
        )
    return f"Published with warnings: {text}.{became}"
