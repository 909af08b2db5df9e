"""A worker as a local process: started, listened to, told to go, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Self

from airflow_batchinfer.operators.shard_work import MESSAGE_PREFIX

_LONGEST_LINE = 4000
"""Longer lines of output are cut in the log."""


class LocalWorker:
    """One worker process in a session of its own, so that signals reach it only from here.

    Its output goes to an unlinked file, not to a pipe: when this process dies first, the worker can
    still write while it checkpoints.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        on_line: Callable[[str], None],
        *,
        grace_seconds: float,
    ) -> None:
        """Start it.

        Args:
            command: program and arguments.
            env: its whole environment.
            on_line: called with each line of its output.
            grace_seconds: how long it may take to leave when the `with` block is left before its end.
        """
        self._on_line = on_line
        self._grace_seconds = grace_seconds
        self._message: str | None = None
        self._last_line: str | None = None
        self._partial = b""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._read_to = 0
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def message(self) -> str | None:
        """Its own word on why it failed; else the last line it wrote."""
        return self._message or self._last_line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # An error in the block (a time limit, a lost connection to Airflow's supervisor) is no reason to
        # lose what the worker has finished.
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._grace_seconds)
        self.kill()
        self._process.wait()
        self._output.close()

    def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for its end and pass on new output; the exit status, or none yet."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        code = self._process.poll()
        self._read(final=code is not None)
        return code

    def terminate(self) -> None:
        """Ask it to checkpoint and go. The engine below it must not see the signal."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and what it left running in its session, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self, final: bool) -> None:
        data = self._partial + self._new_output()
        *lines, self._partial = data.split(b"\n")
        if final and self._partial:
            lines, self._partial = [*lines, self._partial], b""
        for raw in lines:
            line = raw.decode(errors="replace").rstrip()[:_LONGEST_LINE]
            if line:
                self._last_line = line
                if line.startswith(MESSAGE_PREFIX):
                    self._message = line.removeprefix(MESSAGE_PREFIX)
                self._on_line(line)

    def _new_output(self) -> bytes:
        """What was written since the last call; read by offset, as the worker shares the file's position."""
        size = os.fstat(self._output.fileno()).st_size
        data = os.pread(self._output.fileno(), size - self._read_to, self._read_to)
        self._read_to += len(data)
        return data
