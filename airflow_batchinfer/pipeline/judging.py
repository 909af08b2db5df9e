"""The judge's job: what a second model is asked about an answer, and what its reply says."""

from __future__ import annotations

import json

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.prompts.template import PromptTemplate
from airflow_batchinfer.spec import ChoiceTask, InputSpec, JobSpec, JudgeSpec, LineSpec, ShardingSpec

_LARGEST_SCORE = 1e100
"""Beyond it, squares of scores overflow when their variance is taken."""


def judge_job(spec: JobSpec, judge: JudgeSpec) -> JobSpec:
    """The job that a worker runs to judge answers of `spec`'s; its input is made from them."""
    return JobSpec(
        name=spec.name,
        store=spec.store,
        storage_options=spec.storage_options,
        input=InputSpec(path="(answers of the run)"),
        prompt=judge.prompt,
        model=judge.model or spec.model,
        task=judge.task,
        sampling=judge.sampling,
        sharding=ShardingSpec(max_rows=judge.rows, dedup=False),
        checkpoint=spec.checkpoint,
        retry=spec.retry,
        # Rows that the judge cannot judge are told, and are no reason to stop it.
        line=LineSpec(max_dead=None),
    )


def judge_columns(spec: JobSpec) -> list[str]:
    """Columns that the judge's templates may read: the prompt's, the carried ones, the answer."""
    return list(dict.fromkeys([*PromptTemplate(spec.prompt).columns, *spec.carried, spec.output.column]))


def check_judge(spec: JobSpec) -> None:
    """Refuse a judge that could not work.

    Raises:
        SpecError: its template is no template, or reads a column that it does not get.
    """
    if spec.judge is None:
        return
    prompt, out = PromptTemplate(spec.prompt), spec.output.column
    if out in [*prompt.columns, *spec.carried]:
        raise SpecError(
            f"judge: the input has a column `{out}`, so its prompt cannot tell it from the answer: set "
            "`output.column`"
        )
    try:
        asked = PromptTemplate(spec.judge.prompt).columns
    except SpecError as error:
        raise SpecError(f"judge.{error}") from error
    have = judge_columns(spec)
    for column in asked:
        if column not in have:
            raise SpecError(
                f"judge.prompt: reads the column `{column}`, which the judge does not get; it gets "
                f"{', '.join(have)} (to show it another input column, name it in `input.carry`)"
            )
    if out not in asked:
        raise SpecError(f"judge.prompt: does not read the answer; write `{{{{ {out} }}}}`")


def score_of(judge: JudgeSpec, reply: str) -> float | None:
    """A judge's reply as a number: 1 or 0 for a label that passes or not; none if it holds no score.

    JSON's `1e999` is read as infinity, and an integer may have hundreds of digits: no scores either.
    """
    if isinstance(judge.task, ChoiceTask):
        return float(reply in judge.passing)
    try:
        value = json.loads(reply).get(judge.score)
    except (ValueError, AttributeError):
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if abs(value) <= _LARGEST_SCORE else None


def passes(judge: JudgeSpec, score: float) -> bool:
    """Whether a row with this score passes."""
    return score >= (1.0 if judge.min_score is None else judge.min_score)
