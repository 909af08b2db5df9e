"""The ledger: reconcile's certificate that every input row has exactly one outcome."""

from __future__ import annotations

from pydantic import Field

from airflow_batchinfer.run.commit import Tokens
from airflow_batchinfer.run.document import Document, FormatVersion, Timestamp


class LedgerShard(Document):
    """One shard's line: which commit was read, and what it adds up to (input rows)."""

    shard: int
    rows: int
    sent: int
    epoch: str | None = Field(None, description="Epoch of the chosen commit; none if there is none.")
    commit_sha256: str | None = None
    counts: dict[str, int]
    reasons: dict[str, int] = Field(default_factory=dict)
    tokens: Tokens = Field(default_factory=Tokens)
    duplicates_resolved: int = Field(0, description="Rows that stand in two parts; the first counts.")
    dedup_tokens: int = Field(0, description="Tokens that copies would have cost.")
    other_commits: int = Field(0, description="Complete commits that the rule did not choose.")


class Ledger(Document):
    """A run's account. `complete` only if each shard has a commit and all sums agree."""

    format_version: FormatVersion = 1
    job: str
    run_id: str
    generation: int
    fingerprint: str
    plan_sha256: str
    created_at: Timestamp
    complete: bool
    rows: int = Field(description="Input rows that the run answers: those of its shards.")
    kept_rows: int = Field(0, description="Input rows that keep an earlier result (incremental runs).")
    counts: dict[str, int] = Field(description="By outcome; adds up to `rows`.")
    reasons: dict[str, int]
    tokens: Tokens
    dedup_rows: int = Field(0, description="Rows answered by another row's answer.")
    dedup_tokens: int = Field(0, description="Tokens that those rows would have cost.")
    problems: list[str] = Field(default_factory=list, description="Why it is not complete.")
    shards: list[LedgerShard]
