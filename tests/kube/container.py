"""A container as a local process: started, listened to, killed; its log kept with timestamps."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path


def now(later: float = 0.0) -> str:
    """RFC 3339, as the API server writes times; `later` seconds from now."""
    return (datetime.now(UTC) + timedelta(seconds=later)).isoformat(timespec="seconds").replace("+00:00", "Z")


class Container:
    """One process in a session of its own. Kubernetes' view of it: a start, a log, an exit code."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        """Start it; `OSError` if there is no such command."""
        self.started_at = now()
        self.finished_at: str | None = None
        self._lines: list[tuple[datetime, str]] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def exit_code(self) -> int | None:
        """As Kubernetes tells it: 128 and the signal's number for a killed process; none while it runs."""
        if self.finished_at is None:
            return None
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def terminate(self, grace: float) -> None:
        """SIGTERM to the first process, SIGKILL to all after `grace` seconds; returns at once."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        timer = threading.Timer(grace, self.kill)
        timer.daemon = True
        timer.start()

    def kill(self) -> None:
        """SIGKILL to every process of the container."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended, after waiting up to `timeout` seconds for that."""
        with self._changed:
            return self._changed.wait_for(lambda: self.finished_at is not None, timeout)

    def log(self, *, follow: bool, since: datetime | None = None) -> Iterator[tuple[datetime, str]]:
        """Lines with their times; with `follow`, until it ends."""
        at = 0
        while True:
            with self._changed:
                while follow and len(self._lines) == at and self.finished_at is None:
                    self._changed.wait()
                new, at = self._lines[at:], len(self._lines)
                ended = self.finished_at is not None
            yield from ((when, line) for when, line in new if since is None or when >= since)
            if not follow or ended:
                return

    def tail(self, characters: int = 2048) -> str:
        """The end of its log: what kubelet makes the termination message of a failed container."""
        with self._changed:
            return "".join(line + "\n" for _, line in self._lines)[-characters:]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            with self._changed:
                self._lines.append((datetime.now(UTC), raw.decode(errors="replace").rstrip("\n")))
                self._changed.notify_all()
        self._process.wait()
        with self._changed:
            self.finished_at = now()
            self._changed.notify_all()
