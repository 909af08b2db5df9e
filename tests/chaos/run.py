"""One run under fault: its store, the attempts at it, and what was paid."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from airflow_batchinfer.errors import ExitCode
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.progress import latest_progress
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import LocalStore, open_store
from tests.chaos.injection import Fault, note_strike
from tests.chaos.oracle import (
    Account,
    Files,
    LocalFiles,
    Published,
    durable_rows,
    paid_again,
    payments,
    published,
    verdict,
)
from tests.engines import answer_to
from tests.plans import job, plan_run

ROOT = Path(__file__).parents[2]
ROWS = 120
PART_ROWS = 20
WINDOW = 16
_ATTEMPT_SECONDS = 90.0

NO_FAULT = Fault()

STRIKES = "strikes"
"""File in a case's folder that gets a line whenever a fault strikes."""


def chaos_job(folder: Path, store: str | None = None, **overrides: Any) -> JobSpec:
    """A job whose engine notes what it is paid in `folder/paid.tsv`; `overrides` replace whole sections."""
    engine = {
        "paid_log": str(folder / "paid.tsv"),
        "max_in_flight": WINDOW,
        "delay_seconds": 0.002,
    } | overrides.pop("engine", {})
    fields: dict[str, Any] = {
        "model": {
            "name": "none",
            "backend": overrides.pop("backend", "tests.engines:FaultyEngine"),
            "engine": engine,
        },
        # No part is due by time, so that a shard has the same parts however slow the machine is.
        "checkpoint": {"rows": PART_ROWS, "seconds": 600.0, "grace_seconds": 5.0, "progress_seconds": 0.1},
        "sharding": {"dedup": False},
        "failure": {"max_dead_fraction": 1.0},
    }
    return job(store or folder / "store", **fields | overrides)


class ChaosRun:
    """A planned run of one shard in a store of its own."""

    def __init__(
        self,
        folder: Path,
        texts: Sequence[str] | None = None,
        *,
        store: str | None = None,
        files: Files | None = None,
        plan: Plan | None = None,
        **overrides: Any,
    ) -> None:
        """Plan it, unless there is a plan already.

        Args:
            folder: of the case.
            texts: of the rows; `ROWS` plain ones by default.
            store: URI; a folder of its own by default.
            files: the same for the oracle.
            plan: of this run, with `texts`.
            overrides: see `chaos_job`.
        """
        self.folder = folder
        self.paid_log = folder / "paid.tsv"
        spec = chaos_job(folder, store, **overrides) if plan is None else plan.spec
        self.texts = list(texts) if texts is not None else [f"row number {i}" for i in range(ROWS)]
        self.plan = plan_run(spec, [self.texts]) if plan is None else plan
        self.store = open_store(spec.store)
        self.layout = RunLayout(self.plan.folder)
        self.files = files or LocalFiles(self.store.uri)
        self.answers = {row: answer_to(spec, f"Answer: {text}") for row, text in enumerate(self.texts)}
        self.damaged: list[str] = []
        """Keys of what the case has damaged: to the oracle, it is not there."""

    def copied_to(self, folder: Path) -> ChaosRun:
        """The run as it stands, in a store of its own: many faults can strike at the same point."""
        twin = copy.copy(self)
        twin.folder = folder
        twin.store = LocalStore(shutil.copytree(self.store.uri, folder / "store"))
        twin.files = LocalFiles(twin.store.uri)
        twin.damaged = list(self.damaged)
        return twin

    def start(self, fault: Fault = NO_FAULT, what: str = "worker") -> subprocess.Popen[bytes]:
        """Start a victim."""
        where = (
            ["--store", self.store.uri, "--folder", self.plan.folder, "--shards", "0"]
            if what in ("worker", "task")
            else [self.store.uri, self.plan.folder, str(self.folder / "replay.tsv")]
        )
        return start_victim(self.folder, fault, what, where)

    def attempt(self, fault: Fault = NO_FAULT, what: str = "worker") -> int:
        """One victim from start to end, which the fault must strike; returns its exit status."""
        before = len(self.strikes())
        code = self.wait(self.start(fault, what))
        if fault != NO_FAULT:
            assert len(self.strikes()) > before, f"the fault never struck (exit {code})"
        return code

    def wait(self, process: subprocess.Popen[bytes], seconds: float = _ATTEMPT_SECONDS) -> int:
        """The exit status (negative: the signal); a process that hangs is killed, and fails the case."""
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"a process hung; its log: {self.folder / 'log.txt'}") from None

    def finish(self, limit: int = 1, fault: Fault = NO_FAULT) -> None:
        """Attempts until the shard is committed, one if nothing else is said."""
        for _ in range(limit):
            if self.attempt(fault) == ExitCode.COMMITTED:
                return
        raise AssertionError(f"no commit after {limit} attempts; log: {self.folder / 'log.txt'}")

    def strike(self, what: str) -> None:
        """Note a fault that the case itself makes."""
        note_strike(self.folder / STRIKES, what)

    def strikes(self) -> list[str]:
        """What has struck so far."""
        path = self.folder / STRIKES
        return path.read_text().splitlines() if path.exists() else []

    def log(self) -> str:
        """What the victims have said."""
        return (self.folder / "log.txt").read_text()

    def paid_rows(self) -> Counter[int]:
        """How often each row was answered by the engine, failures and retries included."""
        return Counter(payment.row for payment in payments(self.paid_log))

    def durable(self) -> set[int]:
        """Rows in a readable part of any attempt."""
        return set(durable_rows(self.files, self.plan.folder))

    def left(self) -> str | None:
        """What the newest attempt says it is doing."""
        progress = latest_progress(self.store, self.layout, 0)
        return progress.state if progress else None

    def wait_until(
        self, condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Poll a condition that must come true, and while the process lives if one is given."""
        deadline = time.monotonic() + _ATTEMPT_SECONDS
        while not condition():
            ended = process is not None and process.poll() is not None
            assert not ended, f"the process ended before its point; log: {self.folder / 'log.txt'}"
            assert time.monotonic() < deadline, "the awaited point was never reached"
            time.sleep(0.005)

    def publish(self) -> None:
        """Reconcile and merge what is there."""
        reconcile(self.store, self.plan.folder)
        merge(self.store, self.plan.folder)

    def published(self) -> Published:
        """The tables as they are."""
        return published(self.files, self.plan.job)

    def verdict(self, *, replay: str | None = None) -> Account:
        """The oracle's word on the tables as they are.

        Args:
            replay: folder of a replay of the run, whose payments count in the place of the run's own.
        """
        log = self.paid_log if replay is None else self.folder / "replay.tsv"
        since = durable_rows(self.files, replay or self.plan.folder, self.damaged)
        again = paid_again(log, since)
        return verdict(self.files, self.plan.job, self.plan.folder, self.answers, again, self.damaged)

    def account(self) -> Account:
        """Publish, and the oracle's word on it."""
        self.publish()
        return self.verdict()


def start_victim(folder: Path, fault: Fault, what: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a victim that logs to `folder/log.txt`."""
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.victim", what, *arguments],
            env=os.environ | fault.environment(folder / STRIKES),
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )


def suspended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has stopped itself."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return False
    return stat[0] == "T"


def wake(process: subprocess.Popen[bytes]) -> None:
    """Let a stopped process go on."""
    process.send_signal(signal.SIGCONT)
