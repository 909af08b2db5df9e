"""A run's status, read from its plan, commits and progress files while it runs or afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_batchinfer.run.commit import Commit, chosen_commit
from airflow_batchinfer.run.layout import RunLayout, runs_dir
from airflow_batchinfer.run.plan import Plan, PlannedShard
from airflow_batchinfer.run.progress import Progress, latest_progress
from airflow_batchinfer.store import ObjectInfo, Store


@dataclass(frozen=True)
class ShardStatus:
    """One shard: what was planned, and how far its attempts have come."""

    planned: PlannedShard
    commit: Commit | None
    progress: Progress | None

    @property
    def state(self) -> str:
        """`committed`, `waiting` (no attempt yet), or the last attempt's own state."""
        if self.commit is not None:
            return "committed"
        return self.progress.state if self.progress else "waiting"

    @property
    def rows_done(self) -> int:
        """Input rows with an outcome; before the commit, copies of other rows are not counted."""
        if self.commit is not None:
            return self.commit.rows
        return self.progress.done if self.progress else 0

    def line(self) -> str:
        """One line for a person."""
        if self.commit is None and self.progress is not None:
            return self.progress.line()
        return f"shard {self.planned.shard:04d} {self.state}: {self.rows_done}/{self.planned.rows} rows"


@dataclass(frozen=True)
class RunStatus:
    """All shards of a run. Rates are sums over the attempts that are at work."""

    plan: Plan
    shards: list[ShardStatus]

    @property
    def shards_done(self) -> int:
        """Shards with a commit."""
        return sum(s.commit is not None for s in self.shards)

    @property
    def rows_done(self) -> int:
        """Input rows with an outcome."""
        return sum(s.rows_done for s in self.shards)

    @property
    def rows_per_second(self) -> float:
        """Over the last minute of each attempt at work."""
        return sum(p.rows_per_second for p in self._at_work())

    @property
    def tokens_per_second(self) -> float:
        """Prompt and output, over the last minute of each attempt at work."""
        return sum(p.tokens_per_second for p in self._at_work())

    @property
    def seconds_left(self) -> float | None:
        """At the present rate; none while no engine makes tokens: rejected rows tell nothing."""
        rate = self.rows_per_second if self.tokens_per_second > 0 else 0.0
        return (self.plan.rows - self.rows_done) / rate if rate > 0 else None

    @property
    def counts(self) -> dict[str, int]:
        """Input rows by outcome, of the committed shards."""
        total: dict[str, int] = {}
        for shard in self.shards:
            for outcome, rows in (shard.commit.counts if shard.commit else {}).items():
                total[outcome] = total.get(outcome, 0) + rows
        return total

    def _at_work(self) -> list[Progress]:
        return [
            s.progress
            for s in self.shards
            if s.commit is None
            and s.progress
            and s.progress.state in ("running", "draining")
            and not s.progress.is_silent(self.plan.spec.checkpoint.progress_seconds)
        ]


def run_status(store: Store, folder: str) -> RunStatus:
    """Read a run's status.

    Raises:
        FileNotFoundError: the folder has no plan.
        StoreError, UnreadableError: it cannot be read.
    """
    return status_of(store, Plan.read(store, RunLayout(folder).plan))


def status_of(store: Store, plan: Plan) -> RunStatus:
    """The status of a plan's run: reads what each shard's attempts left. Raises as `run_status`."""
    layout = RunLayout(plan.folder)
    return RunStatus(plan, [_shard_status(store, layout, plan, shard) for shard in plan.shards])


def _shard_status(store: Store, layout: RunLayout, plan: Plan, planned: PlannedShard) -> ShardStatus:
    commit = chosen_commit(store, layout, planned.shard, plan.fingerprint)
    progress = None if commit else latest_progress(store, layout, planned.shard)
    return ShardStatus(planned, commit, progress)


def plan_objects(store: Store, job: str) -> list[ObjectInfo]:
    """Where the plans of a job's runs stand, all generations. Raises `StoreError`."""
    found = (store.info(RunLayout(folder).plan) for folder in store.folders(runs_dir(job)))
    return [info for info in found if info is not None]
