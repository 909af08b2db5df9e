"""What attempts at shards cost: read from progress files and commits, which outlive the workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from airflow_batchinfer.errors import UnreadableError
from airflow_batchinfer.run.commit import Commit, Tokens
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.progress import Progress
from airflow_batchinfer.store import Store


@dataclass(frozen=True)
class Attempt:
    """One attempt at one shard. `held_seconds` are seconds its process held the accelerator."""

    epoch: str
    state: str
    message: str
    held_seconds: float
    engine_restarts: int
    tokens: Tokens
    ended_at: str


def attempts_of(store: Store, layout: RunLayout, shard: int) -> list[Attempt]:
    """All attempts that left a readable trace, oldest first."""
    progress: dict[str, Progress] = {}
    commits: dict[str, Commit] = {}
    for info in store.list(layout.shard(shard)):
        epoch, _, name = info.key.removeprefix(layout.shard(shard) + "/").partition("/")
        try:
            if name == "progress.json":
                progress[epoch] = Progress.read(store, info.key)
            elif name == "commit.json":
                commits[epoch] = Commit.read(store, info.key)
        except (UnreadableError, FileNotFoundError):
            continue
    return [_attempt(e, progress.get(e), commits.get(e)) for e in sorted(progress.keys() | commits.keys())]


def paid_by(attempts: Iterable[Attempt], kept: Tokens) -> Tokens:
    """What attempts paid, for rows that no part holds too.

    At least `kept`, what the durable rows cost: a killed attempt may not have told of its last part.
    """
    paid = Tokens.summed(attempt.tokens for attempt in attempts)
    return paid if paid.total > kept.total else kept


@dataclass(frozen=True)
class Spent:
    """What all attempts at a run's shards have taken so far, failed ones included."""

    tokens: Tokens
    held_seconds: float


def spent_on(store: Store, plans: Iterable[Plan]) -> Spent:
    """What runs have taken so far, as far as it was told. Reads all progress files and commits."""
    attempts = [
        attempt
        for plan in plans
        for planned in plan.shards
        for attempt in attempts_of(store, RunLayout(plan.folder), planned.shard)
    ]
    return Spent(Tokens.summed(a.tokens for a in attempts), sum(a.held_seconds for a in attempts))


def _attempt(epoch: str, progress: Progress | None, commit: Commit | None) -> Attempt:
    if progress is None:
        assert commit is not None
        return Attempt(epoch, "committed", "", commit.held_seconds, 0, commit.tokens, commit.created_at)
    # A commit counts what its shard added to the process's time; progress only knows all of that time.
    held = commit.held_seconds if commit else progress.held_seconds
    return Attempt(
        epoch=epoch,
        state="committed" if commit else progress.state,
        message=progress.message,
        held_seconds=held,
        engine_restarts=progress.engine_restarts,
        tokens=progress.tokens,
        ended_at=commit.created_at if commit else progress.updated_at,
    )
