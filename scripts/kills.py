"""A shard on a real model, killed with SIGKILL three times: what was paid, beside one undisturbed run.

    python scripts/kills.py --model .build/models/smollm2        (in the worker's environment)

Each attempt's own progress says what it paid for. The killed runs together may have paid for the rows
that stood in no part yet when they were killed, and for nothing else.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from airflow_batchinfer.run.commit import Commit, Tokens, chosen_commit
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.progress import Progress
from airflow_batchinfer.store import LocalStore

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.plans import job, plan_run  # noqa: E402

KILL_AT = (0.2, 0.5, 0.8)
"""Kills happen when this share of the rows has an outcome."""

POLL_SECONDS = 0.05


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="kills", description=__doc__)
    parser.add_argument("--model", default=".build/models/smollm2")
    parser.add_argument("--rows", type=int, default=500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batchinfer-kills-") as scratch:
        calm = _Shard(Path(scratch) / "calm", arguments.model, arguments.rows)
        print(f"undisturbed: exit {calm.attempt(None)}")
        undisturbed = calm.commit().tokens
        print(f"undisturbed: {_tokens(undisturbed)}")
        killed = _Shard(Path(scratch) / "killed", arguments.model, arguments.rows)
        for share in KILL_AT:
            print(f"killed: exit {killed.attempt(share)}; {killed.last()}")
        print(f"killed: exit {killed.attempt(None)}; {killed.last()}")
        commit = killed.commit()
        print(f"committed: {commit.counts}, {_tokens(commit.tokens)}, {commit.attempts} attempts")
        attempts = list(killed.progress())
        paid = sum(p.tokens.total for p in attempts)
        lost = sum(p.done - p.durable for p in attempts)
        needed = undisturbed.prompt + undisturbed.output
        print(
            f"paid over all attempts: {paid} tokens; needed: {needed}; {lost} finished rows were in no part"
        )
        most = max(16, needed // arguments.rows * 2) * lost
        return 0 if commit.counts == {"succeeded": arguments.rows} and paid - needed <= most else 1


class _Shard:
    """One planned shard and the attempts at it."""

    def __init__(self, folder: Path, model: str, rows: int) -> None:
        self._store = LocalStore(folder)
        spec = job(
            folder,
            prompt={"template": "Name one thing that goes with {{ text }}."},
            model={
                "name": model,
                "engine": {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 32},
            },
            sampling={"max_tokens": 16},
            checkpoint={"rows": 40, "seconds": 5, "progress_seconds": 0.1},
        )
        self._rows = rows
        self._plan: Plan = plan_run(spec, [(f"the number {i}" for i in range(rows))])
        self._layout = RunLayout(self._plan.folder)

    def attempt(self, kill_at: float | None) -> int:
        """Run a worker, and kill it when a share of all rows is done; returns its exit code."""
        command = [sys.executable, "-m", "airflow_batchinfer.worker", "--store", self._store.uri]
        command += ["--folder", self._plan.folder, "--shards", "0"]
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
        worker = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
        while kill_at is not None and worker.poll() is None:
            newest = max(self.progress(), key=lambda p: p.epoch, default=None)
            if newest is not None and newest.state == "running" and newest.done >= kill_at * self._rows:
                worker.send_signal(signal.SIGKILL)
                break
            time.sleep(POLL_SECONDS)
        return worker.wait()

    def progress(self) -> Iterator[Progress]:
        """The last progress of each attempt."""
        for info in self._store.list(self._layout.shard(0)):
            if info.key.endswith("/progress.json"):
                yield Progress.read(self._store, info.key)

    def last(self) -> str:
        """The newest attempt's progress in one line."""
        return max(self.progress(), key=lambda p: p.epoch).line()

    def commit(self) -> Commit:
        """The shard's commit."""
        found = chosen_commit(self._store, self._layout, 0, self._plan.fingerprint)
        if found is None:
            raise SystemExit("no commit")
        return found


def _tokens(tokens: Tokens) -> str:
    return f"{tokens.prompt} prompt and {tokens.output} output tokens"


if __name__ == "__main__":
    sys.exit(main())
