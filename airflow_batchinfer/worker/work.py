"""The worker's units: a row on its way, its requests, and the shard run that it counts for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from airflow_batchinfer.errors import CorruptError
from airflow_batchinfer.outcome import Reason, outcome_of
from airflow_batchinfer.prompts.builder import Prepared, Prompt
from airflow_batchinfer.run.commit import Tokens
from airflow_batchinfer.run.plan import PlannedShard
from airflow_batchinfer.worker.resume import Resumed

DEATHS_TO_ISOLATE = 2
"""Deaths after which a row runs apart from others; a single one may be a node that went away."""

DEATHS_ALONE = 2
"""Deaths that convict a row, it alone in the engine. One may have come from outside just then."""


class Result(NamedTuple):
    """A row with its outcome: one line of a part, in the order of `PART_SCHEMA`."""

    row_id: int
    outcome: str
    reason: str | None
    message: str | None
    output: str | None
    vector: list[float] | None
    finish_reason: str | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    attempts: int
    finished_at: int
    """Unix time in milliseconds."""


@dataclass(slots=True, eq=False)
class Row:
    """A row that has no outcome yet."""

    shard: ShardRun
    row_id: int
    weight: int
    """Input rows that take its answer, itself included."""
    prepared: Prepared
    deaths: int = 0
    """How often an engine or a worker died while it was in flight."""
    announced: int = 0
    """Number of the announcement that named it as in flight; 0: none."""
    requests: list[Piece] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)
    missing: int = 0
    """Requests that have no accepted answer."""
    finished: bool = False
    cut_off: bool = False
    """Whether one of its answers was ended by `max_tokens`."""
    attempts: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    def begin(self) -> list[Piece]:
        """Make its requests; called once."""
        prompts = self.prepared.prompts
        self.missing = len(prompts)
        self.answers = [None] * len(prompts)
        self.requests = [Piece(self, index, prompt) for index, prompt in enumerate(prompts)]
        return self.requests


@dataclass(slots=True, eq=False)
class Piece:
    """One request of a row; rows that were split into windows have several."""

    row: Row
    index: int
    prompt: Prompt
    key: str = ""
    """Name of the request in flight: row, piece and try, so that a late answer is told apart."""
    tries: int = 0
    invalid: int = 0
    errors: int = 0
    number: int = 0
    """Its place among all requests that were submitted."""
    running_since: float | None = None
    """Monotonic time by which it had surely left the engine's queue; none while that is not known."""


@dataclass(slots=True, eq=False)
class ShardRun:
    """This attempt at one shard: what is done, what is durable, what was paid."""

    planned: PlannedShard
    epoch: str
    resumed: Resumed = field(default_factory=Resumed)
    read_all: bool = False
    done: int = 0
    durable: int = 0
    started: bool = False
    """Whether its earlier parts were looked up, so that its numbers mean something."""
    committed: bool = False
    overtaken: bool = False
    """Whether another attempt has committed it, so that nothing of it may be paid for any more."""
    counts: Counter[str] = field(default_factory=Counter)
    """Input rows by outcome."""
    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Tokens paid by this attempt."""
    buffer: list[Result] = field(default_factory=list)
    """Results that are in no part yet."""
    parts_begun: int = 0
    last_flush: float = 0.0

    @property
    def shard(self) -> int:
        """The shard's number."""
        return self.planned.shard

    @property
    def complete(self) -> bool:
        """Whether every row has an outcome."""
        return self.read_all and self.done == self.planned.sent

    @property
    def paid(self) -> Tokens:
        """Tokens paid by this attempt."""
        return Tokens(prompt=self.prompt_tokens, output=self.output_tokens, cached=self.cached_tokens)

    def take(self, resumed: Resumed) -> None:
        """Begin with what earlier attempts did."""
        self.resumed = resumed
        self.done = self.durable = len(resumed.done)
        self.started = True

    def count(self, reason: Reason | None, weight: int) -> None:
        """Count an outcome for `weight` input rows."""
        self.counts[outcome_of(reason).value] += weight
        if reason is not None:
            self.reasons[reason.value] += weight

    def record(self, result: Result, reason: Reason | None, weight: int) -> None:
        """Take a row's outcome."""
        self.count(reason, weight)
        self.prompt_tokens += result.prompt_tokens
        self.output_tokens += result.output_tokens
        self.cached_tokens += result.cached_tokens
        self.done += 1
        self.buffer.append(result)

    def check(self) -> None:
        """Prove that the sums agree with the plan.

        Raises:
            CorruptError: they do not; names both.
        """
        total = sum(self.counts.values())
        if total != self.planned.rows or self.done != self.planned.sent:
            raise CorruptError(
                f"shard {self.shard}: {self.done} rows with an outcome stand for {total} input rows, and the "
                f"plan says {self.planned.sent} and {self.planned.rows}; nothing was committed"
            )


def result_of(row: Row, reason: Reason | None, at: int, **values: Any) -> Result:
    """A row's line in its part."""
    return Result(
        row_id=row.row_id,
        outcome=outcome_of(reason).value,
        reason=None if reason is None else reason.value,
        message=values.get("message"),
        output=values.get("output"),
        vector=values.get("vector"),
        finish_reason=values.get("finish_reason"),
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        cached_tokens=row.cached_tokens,
        attempts=row.attempts,
        finished_at=at,
    )
