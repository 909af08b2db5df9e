"""Real worker processes on a local store, with engines that need no model."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_batchinfer.run.commit import Commit, chosen_commit
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.progress import Progress, latest_progress
from airflow_batchinfer.store import LocalStore
from tests.plans import job, plan_run

ROOT = Path(__file__).parents[3]
TIMEOUT = 60

T = TypeVar("T")


class Run:
    """A planned run in a folder of its own, and what its workers do to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(folder / "store")
        self.paid_log = folder / "paid"
        self._started: list[subprocess.Popen[str]] = []

    def plan(
        self,
        *shards: Iterable[str | None],
        engine: str = "InstantEngine",
        options: dict[str, Any] | None = None,
        copies: dict[int, int] | None = None,
        **fields: Any,
    ) -> Plan:
        model = {
            "name": "none",
            "backend": f"tests.engines:{engine}",
            "engine": {"paid_log": str(self.paid_log), **(options or {})},
        }
        spec = job(Path(self.store.uri), **{"model": model, **fields})
        self.planned = plan_run(spec, shards, copies=copies)
        self.layout = RunLayout(self.planned.folder)
        return self.planned

    def command(
        self, shards: str = "0", *more: str, program: Sequence[str] = ("-m", "airflow_batchinfer.worker")
    ) -> list[str]:
        return [
            *(sys.executable, *program, "--store", self.store.uri),
            *("--folder", self.planned.folder, "--shards", shards, *more),
        ]

    def start(self, shards: str = "0", *more: str, **how: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(shards, *more, **how),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def work(self, shards: str = "0", *more: str) -> tuple[int, str]:
        """Run a worker to its end; its exit code and the last line it said."""
        return self.end_of(self.start(shards, *more))

    def end_of(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        _, said = process.communicate(timeout=TIMEOUT)
        lines = said.splitlines()
        return process.returncode, lines[-1] if lines else ""

    def kill_when(self, process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
        """SIGKILL as soon as something is so."""
        self.wait_until(reached, process)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=TIMEOUT)

    def wait_until(
        self,
        reached: Callable[[], bool],
        process: subprocess.Popen[str] | None = None,
        patience: float = TIMEOUT,
    ) -> None:
        self.wait_for(lambda: reached() or None, process, patience)

    def wait_for(
        self,
        found: Callable[[], T | None],
        process: subprocess.Popen[str] | None = None,
        patience: float = TIMEOUT,
    ) -> T:
        deadline = time.monotonic() + patience
        while (value := found()) is None:
            assert time.monotonic() < deadline, "never reached"
            assert process is None or process.poll() is None, process.communicate()
            time.sleep(0.005)
        return value

    def commit(self, shard: int = 0) -> Commit:
        found = chosen_commit(self.store, self.layout, shard, self.planned.fingerprint)
        assert found is not None, "no commit"
        return found

    def results(self, shard: int = 0) -> dict[int, dict[str, Any]]:
        """The committed results by row, as readers take them; each row must stand in some part."""
        rows: dict[int, dict[str, Any]] = {}
        for part in self.commit(shard).parts:
            for row in self.read_part(part.key).to_pylist():
                rows.setdefault(row["row_id"], row)
        assert len(rows) == self.planned.shards[shard].sent
        return rows

    def read_part(self, key: str) -> pa.Table:
        return pq.read_table(pa.BufferReader(self.store.read_bytes(key)))

    def parts(self, shard: int = 0) -> list[str]:
        return [i.key for i in self.store.list(self.layout.shard(shard)) if "/part-" in i.key]

    def durable(self, shard: int = 0) -> set[int]:
        """Rows in any part."""
        return {row for key in self.parts(shard) for row in self.read_part(key)["row_id"].to_pylist()}

    def files(self, name: str, shard: int = 0) -> list[str]:
        return [i.key for i in self.store.list(self.layout.shard(shard)) if i.key.endswith(f"/{name}")]

    def progress(self, shard: int = 0) -> Progress:
        found = latest_progress(self.store, self.layout, shard)
        assert found is not None
        return found

    def state(self, shard: int = 0) -> str:
        """The newest attempt's state; blank while it has not said."""
        found = latest_progress(self.store, self.layout, shard)
        return "" if found is None else found.state

    def paid(self) -> Counter[int]:
        """How often each row was answered by an engine."""
        lines = self.paid_log.read_text().splitlines() if self.paid_log.exists() else []
        return Counter(int(line.split("/")[0]) for line in lines)

    def paid_tokens(self) -> int:
        lines = self.paid_log.read_text().splitlines()
        return sum(int(p) + int(o) for p, o in (line.split("\t")[1:3] for line in lines))

    def outcomes(self, shard: int = 0) -> Counter[str]:
        return Counter(row["outcome"] for row in self.results(shard).values())

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def texts(count: int, faults: dict[int, str] | None = None, first: int = 0) -> Sequence[str]:
    """Texts of `count` rows; `faults` gives some of them a mark that the engine understands."""
    return [f"row {first + i} {(faults or {}).get(i, '')}".strip() for i in range(count)]


def assert_sums(commit: Commit) -> None:
    assert sum(commit.counts.values()) == commit.rows
    bad = sum(v for k, v in commit.counts.items() if k != "succeeded")
    assert sum(commit.reasons.values()) == bad
