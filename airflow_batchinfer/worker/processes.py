"""Processes around a worker: its parent, its engine's children, and what an earlier worker left over.

An engine's process must not outlive its worker: on a GPU it would hold the memory. Engines see to that
themselves (see `engines.process`). Should one remain all the same, the next worker on this machine
finds it by a variable in its environment that names the worker it belonged to.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

OWNER = "BATCHINFER_WORKER"
"""Environment variable of a worker's children: the worker's identity."""

_PR_SET_PDEATHSIG = 1


def identity(pid: int | None = None) -> str:
    """A process (default: this one), told apart from every other: host, pid namespace, pid, start time."""
    pid = os.getpid() if pid is None else pid
    return f"{_place()}:{pid}:{_start_ticks(pid)}"


def is_gone(worker: str) -> bool | None:
    """Whether the process with this identity has ended; none if it is not for this machine to say."""
    place, _, rest = worker.rpartition(":")
    place, _, pid = place.rpartition(":")
    if place != _place() or not pid.isdigit():
        return None
    return _start_ticks(int(pid)) != rest


def mark_children() -> None:
    """Let every process that is started from now on carry this worker's identity."""
    os.environ[OWNER] = identity()


def end_leftovers() -> list[int]:
    """Kill processes whose worker has ended, on this machine and of this user; returns their ids."""
    ended = []
    for pid, owner in _owned_processes():
        if is_gone(owner):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
            log.warning("ended process %d, left over by a worker that is gone (%s)", pid, owner)
            ended.append(pid)
    return ended


def die_with_parent(parent: int) -> bool:
    """Ask the kernel for a SIGTERM when the parent ends; returns whether it has ended already.

    Args:
        parent: the expected parent's process id, or 0 for the present one.
    """
    expected = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    return os.getppid() != expected


def process_age() -> float:
    """Seconds since this process was started by the kernel, before any Python ran in it."""
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, uptime - int(_start_ticks(os.getpid())) / os.sysconf("SC_CLK_TCK"))


def _place() -> str:
    return f"{socket.gethostname()}:{os.stat('/proc/self/ns/pid').st_ino}"


def _start_ticks(pid: int) -> str:
    """Clock ticks from boot to the process's start; empty if there is none, or only its corpse."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _owned_processes() -> Iterator[tuple[int, str]]:
    """Processes that carry a worker's identity, and that identity."""
    prefix = f"{OWNER}=".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or it has just ended
            continue
        for variable in environment:
            if variable.startswith(prefix):
                yield int(entry.name), variable.removeprefix(prefix).decode(errors="replace")
