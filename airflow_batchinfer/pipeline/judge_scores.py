"""What the judge said of a sample of a run's answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from airflow_batchinfer.errors import IncompleteRunError
from airflow_batchinfer.outcome import Outcome
from airflow_batchinfer.pipeline.answers import ShardAnswers, shards_of
from airflow_batchinfer.pipeline.judging import passes, score_of
from airflow_batchinfer.pipeline.quarantine import Quarantine, quarantined_rows
from airflow_batchinfer.pipeline.sampling import sample
from airflow_batchinfer.pipeline.shown import ShownRow, show_rows
from airflow_batchinfer.pipeline.statistics import mean_interval, wilson
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.shard import ROW_ID
from airflow_batchinfer.spec import ChoiceTask, JudgeSpec
from airflow_batchinfer.store import Store

_SHOWN = 5

NO_SCORE = "no_score"
"""Why a row is not judged: the reply fits the schema and holds no number, or one too large to be a score."""


class JudgeScores(Document):
    """The judge's result. Rows that it did not judge are in no share."""

    folder: str = Field(description="The judge's run.")
    model: str
    sampled: int = Field(description="Answers shown to it, but those that validation took out since.")
    judged: int
    passed: int
    low: float = Field(description="Lower end of Wilson's 95 % interval of the share that passes.")
    high: float
    mean: float | None = Field(None, description="`json`: mean score.")
    mean_low: float | None = Field(None, description="Lower end of its 95 % interval.")
    mean_high: float | None = None
    not_judged: dict[str, int] = Field(description="By reason.")
    tokens: int = Field(description="Prompt and output tokens of these answers; `JudgeCost` has all.")
    failed: list[ShownRow] = Field(description="Some that do not pass: what it was asked, what it said.")

    def sentence(self) -> str:
        """The result in words."""
        unread = sum(self.not_judged.values())
        why = ", ".join(f"{reason} {n:,}" for reason, n in self.not_judged.items())
        left = f"; {unread:,} of {self.sampled:,} sampled were not judged ({why})" if unread else ""
        if not self.judged:
            return f"no row was judged{left}"
        share = (
            f"{self.passed / self.judged:.1%} pass ({self.passed:,} of {self.judged:,} judged; 95 % likely "
            f"{self.low:.1%} to {self.high:.1%} in the run)"
        )
        if self.mean is not None:
            share += f", mean score {self.mean:.3g} ({self.mean_low:.3g} to {self.mean_high:.3g})"
        return share + left


def read_scores(store: Store, plan: Plan, judge: JudgeSpec, quarantine: Quarantine) -> JudgeScores:
    """Read what a judge's run answered.

    Args:
        store: the run's.
        plan: the judge's.
        judge: the judge.
        quarantine: what validation took out of the judged run's results; not counted.

    Raises:
        IncompleteRunError: the judge is not done.
        CorruptError: a part cannot be read.
    """
    shards = list(shards_of(store, plan))
    for shard in shards:
        if shard.commit is None:
            raise IncompleteRunError(
                f"the judge is not done: shard {shard.planned.shard} of {plan.folder} has no commit; clear "
                "judge with its downstream tasks"
            )
    out = _quarantined(store, quarantine, shards)
    scores: list[float] = []
    unread: Counter[str] = Counter()
    tokens, failed = 0, 0
    bad: list[tuple[ShardAnswers, list[int]]] = []
    for shard in shards:
        rows = shard.answers(["outcome", "reason", "output", "prompt_tokens", "output_tokens"]).to_pylist()
        tokens += sum(r["prompt_tokens"] + r["output_tokens"] for r in rows)
        wrong = []
        for row in rows:
            if row[ROW_ID] in out:
                continue
            if row["outcome"] != Outcome.SUCCEEDED:
                unread[row["reason"]] += 1
            elif (score := score_of(judge, row["output"])) is None:
                unread[NO_SCORE] += 1
            else:
                scores.append(score)
                if not passes(judge, score):
                    wrong.append(row[ROW_ID])
        failed += len(wrong)
        bad.append((shard, wrong))
    passed = len(scores) - failed
    low, high = wilson(passed, len(scores))
    numeric = bool(scores) and not isinstance(judge.task, ChoiceTask)
    mean, mean_low, mean_high = mean_interval(scores) if numeric else (None, None, None)
    return JudgeScores(
        folder=plan.folder,
        model=plan.spec.model.name,
        sampled=len(scores) + unread.total(),
        judged=len(scores),
        passed=passed,
        low=low,
        high=high,
        mean=mean,
        mean_low=mean_low,
        mean_high=mean_high,
        not_judged=dict(sorted(unread.items())),
        tokens=tokens,
        failed=_shown(bad, judge.seed),
    )


def _quarantined(store: Store, quarantine: Quarantine, shards: Sequence[ShardAnswers]) -> set[int]:
    """Which of the judged rows are quarantined."""
    judged = [shard.sent([ROW_ID])[ROW_ID].combine_chunks() for shard in shards]
    asked = pa.concat_arrays(judged) if judged else pa.array([], pa.int64())
    found: set[int] = set()
    for line in quarantine.shards:
        ids = quarantined_rows(store, line)[ROW_ID]
        found.update(ids.filter(pc.is_in(ids, value_set=asked)).to_pylist())
    return found


def _shown(bad: list[tuple[ShardAnswers, list[int]]], seed: int) -> list[ShownRow]:
    rows: list[ShownRow] = []
    for shard, ids in bad:
        chosen = sample(np.sort(np.array(ids, np.int64)), _SHOWN - len(rows), seed)
        rows += show_rows(shard, chosen) if len(chosen) else []
    return rows
