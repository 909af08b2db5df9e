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
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.progress import latest_progress
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import LocalStore, open_store
from tests.chaos.injection import Fault
from tests.chaos.oracle import Account, account, durable_rows
from tests.plans import job, plan_run

ROOT = Path(__file__).parents[2]
ROWS = 120
_ATTEMPT_SECONDS = 90.0

NO_FAULT = Fault()


def chaos_job(folder: Path, store: str | None = None, **overrides: Any) -> JobSpec:
    """A job whose engine notes what it is paid in `folder/paid.tsv`; `overrides` replace whole sections."""
    engine = {
        "paid_log": str(folder / "paid.tsv"),
        "max_in_flight": 16,
        "delay_seconds": 0.002,
    } | overrides.pop("engine", {})
    fields: dict[str, Any] = {
        "model": {
            "name": "none",
            "backend": overrides.pop("backend", "tests.engines:FaultyEngine"),
            "engine": engine,
        },
        "checkpoint": {"rows": 20, "seconds": 1.0, "grace_seconds": 5.0, "progress_seconds": 0.1},
        "sharding": {"dedup": False},
        "failure": {"max_dead_fraction": 1.0},
    }
    return job(store or folder / "store", **fields | overrides)


class ChaosRun:
    """A planned run of one shard in a store of its own.

    `paid_twice` grows by each row that an attempt paid for although a part held it when the attempt began.
    """

    def __init__(
        self,
        folder: Path,
        texts: Sequence[str] | None = None,
        *,
        store: str | None = None,
        plan: Plan | None = None,
        **overrides: Any,
    ) -> None:
        """Plan a run of `texts`, or take a `plan` that is there; without `store` it is a local one."""
        self.folder = folder
        self.paid_log = folder / "paid.tsv"
        spec = chaos_job(folder, store, **overrides) if plan is None else plan.spec
        self.texts = list(texts) if texts is not None else [f"row number {i}" for i in range(ROWS)]
        self.plan = plan_run(spec, [self.texts]) if plan is None else plan
        self.store = open_store(spec.store)
        self.layout = RunLayout(self.plan.folder)
        self.paid_twice = 0

    def copied_to(self, folder: Path) -> ChaosRun:
        """The run as it stands, in a store of its own: many faults can strike at the same point."""
        twin = copy.copy(self)
        twin.folder = folder
        twin.store = LocalStore(shutil.copytree(self.store.uri, folder / "store"))
        return twin

    def start(self, fault: Fault = NO_FAULT, what: str = "worker") -> subprocess.Popen[bytes]:
        """Start a victim; nothing is counted yet."""
        where = (
            ["--store", self.store.uri, "--folder", self.plan.folder, "--shards", "0"]
            if what in ("worker", "task")
            else [self.store.uri, self.plan.folder, str(self.folder / "replay.tsv")]
        )
        return start_victim(self.folder, fault, what, where)

    def attempt(
        self, fault: Fault = NO_FAULT, meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None
    ) -> int:
        """One worker from start to end; returns its exit status (negative: the signal)."""
        durable = durable_rows(self.store, self.layout, 0)
        before = self.paid_rows()
        process = self.start(fault)
        if meanwhile is not None:
            meanwhile(process)
        code = self.wait(process)
        self.paid_twice += sum((self.paid_rows() - before)[row] for row in durable)
        return code

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """The exit status; a process that hangs is killed and counts as -9 with a loud message."""
        try:
            return process.wait(_ATTEMPT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"a worker hung; its log: {self.folder / 'log.txt'}") from None

    def finish(self, limit: int = 20) -> int:
        """Attempts without a fault until the shard is committed; returns how many it took."""
        for number in range(1, limit + 1):
            if self.attempt() == ExitCode.COMMITTED:
                return number
        raise AssertionError(f"no commit after {limit} attempts; log: {self.folder / 'log.txt'}")

    def paid_rows(self) -> Counter[int]:
        """How often each row was answered by the engine, failures and retries included."""
        return paid_in(self.paid_log)

    def durable(self) -> set[int]:
        """Rows in a readable part of any attempt."""
        return durable_rows(self.store, self.layout, 0)

    def left(self) -> str | None:
        """What the newest attempt says it is doing."""
        progress = latest_progress(self.store, self.layout, 0)
        return progress.state if progress else None

    def wait_until(
        self, condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Poll a condition, while the process lives if one is given."""
        deadline = time.monotonic() + _ATTEMPT_SECONDS
        while not condition() and (process is None or process.poll() is None):
            if time.monotonic() > deadline:
                raise AssertionError("the awaited point was never reached")
            time.sleep(0.005)

    def account(self) -> Account:
        """The oracle's word: reconcile and merge what is there, and count rows in the tables."""
        return account(self.store, self.plan, self.paid_twice)


def start_victim(folder: Path, fault: Fault, what: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a victim that logs to `folder/log.txt`."""
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.victim", what, *arguments],
            env=os.environ | fault.environment(),
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )


def paid_in(log: Path) -> Counter[int]:
    """Answers by row in an engine's log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return Counter(int(line.split("/", 1)[0]) for line in lines if "\t" in line)


def suspended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has stopped itself."""
    stat = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return stat[0] == "T"


def wake(process: subprocess.Popen[bytes]) -> None:
    """Let a stopped process go on."""
    process.send_signal(signal.SIGCONT)
