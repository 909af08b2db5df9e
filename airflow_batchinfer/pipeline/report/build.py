"""Gathers a report from what a run left in the store; works at any point of a run."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

from airflow_batchinfer.outcome import Outcome
from airflow_batchinfer.pipeline.accounting import Account
from airflow_batchinfer.pipeline.answers import ShardAnswers, shards_of
from airflow_batchinfer.pipeline.attempts import Attempt, attempts_of, paid_by
from airflow_batchinfer.pipeline.eyes import read_review
from airflow_batchinfer.pipeline.forecast import money
from airflow_batchinfer.pipeline.judge_cost import judge_cost
from airflow_batchinfer.pipeline.merge import MergeResult
from airflow_batchinfer.pipeline.pilot import PilotVerdict, read_pilot
from airflow_batchinfer.pipeline.profile import Profile, profile_shard
from airflow_batchinfer.pipeline.report.model import Report, ShardLine, Stage, Throughput
from airflow_batchinfer.pipeline.shown import RowPicker
from airflow_batchinfer.pipeline.verdict import Verdict
from airflow_batchinfer.run.layout import DEAD_LETTERS, RunLayout, results_table
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.stop import Stop, read_stop
from airflow_batchinfer.store import Store

DEAD_EXAMPLES = 5
"""Dead letters shown for each reason."""

Status = Literal["published", "held", "not published", "stopped", "incomplete"]


def build_report(store: Store, plan: Plan, account: Account | None) -> Report:
    """Read the run, one shard in memory at a time.

    Args:
        store: the run's.
        plan: the run's.
        account: the run's, if it has one by now.

    Raises:
        CorruptError: a part or document cannot be read, naming it.
        StoreError: the store cannot be read.
    """
    layout = RunLayout(plan.folder)
    start = _time(plan.created_at)
    picker = RowPicker(plan.spec.report.samples, DEAD_EXAMPLES, plan.spec.report.seed)
    profile, lines = Profile(), []
    attempts: list[Attempt] = []
    engine: dict[str, str] = {}
    opened: dict[int, ShardAnswers] = {}
    ledger = account.ledger if account else None
    for shard in shards_of(store, plan, quarantine=account.quarantine if account else None):
        opened[shard.planned.shard] = shard
        own = profile_shard(shard)
        profile = profile.plus(own)
        picker.see(shard)
        of_shard = attempts_of(store, layout, shard.planned.shard)
        attempts += of_shard
        lines.append(_line(shard, own, of_shard, start))
        engine = engine or (shard.commit.engine if shard.commit else {})

    verdict = Verdict.find(store, layout.validation)
    merged = MergeResult.find(store, layout.merge)
    published = merged is not None and account is not None and merged.is_of(account)
    unprocessed = plan.rows - profile.rows
    problems = _problems(plan, profile, account, lines)
    status: Status
    pilot, stop = read_pilot(store, plan.folder), read_stop(store, plan.folder)
    halted = stop is not None or (pilot is not None and not pilot.success)
    if ledger is None or not ledger.complete or unprocessed:
        status = "stopped" if halted else "incomplete"
    elif published:
        status = "published"
    elif verdict is not None and not verdict.publish:
        status = "held"
    else:
        status = "not published"
    kept = profile.tokens
    paid = paid_by(attempts, kept)
    throughput = _throughput(profile, lines)
    ledger_sha256, quarantine_sha256 = account.digests if account else (None, None)
    prices = plan.spec.cost
    return Report(
        job=plan.job,
        run_id=plan.run_id,
        generation=plan.generation,
        folder=store.uri_of(plan.folder),
        fingerprint=plan.fingerprint,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        status=status,
        headline=_headline(status, plan, profile, lines, verdict, pilot, stop),
        problems=problems,
        warnings=list(plan.warnings),
        ledger_sha256=ledger_sha256,
        quarantine_sha256=quarantine_sha256,
        model=plan.spec.model.name,
        engine=engine,
        task=plan.spec.task.type,
        rows=plan.rows,
        counts=_by_outcome({**profile.counts, Outcome.UNPROCESSED: unprocessed}),
        reasons=profile.reasons,
        tokens=kept,
        tokens_lost=paid.total - kept.total,
        tokens_saved=profile.saved_tokens,
        dedup_rows=profile.rows - profile.sent,
        kept_rows=plan.kept.rows if plan.kept else 0,
        changes=plan.changes,
        replay_of=plan.replay_of.run_id if plan.replay_of else None,
        throughput=throughput,
        stages=_stages(start, lines, ledger, verdict, merged),
        shards=lines,
        profile=profile,
        verdict=verdict,
        pilot=pilot,
        stop=stop,
        cost=money(prices, paid, throughput.held_seconds) if prices else None,
        currency=prices.currency if prices else "",
        judge=judge_cost(store, plan),
        review=read_review(store, plan.folder),
        samples=picker.succeeded(opened),
        dead_letters=picker.dead(opened),
        places={
            "results table": store.uri_of(results_table(plan.job)),
            "dead-letter table": store.uri_of(DEAD_LETTERS),
            "sheet to mark by hand": store.uri_of(layout.review("csv")),
            **({"data docs": store.uri_of(verdict.data_docs)} if verdict and verdict.data_docs else {}),
            "run folder": store.uri_of(plan.folder),
        },
    )


def _line(shard: ShardAnswers, profile: Profile, attempts: list[Attempt], start: datetime) -> ShardLine:
    newest = attempts[-1] if attempts else None
    state = "committed" if shard.commit else (newest.state if newest else "not started")
    begins = [_seconds(start, a.ended_at) - a.held_seconds for a in attempts]
    ends = [_seconds(start, a.ended_at) for a in attempts]
    return ShardLine(
        shard=shard.planned.shard,
        state=state,
        message="" if shard.commit or newest is None else newest.message,
        rows=shard.planned.rows,
        sent=shard.planned.sent,
        dead=profile.rows - profile.counts.get(Outcome.SUCCEEDED, 0),
        tokens=profile.tokens.total,
        predicted_tokens=shard.planned.predicted_tokens,
        attempts=len(attempts),
        reclaims=sum(a.state == "reclaimed" for a in attempts),
        engine_restarts=sum(a.engine_restarts for a in attempts),
        held_seconds=sum(a.held_seconds for a in attempts),
        start=max(0.0, min(begins)) if begins else None,
        end=max(ends) if ends else None,
    )


def _throughput(profile: Profile, lines: list[ShardLine]) -> Throughput:
    starts = [line.start for line in lines if line.start is not None]
    ends = [line.end for line in lines if line.end is not None]
    wall = max(ends) - min(starts) if starts and ends else 0.0
    held = sum(line.held_seconds for line in lines)
    tokens = profile.tokens.total
    accepted = profile.counts.get(Outcome.SUCCEEDED, 0)
    return Throughput(
        wall_seconds=wall,
        held_seconds=held,
        rows_per_second=profile.rows / wall if wall > 0 else 0.0,
        tokens_per_second=tokens / wall if wall > 0 else 0.0,
        accepted_rows_per_held_second=accepted / held if held > 0 else 0.0,
    )


def _stages(
    start: datetime,
    lines: list[ShardLine],
    ledger: Ledger | None,
    verdict: Verdict | None,
    merged: MergeResult | None,
) -> list[Stage]:
    """Steps that left a time behind; each of the last three begins where the one before ended."""
    stages = []
    begins = [line.start for line in lines if line.start is not None]
    ends = [line.end for line in lines if line.end is not None]
    last = 0.0
    if begins and ends:
        first, last = min(begins), max(ends)
        stages += [Stage(name="waiting for a worker", start=0.0, end=first)]
        stages += [Stage(name="infer", start=first, end=last)]
    done: Iterable[tuple[str, str | None]] = (
        ("reconcile", ledger.created_at if ledger else None),
        ("validate", verdict.created_at if verdict else None),
        ("merge", merged.created_at if merged else None),
    )
    for name, at in done:
        if at is not None and (end := _seconds(start, at)) >= last:
            stages.append(Stage(name=name, start=last, end=end))
            last = end
    return stages


def _problems(plan: Plan, profile: Profile, account: Account | None, lines: list[ShardLine]) -> list[str]:
    ledger = account.ledger if account else None
    problems = list(ledger.problems) if ledger else ["The run has no ledger yet: reconcile has not run."]
    for line in lines:
        if line.state != "committed" and not any(f"shard {line.shard:04d}" in p for p in problems):
            problems.append(f"shard {line.shard:04d} has no commit: {line.state}. {line.message}".strip())
    if account and account.ledger.complete and profile.rows == plan.rows:
        counts = account.counts
        differing = [
            f"{o}: {counts.get(o, 0)} in the ledger, {profile.counts.get(o, 0)} in parts"
            for o in sorted(counts.keys() | profile.counts.keys())
            if counts.get(o, 0) != profile.counts.get(o, 0)
        ]
        if differing:
            problems.append("Parts and ledger disagree: " + "; ".join(differing) + ". Clear reconcile.")
    return problems


def _headline(
    status: Status,
    plan: Plan,
    profile: Profile,
    lines: list[ShardLine],
    verdict: Verdict | None,
    pilot: PilotVerdict | None,
    stop: Stop | None,
) -> str:
    good = profile.counts.get(Outcome.SUCCEEDED, 0)
    dead = profile.rows - good
    counted = f"{good:,} of {plan.rows:,} rows succeeded, {dead:,} {_are(dead)} dead letters"
    if status == "published":
        warned = (
            " with warnings" if verdict is not None and any(not c.success for c in verdict.checks) else ""
        )
        return f"Published{warned}: {counted}."
    if status == "held":
        assert verdict is not None
        return f"Held back: {verdict.message}"
    if status == "stopped":
        if stop is not None:
            done = f"{profile.rows:,} of {plan.rows:,} rows have an outcome, which is kept"
            return f"Stopped by {stop.by}: {stop.reason}. {done}."
        assert pilot is not None
        return pilot.message
    if status == "not published":
        return f"Complete but not published: {counted}. Run merge."
    open_shards = [line for line in lines if line.state != "committed"]
    left = plan.rows - profile.rows
    what = f"{len(open_shards)} of {len(lines)} shards have no commit" if open_shards else "not reconciled"
    return f"Incomplete: {what}; {profile.rows:,} of {plan.rows:,} rows have an outcome, {left:,} are left."


def _by_outcome(counts: dict[str, int]) -> dict[str, int]:
    """Counts that are not zero, in the order in which outcomes are defined."""
    return {o.value: counts[o] for o in Outcome if counts.get(o)}


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


def _time(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _seconds(start: datetime, text: str) -> float:
    return (_time(text) - start).total_seconds()
