"""`PrepareJudgeOperator`: draw the answers that the job's judge scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_batchinfer.operators.base import RunOperator
from airflow_batchinfer.operators.bundle import Bundle, bundles_of, max_mapped_tasks

if TYPE_CHECKING:
    from airflow.sdk import Context


class PrepareJudgeOperator(RunOperator):
    """Plan the judge's run over a sample of the answers; return its bundles for the judge's infer task.

    Clearing it gives the same plan again, as long as rubric and answers are the same. A job without a
    judge gets no bundle, and the judge's task is skipped.
    """

    def execute(self, context: Context) -> list[Bundle]:
        """Plan it. Raises `StaleLedgerError`, `CorruptError`, `StoreError`."""
        from airflow_batchinfer.pipeline.judge import prepare_judge
        from airflow_batchinfer.pipeline.split import load_plan

        store, folder = self.open_run(context)
        if load_plan(store, folder).spec.judge is None:
            self.log.info("the job has no judge")
            return []
        plan = prepare_judge(store, folder)
        self.log.info("%d answers go to the judge; plan: %s", plan.rows, store.uri_of(plan.folder))
        return bundles_of(store, plan, max_mapped_tasks())
