"""An engine's process, seen from the worker: ended in good order, by force, or not at all."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_batchinfer.errors import EngineError
from airflow_batchinfer.worker.engines import process as module
from airflow_batchinfer.worker.engines.process import EngineProcess

DEAF = "import time; time.sleep(600)"
"""An engine that does not listen."""


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
