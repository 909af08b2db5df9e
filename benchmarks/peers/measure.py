"""Run one peer on one job, once, and say what it cost."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

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
        peak: most memory that all of its processes held together, in MiB, shared pages once; if it was
            asked for.
        killed_at: tokens computed when it was killed, where it was.
        around: seconds of steps outside of `held`, for which no accelerator is held; if there are any.
    """

    held: float
    accepted: int
    engine: float
    steps: float
    tokens: float
    first_durable: float | None
    returncode: int
    log: Path
    peak: float | None = None
    killed_at: float | None = None
    around: float | None = None


def run(
    peer: str,
    job: Job,
    python: str,
    environment: Mapping[str, str],
    *,
    kill_at_tokens: float | None = None,
    memory: bool = False,
    limit: float = 1800.0,
) -> Measured:
    """Start the peer on the job and wait; with `kill_at_tokens`, SIGKILL it once there and start it again.

    Args:
        peer: module name under `benchmarks.peers`.
        job: what to do; `job.folder` must be new.
        python: interpreter of the peer's environment.
        environment: more environment variables.
        kill_at_tokens: engine tokens after which the whole process group is killed, once.
        memory: sample the memory as well, which takes a little of the machine.
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
    peak = 0.0
    killed_at: float | None = None
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
            if memory:
                peak = max(peak, sum(_proportional_mib(pid) for pid in _processes(process.pid, meter)))
            if first is None and reading.steps and module.results(job.folder):
                first = elapsed
            if elapsed > limit or (kill_at_tokens is not None and reading.tokens >= kill_at_tokens):
                killed = kill_at_tokens is not None and elapsed <= limit
                _end(process.pid, meter)
                if killed:
                    killed_at = engine_meter.read(meter).tokens
                break
        returncode = process.wait()
        held = time.monotonic() - begin
        _end(process.pid, meter)
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
        peak=peak if memory else None,
        killed_at=killed_at,
    )


def refused_before_start(returncode: int) -> Measured:
    """A job whose input was refused before anything was held for it."""
    return Measured(0.0, 0, 0.0, 0, 0, None, returncode, Path(os.devnull))


def _end(session: int, meter: Path) -> None:
    """SIGKILL all that is left of a peer: some leave their engine behind, or daemons."""
    for pid in _processes(session, meter):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes(session: int, meter: Path) -> set[int]:
    """All processes of a peer: of its session, or with its meter in their environment, and their children.

    Neither mark finds all: daemons have sessions of their own, and a process that gives itself a title
    overwrites its environment.
    """
    mark = f"ENGINE_METER={meter}".encode()
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            if os.getsid(pid) == session or mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(pid)
    for pid in tuple(found):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(child.pid for child in psutil.Process(pid).children(recursive=True))
    return found


def _proportional_mib(pid: int) -> float:
    """Memory of a process, what it shares by parts."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)
