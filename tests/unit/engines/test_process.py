"""An engine's process, seen from the worker: ended by force or not at all, or dead with answers unread."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_batchinfer.errors import EngineError
from airflow_batchinfer.worker.engines import process as module
from airflow_batchinfer.worker.engines.base import Completion, EngineDied, Request
from airflow_batchinfer.worker.engines.process import EngineProcess
from airflow_batchinfer.worker.engines.vllm import VllmEngine
from tests.plans import job

ROOT = Path(__file__).parents[3]

DEAF = "import time; time.sleep(600)"
"""An engine that does not listen."""

DYING = """
import os, sys
from airflow_batchinfer.worker.engines.process import Host

host = Host(sys.argv[1:])
assert host.incoming.get() == ("start",)
host.send("ready", {"name": "vllm", "version": "0", "max_in_flight": 2, "max_model_len": 8})
host.incoming.get()
host.send("results", 1, [("1/0/1", "yes", None, "stop", 3, 1, 0)])
host.send("died", "the device fell off the bus")
os._exit(1)
"""
"""vLLM's host as the worker sees it: of two requests it answers one and dies."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    (tmp_path / "deaf.py").write_text(DEAF)
    made = EngineProcess("deaf", {"PYTHONPATH": str(tmp_path)})
    yield made
    made.kill()
    made._process.wait()


def test_a_process_that_does_not_leave_is_ended(engine: EngineProcess) -> None:
    engine.close(0.0)
    assert engine._process.returncode == -signal.SIGKILL


def test_a_process_that_cannot_be_ended_is_told(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs in the kernel: to the worker, it is as if no kill had been sent."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_ENDING_SECONDS", 0.2)
        patch.setattr(EngineProcess, "kill", lambda self: None)
        with pytest.raises(EngineError, match=f"process {engine.pid} has not ended .* after SIGKILL"):
            engine.close(0.0)


def test_what_was_finished_before_the_death_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    engine = VllmEngine(job(tmp_path))
    engine._process = host = EngineProcess("dying", {"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    engine.start()
    engine.submit([Request("1/0/1", 0, token_ids=[1, 2, 3]), Request("2/0/1", 0, token_ids=[1])])
    host._process.wait()
    assert engine.poll(10.0) == [
        Completion("1/0/1", text="yes", finish_reason="stop", prompt_tokens=3, output_tokens=1)
    ]
    with pytest.raises(EngineDied, match="fell off the bus"):
        engine.poll(10.0)
    engine.close()
