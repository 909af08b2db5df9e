"""The job's own limits on a finished run: dead letters, all and by reason, and accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from airflow_batchinfer.pipeline.accounting import Account
from airflow_batchinfer.pipeline.judge_scores import JudgeScores
from airflow_batchinfer.pipeline.labels import LabelScores
from airflow_batchinfer.pipeline.shown import ShownRow, cut
from airflow_batchinfer.pipeline.statistics import wilson
from airflow_batchinfer.pipeline.verdict import Check
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.spec import JobSpec

_EXAMPLES = 3


def check_limits(
    plan: Plan,
    account: Account,
    dead: Mapping[str, Sequence[ShownRow]],
    scores: LabelScores | None,
    judged: JudgeScores | None = None,
) -> list[Check]:
    """One check for each limit that the job sets.

    Dead letters are a fraction of all input rows, those of an incremental run that keep their result
    included. A replay has no such limit: whatever it rescues is a gain.

    Args:
        dead: examples of dead rows by reason, for the messages.
        scores: answers against the truth column, if there is one.
        judged: what the judge said, if there is one.
    """
    letters = [] if plan.replay_of else _dead_letters(plan.spec, account, dead)
    return [*letters, *check_accuracy(plan.spec, scores, "validation"), *_judge(plan.spec, judged)]


def check_accuracy(
    spec: JobSpec, scores: LabelScores | None, section: Literal["gate", "validation"]
) -> list[Check]:
    """The check of a section's `min_accuracy`, none if it has none.

    `gate` judges the pilot, a sample, so it also says between what the run's accuracy may be.
    """
    limit, field = getattr(spec, section).min_accuracy, f"{section}.min_accuracy"
    if limit is None:
        return []
    if scores is None:
        observed = "no row has both an answer and a true label"
    else:
        observed = f"{scores.accuracy:.1%} ({scores.correct:,} of {scores.rows:,} rows"
        if section == "gate":
            low, high = wilson(scores.correct, scores.rows)
            observed += f"; {low:.0%} to {high:.0%} in the run"
        observed += ")"
    check = Check(
        name=f"accuracy against `{spec.input.truth}`",
        kind=field,
        origin="limit",
        success=scores is not None and scores.accuracy >= limit,
        observed=observed,
        required=f"at least {limit:.1%} (`{field}`)",
        checked=scores.rows if scores else 0,
        unexpected=scores.rows - scores.correct if scores else None,
    )
    return [check]


def _dead_letters(spec: JobSpec, account: Account, dead: Mapping[str, Sequence[ShownRow]]) -> Iterator[Check]:
    ledger, reasons = account.ledger, account.reasons
    rows = ledger.rows + ledger.kept_rows
    total = ledger.rows - account.succeeded
    worst = max(reasons, key=lambda r: reasons[r], default=None)
    mostly = f", mostly {worst} ({reasons[worst]:,})" if worst else ""
    yield _limit(
        "dead letters",
        "failure.max_dead_fraction",
        total,
        rows,
        spec.failure.max_dead_fraction,
        mostly,
        dead.get(worst or "", ()),
    )
    for reason, limit in spec.failure.max_dead_by_reason.items():
        yield _limit(
            f"dead letters: {reason}",
            f"failure.max_dead_by_reason.{reason}",
            reasons.get(reason, 0),
            rows,
            limit,
            "",
            dead.get(reason, ()),
        )


def _limit(
    name: str, field: str, count: int, rows: int, limit: float, mostly: str, rows_shown: Sequence[ShownRow]
) -> Check:
    fraction = count / rows if rows else 0.0
    return Check(
        name=name,
        kind=field,
        origin="limit",
        success=fraction <= limit,
        observed=f"{fraction:.1%} of rows ({count:,} of {rows:,}){mostly}",
        required=f"at most {limit:.1%} (`{field}`)",
        checked=rows,
        unexpected=count,
        examples=[
            {"row_id": row.row_id, "custom_id": row.custom_id, "message": cut(row.message or "", 300)}
            for row in rows_shown[:_EXAMPLES]
        ],
    )


def _judge(spec: JobSpec, judged: JudgeScores | None) -> Iterator[Check]:
    limit = spec.gate.min_judge_pass
    if limit is None or judged is None:
        return
    yield Check(
        name="answers that pass the judge",
        kind="gate.min_judge_pass",
        origin="limit",
        success=judged.judged > 0 and judged.passed / judged.judged >= limit,
        observed=judged.sentence(),
        required=f"at least {limit:.1%} (`gate.min_judge_pass`)",
        checked=judged.judged,
        unexpected=judged.judged - judged.passed,
        examples=[
            {"row_id": row.row_id, "judge": cut(row.output or "", 300)} for row in judged.failed[:_EXAMPLES]
        ],
    )
