"""One mapped task's work, whatever its runtime: what is left to do, and what a worker's end means."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Iterator
from typing import Self

from airflow_batchinfer.errors import (
    BatchInferError,
    EngineError,
    ExitCode,
    GateError,
    InputError,
    PlanChangedError,
    ReleaseError,
    SpecError,
    StoreError,
    WorkerLostError,
)
from airflow_batchinfer.operators.bundle import Bundle
from airflow_batchinfer.run.commit import Commit, chosen_commit
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.progress import latest_progress
from airflow_batchinfer.store import Store, open_store

MESSAGE_PREFIX = "batchinfer: "
"""A failing worker's last line of output starts with it; the rest is the message."""

_ERRORS: dict[int, type[BatchInferError]] = {
    ExitCode.BAD_SPEC: SpecError,
    ExitCode.BAD_INPUT: InputError,
    ExitCode.ENGINE_FAILED: EngineError,
    ExitCode.STORE_FAILED: StoreError,
    ExitCode.STOPPED: GateError,
    ExitCode.OTHER_RELEASE: ReleaseError,
}


class ShardWork:
    """The shards of one bundle, seen through the store: plan, commits, progress."""

    def __init__(self, store: Store, plan: Plan, shards: list[int]) -> None:
        self.store = store
        self.plan = plan
        self.shards = shards
        self._layout = RunLayout(plan.folder)
        self._last_lines: dict[int, str] = {}

    @classmethod
    def open(cls, bundle: Bundle) -> Self:
        """Read the plan and check that it has the bundle's shards with the bundle's rows.

        Raises:
            PlanChangedError: it has not: the bundle comes from another split of this run.
            InputError: there is no plan.
            StoreError: it cannot be read.
        """
        store = open_store(bundle["store"], bundle["storage_options"])
        key = RunLayout(bundle["folder"]).plan
        try:
            plan = Plan.read(store, key)
        except FileNotFoundError as error:
            raise InputError(f"{store.uri_of(key)} is gone; clear split with downstream") from error
        rows = {s.shard: s.rows for s in plan.shards}
        shards = bundle["shards"]
        if not rows.keys() >= set(shards) or sum(rows[s] for s in shards) != bundle["rows"]:
            raise PlanChangedError(
                f"shards {shards} with {bundle['rows']} rows are not in the plan "
                f"{store.uri_of(key)}: this task comes from another split; clear split with downstream"
            )
        return cls(store, plan, shards)

    def identity(self) -> str:
        """16 hexadecimal digits that no other bundle has, whatever its store, run and plan: a run that was
        deleted and is split again has the folder that it had."""
        what = [self.store.uri, self.plan.folder, self.plan.epoch, self.shards]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    def commit(self, shard: int) -> Commit | None:
        """The commit that every reader chooses for a shard; none while it is incomplete."""
        return chosen_commit(self.store, self._layout, shard, self.plan.fingerprint)

    def open_shards(self) -> list[int]:
        """Shards of the bundle that have no commit yet."""
        return [shard for shard in self.shards if self.commit(shard) is None]

    def worker_arguments(self, shards: list[int]) -> list[str]:
        """Command-line arguments of a worker for these shards."""
        options = (f"{key}={value}" for key, value in sorted(self.store.options().items()))
        return [
            *("--store", self.store.uri),
            *(argument for option in options for argument in ("--store-option", option)),
            *("--folder", self.plan.folder),
            *("--shards", ",".join(map(str, shards))),
        ]

    def progress_news(self) -> Iterator[str]:
        """A line for each shard whose progress differs from what was last told. It never raises `StoreError`:
        news are for people, and a store that cannot be read for a while is no reason to end a worker."""
        for shard in self.shards:
            line = _or_its_error(shard, self._progress)
            if line is not None and self._last_lines.get(shard) != line:
                self._last_lines[shard] = line
                yield line

    def summary(self) -> Iterator[str]:
        """A line for each committed shard: its counts and tokens. It never raises `StoreError`."""
        for shard in self.shards:
            line = _or_its_error(shard, self._counts)
            if line is not None:
                yield line

    def _progress(self, shard: int) -> str | None:
        progress = latest_progress(self.store, self._layout, shard)
        return progress.line() if progress else None

    def _counts(self, shard: int) -> str | None:
        commit = self.commit(shard)
        if commit is None:
            return None
        counts = ", ".join(f"{n:,} {outcome}" for outcome, n in commit.counts.items() if n)
        return (
            f"shard {shard:04d} committed by {commit.epoch}: {counts} · "
            f"{commit.tokens.total:,} tokens · {commit.attempts} attempt(s)"
        )

    def check_committed(self) -> None:
        """Raise `WorkerLostError` unless each shard has a commit: a worker's word is no proof."""
        missing = self.open_shards()
        if missing:
            raise WorkerLostError(
                f"the worker reported success, but shard(s) {', '.join(map(str, missing))} have no commit in "
                f"{self.store.uri_of(self.plan.folder)}"
            )


def _or_its_error(shard: int, line_of: Callable[[int], str | None]) -> str | None:
    try:
        return line_of(shard)
    except StoreError as error:
        return f"shard {shard:04d}: nothing to tell for now: {error}"


def worker_error(code: int, message: str | None) -> BatchInferError:
    """The error that a worker's exit stands for, with the worker's own message.

    Args:
        code: exit status; negative for the signal that killed it, as `subprocess` gives it.
        message: what it said last, without `MESSAGE_PREFIX`; none if it could not say anything.
    """
    kind = _ERRORS.get(code)
    if kind is not None:
        return kind(message or f"the worker ended with {ExitCode(code).name} and no message")
    said = f"; it said last: {message}" if message else ""
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return WorkerLostError(f"the worker was killed by {name}{hint}{said}")
    return WorkerLostError(f"the worker ended with exit code {code}{said}")
