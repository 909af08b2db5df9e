"""Answers against a truth column: accuracy, precision and recall by label, the confusion matrix."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from airflow_batchinfer.outcome import Outcome
from airflow_batchinfer.pipeline.answers import ShardAnswers, struct_field
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.shard import CARRY
from airflow_batchinfer.spec import ChoiceTask, JobSpec

OTHER = "(other)"
"""Stands for true labels that are none of the task's."""


class LabelScore(Document):
    """One label, judged on the rows that have an answer and a true label."""

    label: str
    support: int = Field(description="Rows whose true label it is.")
    answered: int = Field(description="Rows that got it as their answer.")
    precision: float | None = Field(description="Of those answered so, how many are; none if none were.")
    recall: float | None = Field(description="Of those that are, how many were answered so.")
    f1: float | None


class LabelScores(Document):
    """How well a `choice` job answered, on all rows that succeeded and have a true label."""

    truth: str = Field(description="The column with the true labels.")
    rows: int = Field(description="Rows that have an answer and a true label.")
    correct: int
    accuracy: float
    macro_f1: float | None = Field(description="Mean of F1 over labels that occur.")
    unanswered: int = Field(description="Rows with a true label that have no answer: not judged.")
    labels: list[str] = Field(description="Rows and columns of `matrix`.")
    matrix: list[list[int]] = Field(description="`matrix[i][j]`: true label i, answer j.")
    scores: list[LabelScore]


class LabelCounter:
    """Counts pairs of true label and answer while shards go by."""

    def __init__(self, spec: JobSpec) -> None:
        self._truth = spec.input.truth
        self._labels = list(spec.task.labels) if isinstance(spec.task, ChoiceTask) else []
        self._pairs: dict[tuple[str, str], int] = {}
        self._unanswered = 0

    @property
    def wanted(self) -> bool:
        """Whether the job has labels and a truth column."""
        return self._truth is not None and bool(self._labels)

    def see(self, shard: ShardAnswers) -> None:
        """Count one shard's input rows. Raises `CorruptError`."""
        if self._truth is None or not self._labels:
            return
        rows = shard.input_rows(["outcome", "output"], [self._truth])
        truth = pc.cast(struct_field(rows[CARRY], self._truth), pa.string())
        table = pa.table({"outcome": rows["outcome"], "answer": rows["output"], "truth": truth})
        table = table.filter(pc.is_valid(table["truth"]))
        good = pc.equal(table["outcome"], Outcome.SUCCEEDED.value)
        self._unanswered += table.num_rows - (pc.sum(good).as_py() or 0)
        counted = table.filter(good).group_by(["truth", "answer"]).aggregate([([], "count_all")])
        for line in counted.to_pylist():
            true = line["truth"] if line["truth"] in self._labels else OTHER
            pair = (true, line["answer"])
            self._pairs[pair] = self._pairs.get(pair, 0) + line["count_all"]

    def scores(self) -> LabelScores | None:
        """The scores; none if the job has no labels, or no row has both answer and truth."""
        rows = sum(self._pairs.values())
        if self._truth is None or rows == 0:
            return None
        names = [*self._labels, *([OTHER] if any(true == OTHER for true, _ in self._pairs) else [])]
        matrix = [[self._pairs.get((true, answer), 0) for answer in names] for true in names]
        scores = [_score(name, i, matrix) for i, name in enumerate(names) if name != OTHER]
        correct = sum(matrix[i][i] for i in range(len(self._labels)))
        f1s = [s.f1 or 0.0 for s in scores if s.support or s.answered]
        return LabelScores(
            truth=self._truth,
            rows=rows,
            correct=correct,
            accuracy=correct / rows,
            macro_f1=sum(f1s) / len(f1s) if f1s else None,
            unanswered=self._unanswered,
            labels=names,
            matrix=matrix,
            scores=scores,
        )


def _score(label: str, index: int, matrix: list[list[int]]) -> LabelScore:
    hits = matrix[index][index]
    support = sum(matrix[index])
    answered = sum(line[index] for line in matrix)
    precision = hits / answered if answered else None
    recall = hits / support if support else None
    f1 = 2 * hits / (support + answered) if support + answered else None
    return LabelScore(
        label=label, support=support, answered=answered, precision=precision, recall=recall, f1=f1
    )
