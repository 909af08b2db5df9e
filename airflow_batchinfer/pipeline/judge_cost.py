"""What a run's judge cost, apart from what the run itself cost."""

from __future__ import annotations

from pydantic import Field

from airflow_batchinfer.pipeline.attempts import spent_on
from airflow_batchinfer.pipeline.forecast import money
from airflow_batchinfer.run.commit import Tokens
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store


class JudgeCost(Document):
    """All that the judge was paid: every attempt, earlier rubrics and replaced answers included."""

    runs: int = Field(description="The judge's runs: one a rubric and state of the answers.")
    tokens: Tokens
    held_seconds: float = Field(description="Time that its workers held accelerators.")
    cost: float | None = Field(None, description="Money, at the job's prices; none if it has none.")


def judge_cost(store: Store, plan: Plan) -> JudgeCost | None:
    """What the judge of the run has cost so far; none if it never had one.

    Raises:
        CorruptError: a plan of the judge is damaged.
    """
    judges = RunLayout(plan.folder).judges
    asked = [Plan.read(store, i.key) for i in store.list(judges) if i.key.endswith("/plan.json")]
    if not asked:
        return None
    spent, prices = spent_on(store, asked), plan.spec.cost
    cost = money(prices, spent.tokens, spent.held_seconds) if prices else None
    return JudgeCost(runs=len(asked), tokens=spent.tokens, held_seconds=spent.held_seconds, cost=cost)
