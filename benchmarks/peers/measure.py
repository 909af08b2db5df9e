"""Run one peer on one job, once, and say what it cost."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.job import Job

METER = Path(__file__).parent / "meter"
sys.path.insert(0, str(METER))

import engine_meter  # noqa: E402  (lies in the folder that goes on the peers' PYTHONPATH)

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Measured:
    """One peer, one job.

    Attributes:
        held: seconds from process start to exit, restarts included.
        accepted: rows with an accepted answer at the end.
        engine: seconds from the engine's first step to its last.
        steps: engine steps. tokens: tokens computed by the engine.
        first_durable: seconds until the first accepted row was on disk, if it was seen before the exit.
        returncode: of the last start; the end of the log is in `log`.
    """

    held: float
    accepted: int
    engine: float
    steps: float
    tokens: float
    first_durable: float | None
    returncode: int
    log: Path


def run(
    peer: str,
    job: Job,
    python: str,
    environment: Mapping[str, str],
    *,
    kill_at_tokens: float | None = None,
    limit: float = 900.0,
) -> Measured:
    """Start the peer on the job and wait; with `kill_at_tokens`, SIGKILL it once there and start it again.

    Args:
        peer: module name under `benchmarks.peers`.
        job: what to do; `job.folder` must be new.
        python: interpreter of the peer's environment.
        environment: more environment variables.
        kill_at_tokens: engine tokens after which the whole process group is killed, once.
        limit: seconds after which the peer counts as hung and is ended.
    """
    module = importlib.import_module(f"benchmarks.peers.{peer}")
    meter = job.folder / "meter"
    meter.mkdir(exist_ok=True)
    log = job.folder / "log.txt"
    variables = {
        **os.environ,
        **environment,
        "ENGINE_METER": str(meter),
        "PYTHONPATH": f"{METER}:{Path(__file__).parents[2]}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    begin = time.monotonic()
    first: float | None = None
    while True:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [python, "-m", f"benchmarks.peers.{peer}", str(job.folder / "job.json")],
                stdout=output,
                stderr=output,
                env=variables,
                start_new_session=True,
            )
        killed = False
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            elapsed = time.monotonic() - begin
            reading = engine_meter.read(meter)
            if first is None and reading.steps and module.results(job.folder):
                first = elapsed
            if elapsed > limit or (kill_at_tokens is not None and reading.tokens >= kill_at_tokens):
                killed = kill_at_tokens is not None and elapsed <= limit
                _end(process.pid)
                break
        returncode = process.wait()
        held = time.monotonic() - begin
        _end(process.pid)
        if not killed:
            break
        kill_at_tokens = None
    reading = engine_meter.read(meter)
    return Measured(
        held=held,
        accepted=len(module.results(job.folder)),
        engine=reading.seconds,
        steps=reading.steps,
        tokens=reading.tokens,
        first_durable=first,
        returncode=returncode,
        log=log,
    )


def _end(session: int) -> None:
    """SIGKILL every process of a session: some peers leave their engine behind."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            try:
                os.kill(int(stat.parent.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
