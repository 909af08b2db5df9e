"""An engine in a process of its own: a worker's end of it (`EngineProcess`), and the engine's end.

Three things are wanted of such a process, whatever runs in it:

- It gets no signal meant for the worker: it lives in a session and process group of its own.
- It dies with the worker, however the worker dies, and so do its children. The worker alone holds the
  write end of a pipe; a guardian in the engine's process group waits for its end and then kills the
  group. (`PR_SET_PDEATHSIG` is not inherited by children, so it would miss the engine's own.)
- The worker can end it at once from any thread, and whoever waits for it is woken: its socket closes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socketpair
from typing import Any

from airflow_batchinfer.errors import EngineError
from airflow_batchinfer.worker.engines.base import EngineDied

Message = tuple[Any, ...]
"""What travels both ways: a kind, then its values. Both ends are this package, so pickle is safe."""

_SHARED_MEMORY = "/dev/shm/psm_"
"""Where Python's `multiprocessing.shared_memory` lies, which engines use between their processes."""

_ENDING_SECONDS = 45.0
"""A killed process gives back its memory, which takes a while if it is much, and is gone by then."""

_LOOKING_SECONDS = 1.0
"""Patience with the kernel for what a process has mapped, before it is killed."""

_GUARDIAN = "read -r _; kill -KILL 0"


class EngineProcess:
    """A running engine process, seen from the worker."""

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        """Start `python -m module`; it finds its ends of socket and lifeline in its arguments."""
        ours, theirs = socketpair()
        lifeline, self._lifeline = os.pipe()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(theirs.fileno()), str(lifeline)],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno(),  # an engine's chatter must not mix with the worker's output
                    pass_fds=(theirs.fileno(), lifeline),
                    start_new_session=True,
                    env={**os.environ, **environment},
                )
            finally:
                os.close(lifeline)
        # The engine's own children may hold its socket open, so its end is watched as well.
        self._ended = os.pidfd_open(self._process.pid)
        self._connection: Connection[Message, Message] = Connection(ours.detach())
        self._outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="engine-sender", daemon=True)
        self._sender.start()

    @property
    def pid(self) -> int:
        """Process id, and id of its process group."""
        return self._process.pid

    def send(self, *message: Any) -> None:
        """Queue a message; never blocks, whatever the engine does."""
        self._outgoing.put(message)

    def receive(self, timeout: float | None) -> Message | None:
        """The next message, or none after `timeout` seconds.

        Raises:
            EngineDied: the process is gone; says how it ended.
        """
        try:
            ready = wait([self._connection, self._ended], timeout)
            if self._connection in ready:
                return self._connection.recv()
            if not ready:
                return None
        except (EOFError, OSError) as error:
            raise EngineDied(self._how_it_ended()) from error
        raise EngineDied(self._how_it_ended())

    def kill(self) -> None:
        """End the process and all of its group at once; safe from any thread, and twice."""
        # Only a living process says what it has mapped; one that hangs in a driver may never say it.
        shared_memory: set[Path] = set()
        look = threading.Thread(
            target=lambda: shared_memory.update(_shared_memory_of_group(self.pid)), daemon=True
        )
        look.start()
        look.join(_LOOKING_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for path in shared_memory.copy():
            path.unlink(missing_ok=True)

    def close(self, timeout: float) -> None:
        """Let the process leave by itself for `timeout` seconds, then end it; once, and the last call.

        Raises:
            EngineError: it does not end, as it is inside the kernel for good: a driver that hangs, say.
        """
        self._outgoing.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self.kill()
        try:
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"the engine's process {self.pid} has not ended {_ENDING_SECONDS:g} s after SIGKILL, so its "
                "device may hang: look at the node's kernel log, and run again elsewhere"
            ) from error
        self._sender.join()
        self._connection.close()
        os.close(self._ended)
        os.close(self._lifeline)

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:  # gone: `receive` tells
                return

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "the engine process closed its connection"
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (the kernel does that when memory runs out)" if -code == signal.SIGKILL else ""
            return f"the engine process was ended by {name}{hint}"
        return f"the engine process exited with code {code}; its own log above says why"


def _shared_memory_of_group(group: int) -> set[Path]:
    """Shared memory files that a process group has mapped: a killed engine leaves them behind."""
    found: set[Path] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getpgid(int(entry.name)) != group:
                continue
            maps = (entry / "maps").read_text(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        found.update(Path(word) for word in maps.split() if word.startswith(_SHARED_MEMORY))
    return found


class Host:
    """The engine's end: talks to the worker. `send` may be called from any thread."""

    def __init__(self, arguments: list[str]) -> None:
        """Take over the file descriptors named in the arguments and start the guardian."""
        connection, lifeline = map(int, arguments)
        os.set_inheritable(connection, False)
        subprocess.Popen(["/bin/sh", "-c", _GUARDIAN], stdin=lifeline, stdout=subprocess.DEVNULL)
        os.close(lifeline)
        self._connection: Connection[Message, Message] = Connection(connection)
        self._sending = threading.Lock()
        self.incoming: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        """What the worker sent; a none is its end."""
        threading.Thread(target=self._receive_all, name="host-receiver", daemon=True).start()

    def send(self, *message: Any) -> None:
        """Send a message to the worker."""
        with self._sending:
            self._connection.send(message)

    def _receive_all(self) -> None:
        try:
            while True:
                self.incoming.put(self._connection.recv())
        except (EOFError, OSError):
            self.incoming.put(None)
