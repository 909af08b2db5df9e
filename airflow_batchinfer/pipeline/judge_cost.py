"""What a run's judge cost, apart from what the run itself cost."""

from __future__ import annotations

from pydantic import Field

from airflow_batchinfer.pipeline.attempts import attempts_of
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
    attempts = [
        attempt
        for run in asked
        for planned in run.shards
        for attempt in attempts_of(store, RunLayout(run.folder), planned.shard)
    ]
    tokens = Tokens(
        prompt=sum(a.tokens.prompt for a in attempts),
        output=sum(a.tokens.output for a in attempts),
        cached=sum(a.tokens.cached for a in attempts),
    )
    held = sum(a.held_seconds for a in attempts)
    prices = plan.spec.cost
    cost = money(prices, tokens, held) if prices else None
    return JudgeCost(runs=len(asked), tokens=tokens, held_seconds=held, cost=cost)
