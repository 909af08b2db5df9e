"""The worker with a real vLLM: what it does not start, and a SIGTERM to the whole process group."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_batchinfer.errors import ExitCode
from tests.integration.engine_jobs import ENGINE, MODELS, PATIENCE_SECONDS
from tests.unit.worker.conftest import ROOT, Run, assert_sums

pytestmark = pytest.mark.worker_env

MODEL = {"name": str(MODELS / "smollm2"), "engine": ENGINE | {"max_num_seqs": 4}}
STARTED = "started in"
"""In the worker's log once the engine is up."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    made = Run(tmp_path)
    yield made
    made.close()


def test_rows_that_are_all_too_long_start_no_engine(run: Run) -> None:
    run.plan(["word " * 600] * 20, model=MODEL)
    worker = run.start()
    _, log = worker.communicate(timeout=PATIENCE_SECONDS)
    assert worker.returncode == ExitCode.COMMITTED
    assert run.commit().reasons == {"over_long": 20}
    assert_sums(run.commit())
    assert STARTED not in log


def test_sigterm_to_the_workers_group_lets_the_engine_finish_what_is_in_flight(run: Run) -> None:
    """The signal goes to every process of the group, as by a terminal or a supervisor."""
    run.plan(
        [f"Count from {i} to one thousand, one number a line." for i in range(60)],
        model=MODEL,
        sampling={"max_tokens": 150},
        checkpoint={"rows": 1000, "seconds": 600, "grace_seconds": 100, "progress_seconds": 0.1},
    )
    log = run.folder / "log"
    with log.open("w") as output:
        worker = subprocess.Popen(
            run.command(), cwd=ROOT, stdout=output, stderr=output, text=True, start_new_session=True
        )
    try:
        run.wait_until(lambda: run.state() == "running" and run.progress().in_flight == 8, worker, 180)
        seen = run.progress()
        os.killpg(worker.pid, signal.SIGTERM)
        assert worker.wait(PATIENCE_SECONDS) == ExitCode.RECLAIMED
    finally:
        worker.kill()
        worker.wait()
    rows = [row for key in run.parts() for row in run.read_part(key).to_pylist()]
    assert seen.done + 8 <= len(rows) < 60
    assert {row["outcome"] for row in rows} == {"succeeded"}
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
    assert run.progress().engine_restarts == 0
    said = log.read_text()
    assert "told to leave by SIGTERM" in said
    assert "received signal" not in said  # what vLLM's own processes would say
    assert "aborting" not in said
