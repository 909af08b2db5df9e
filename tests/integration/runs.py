"""Jobs for the integration tests, and what the store says about their runs."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq

from airflow_batchinfer.run.commit import chosen_commit
from airflow_batchinfer.run.layout import RunLayout, run_dir
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import LocalStore

T = TypeVar("T")


def write_input(path: Path, texts: Iterable[str]) -> Path:
    """A JSONL file with columns `ticket` and `text`."""
    lines = (json.dumps({"ticket": f"T{i}", "text": text}) for i, text in enumerate(texts))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def job_fields(store: Path, name: str, source: Path, **overrides: Any) -> dict[str, Any]:
    """Fields of a small job on the instant engine; `overrides` are merged one level deep."""
    fields: dict[str, Any] = {
        "name": name,
        "store": str(store),
        "input": {"path": str(source), "id_column": "ticket", "carry": ["text"]},
        "prompt": {"template": "Answer: {{ text }}"},
        "model": {"name": "none", "backend": "tests.engines:InstantEngine"},
        "sharding": {"max_rows": 10, "max_parallel_shards": 2, "dedup": False},
        "checkpoint": {"rows": 4, "progress_seconds": 1},
        "validation": {"enabled": True},
    }
    for key, value in overrides.items():
        both = isinstance(value, dict) and isinstance(fields.get(key), dict)
        fields[key] = fields[key] | value if both else value
    return fields


class StoredRun:
    """A run as the store shows it."""

    def __init__(self, store: Path, job: str, run_id: str, generation: int = 1) -> None:
        self.store = LocalStore(store)
        self.job = job
        self.layout = RunLayout(run_dir(job, run_id, generation))
        self.folder = store / self.layout.folder

    @property
    def plan(self) -> Plan:
        return Plan.read(self.store, self.layout.plan)

    def document(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.store.read_bytes(key))
        return found

    @property
    def ledger(self) -> dict[str, Any]:
        return self.document(self.layout.ledger)

    def rows_in_parts(self, shard: int) -> Counter[int]:
        """How often each row id stands in the shard's parts, of whatever attempt."""
        parts = sorted((self.folder / "shards" / f"{shard:05d}").glob("*/part-*.parquet"))
        return Counter(row for part in parts for row in pq.read_table(part)["row_id"].to_pylist())

    def commit_of(self, shard: int) -> dict[str, Any]:
        """The commit that readers choose."""
        commit = chosen_commit(self.store, self.layout, shard, self.plan.fingerprint)
        assert commit is not None
        return commit.model_dump(mode="json")

    def results(self) -> list[dict[str, Any]]:
        """The job's results table, all runs."""
        return _table(self.folder.parents[1] / "results")

    def dead_letters(self) -> list[dict[str, Any]]:
        """This job's dead letters."""
        return [row for row in _table(Path(self.store.uri) / "dead_letters") if row["job"] == self.job]


def _table(folder: Path) -> list[dict[str, Any]]:
    import deltalake

    rows = deltalake.DeltaTable(str(folder)).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: row["row_id"])


def wait_until(condition: Callable[[], T | None], what: str, timeout: float = 120.0) -> T:
    """The condition's first true value."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout:.0f} s: {what}")


def worker_of(folder: str, shard: int) -> int | None:
    """Pid of the running worker of a shard, from its command line; none if there is none."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if (
            "airflow_batchinfer.worker" in arguments
            and folder in arguments
            and arguments[arguments.index("--shards") + 1] == str(shard)
        ):
            return int(path.parent.name)
    return None


def process_titled(title: str) -> int:
    """Pid of the process that has given itself this title."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().decode(errors="replace").rstrip("\0 ") == title:
                return int(path.parent.name)
    raise AssertionError(f"no process is titled {title!r}")


def wait_for_parts(run: StoredRun, shard: int, count: int = 2, timeout: float = 120.0) -> int:
    """Pid of the shard's worker, once it runs and the shard has `count` parts."""

    def worker() -> int | None:
        parts = list((run.folder / "shards" / f"{shard:05d}").glob("*/part-*.parquet"))
        return worker_of(run.layout.folder, shard) if len(parts) >= count else None

    return wait_until(worker, f"a running worker of shard {shard} with {count} parts", timeout)


def parent_of(pid: int) -> int:
    """Pid of the process that started `pid`: for a worker, Airflow's task."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def paid(log: Path) -> Counter[int]:
    """How often each row was paid for, from the engine's own log."""
    return Counter(int(line.split("/", 1)[0]) for line in log.read_text().splitlines())
