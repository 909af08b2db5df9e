"""Commits: the proof that a shard is complete, and the rule by which readers choose one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from pydantic import Field, model_validator

from airflow_batchinfer.errors import CorruptError
from airflow_batchinfer.run.document import Document, FormatVersion, Timestamp
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.store import Store


class CommittedPart(Document):
    """One part a commit names. Readers take a row from the first part in the list that has it."""

    key: str
    rows: int
    bytes: int
    sha256: str


class Tokens(Document):
    """What an engine was paid, summed over all attempts at all rows."""

    prompt: int = 0
    output: int = 0
    cached: int = 0

    @property
    def total(self) -> int:
        """Prompt and output tokens; cached ones are among the prompt's."""
        return self.prompt + self.output

    @classmethod
    def summed(cls, several: Iterable[Tokens]) -> Self:
        """All of them together."""
        listed = list(several)
        return cls(
            prompt=sum(tokens.prompt for tokens in listed),
            output=sum(tokens.output for tokens in listed),
            cached=sum(tokens.cached for tokens in listed),
        )


class Commit(Document):
    """Written once, last, by one attempt: its parts together hold every sent row of the shard.

    `counts` and `reasons` count *input* rows (a sent row and its copies), by outcome and by reason, so
    that `sum(counts.values()) == rows`. `tokens` counts what was paid for, once a sent row.
    """

    format_version: FormatVersion = 1
    shard: int
    epoch: str
    fingerprint: str
    created_at: Timestamp
    rows_sha256: str = Field(description="Of the rows file it answers; equals the plan's.")
    rows: int
    sent: int
    counts: dict[str, int]
    reasons: dict[str, int]
    tokens: Tokens
    parts: list[CommittedPart]
    overlapping_rows: int = Field(0, description="Rows that stand in more than one of the parts.")
    attempts: int = Field(1, description="Attempts whose parts it names, its own included.")
    held_seconds: float = Field(0.0, description="Process seconds of this attempt, start to commit.")
    engine: dict[str, str] = Field(default_factory=dict, description="Engine name, version, options.")

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        """A commit is a proof: one whose own sums differ is none, whoever wrote it."""
        in_parts = sum(part.rows for part in self.parts) - self.overlapping_rows
        if in_parts != self.sent:
            raise ValueError(f"its parts hold {in_parts} rows, the shard sends {self.sent}")
        if sum(self.counts.values()) != self.rows:
            raise ValueError(
                f"its counts add up to {sum(self.counts.values())}, the shard has {self.rows} rows"
            )
        return self


def commits_of(store: Store, layout: RunLayout, shard: int) -> tuple[list[Commit], list[str]]:
    """All readable commits of a shard by epoch, and a message for each damaged one.

    Raises:
        ReleaseError: one is another release's. Taken for none, its rows would be paid for again.
    """
    commits: list[Commit] = []
    damaged: list[str] = []
    for info in store.list(layout.shard(shard)):
        if not info.key.endswith("/commit.json"):
            continue
        try:
            commits.append(Commit.read(store, info.key))
        except FileNotFoundError:  # withdrawn since it was listed
            continue
        except CorruptError as error:
            damaged.append(str(error))
    return sorted(commits, key=lambda c: c.epoch), damaged


def chosen_commit(store: Store, layout: RunLayout, shard: int, fingerprint: str) -> Commit | None:
    """The shard's commit for every reader: of those with the plan's fingerprint, the lowest epoch."""
    commits, _ = commits_of(store, layout, shard)
    return next((c for c in commits if c.fingerprint == fingerprint), None)
