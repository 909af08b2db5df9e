"""The report's content, as stored in `report.json`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from airflow_batchinfer.pipeline.eyes import Review
from airflow_batchinfer.pipeline.judge_cost import JudgeCost
from airflow_batchinfer.pipeline.pilot import PilotVerdict
from airflow_batchinfer.pipeline.profile import Profile
from airflow_batchinfer.pipeline.shown import ShownRow
from airflow_batchinfer.pipeline.verdict import Verdict
from airflow_batchinfer.run.commit import Tokens
from airflow_batchinfer.run.document import Document, FormatVersion, Timestamp
from airflow_batchinfer.run.stop import Stop


class Stage(Document):
    """One step of the pipeline, in seconds since the plan was written."""

    name: str
    start: float
    end: float


class ShardLine(Document):
    """One shard: its work and what it took."""

    shard: int
    state: str = Field(description="`committed`, or the state of its newest attempt, or `not started`.")
    message: str = ""
    rows: int
    sent: int
    dead: int
    tokens: int = Field(description="Prompt and output tokens of its durable rows.")
    predicted_tokens: int
    attempts: int
    reclaims: int
    engine_restarts: int
    held_seconds: float
    start: float | None = Field(None, description="First worker, in seconds since the plan was written.")
    end: float | None = Field(None, description="Commit or last sign of life, the same.")


class Throughput(Document):
    """Rates over the time that workers ran, and over the time that they held accelerators."""

    wall_seconds: float = Field(0.0, description="First worker's start to the last commit.")
    held_seconds: float = Field(0.0, description="Summed over all attempts, failed ones included.")
    rows_per_second: float = Field(0.0, description="Input rows with an outcome, by wall time.")
    tokens_per_second: float = Field(0.0, description="Prompt and output tokens, by wall time.")
    accepted_rows_per_held_second: float = Field(0.0, description="Rows that succeeded, by held time.")


class Report(Document):
    """One run, told from its store. Counts are of input rows unless they say otherwise."""

    format_version: FormatVersion = 1
    job: str
    run_id: str
    generation: int
    folder: str
    fingerprint: str
    created_at: Timestamp
    status: Literal["published", "held", "not published", "stopped", "incomplete"]
    headline: str = Field(description="The run in one sentence.")
    problems: list[str]
    warnings: list[str]
    ledger_sha256: str | None = Field(description="Digest of the ledger it was written from.")
    quarantine_sha256: str | None = Field(description="Digest of what validation took out of the results.")
    model: str
    engine: dict[str, str]
    task: str
    rows: int
    counts: dict[str, int] = Field(description="By outcome, `unprocessed` included: adds up to `rows`.")
    reasons: dict[str, int]
    tokens: Tokens = Field(description="Paid for the rows that have an outcome.")
    tokens_lost: int = Field(description="Paid by attempts for rows that never became durable.")
    tokens_saved: int = Field(description="Not paid because copies took another row's answer.")
    dedup_rows: int
    kept_rows: int = Field(0, description="Incremental runs: rows that keep an earlier result.")
    changes: dict[str, int] = Field(default_factory=dict, description="Incremental runs: why rows ran.")
    replay_of: str | None = Field(None, description="Replays: the run that is repaired.")
    throughput: Throughput
    stages: list[Stage]
    shards: list[ShardLine]
    profile: Profile
    verdict: Verdict | None
    pilot: PilotVerdict | None = None
    stop: Stop | None = None
    cost: float | None = Field(
        None, description="Money spent, at the job's prices, on lost tokens too; without the judge."
    )
    currency: str = ""
    judge: JudgeCost | None = Field(None, description="What the judge cost: in no other figure here.")
    review: Review | None = Field(None, description="What a person found on the sample.")
    samples: list[ShownRow]
    dead_letters: dict[str, list[ShownRow]] = Field(description="Examples by reason.")
    places: dict[str, str] = Field(description="Where tables and files are.")
