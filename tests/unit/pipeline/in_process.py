"""Real workers in this process, each in a thread of its own, on a store that strikes at a chosen operation.

A worker's process ends in the middle of something when it is killed, and stands still when it is stopped.
Here its store does that to it: from one operation on, none is done any more, or all of them wait.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from airflow_batchinfer.errors import ExitCode, StoreError
from airflow_batchinfer.store import LocalStore, ObjectInfo
from airflow_batchinfer.worker import retrying, watchdog
from airflow_batchinfer.worker import run as worker_run
from airflow_batchinfer.worker.control import Control
from airflow_batchinfer.worker.engines.base import Completion
from airflow_batchinfer.worker.settings import Settings
from tests.engines import FaultyEngine, InstantEngine

T = TypeVar("T")

_PATIENCE_SECONDS = 120.0
"""A worker that has not ended after so long hangs."""


class Killed(SystemExit):
    """The process is gone. A thread that ends with a `SystemExit` does so in silence."""


@dataclass(frozen=True)
class Strike:
    """What a store does from its `nth` operation on.

    Attributes:
        do: `kill`: no operation is done any more. `hold`: all wait until let go. `error`: `times` fail.
        nth: the operation, from 1.
        after: the operation is done all the same, and its caller does not learn it.
        times: of `error`.
    """

    do: Literal["kill", "hold", "error"]
    nth: int
    after: bool = False
    times: int = 1


class StrikingStore(LocalStore):
    """A folder as one process sees it. Its operations come one after the other, so each has a number."""

    def __init__(
        self, root: str | Path, strike: Strike | None, on_kill: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(root)
        self._strike = strike
        self._on_kill = on_kill
        self._seen = 0
        self._one_by_one = threading.RLock()
        self._free = threading.Event()
        self.holds = threading.Event()

    def let_go(self) -> None:
        """Let what waits go on, and hold nothing any more."""
        self._free.set()

    def read_bytes(self, key: str) -> bytes:
        return self._struck(lambda: LocalStore.read_bytes(self, key))

    def write_bytes(self, key: str, data: bytes) -> None:
        self._struck(lambda: LocalStore.write_bytes(self, key, data))

    def put_file(self, source: Path, key: str) -> None:
        self._struck(lambda: LocalStore.put_file(self, source, key))

    def exists(self, key: str) -> bool:
        return self._struck(lambda: LocalStore.exists(self, key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._struck(lambda: [*LocalStore.list(self, prefix)]))

    def delete(self, key: str) -> None:
        self._struck(lambda: LocalStore.delete(self, key))

    def filesystem(self) -> Any:
        return self._struck(lambda: LocalStore.filesystem(self))

    def _struck(self, operation: Callable[[], T]) -> T:
        with self._one_by_one:
            strike = self._strike
            self._seen += 1
            if strike is None or self._seen < strike.nth:
                return operation()
            if self._seen > strike.nth or not strike.after:
                self._hit(strike)
                return operation()
            done = operation()
            self._hit(strike)
            return done

    def _hit(self, strike: Strike) -> None:
        match strike.do:
            case "kill":
                self._on_kill()
                raise Killed
            case "hold":
                self.holds.set()
                self._free.wait()
            case "error" if self._seen < strike.nth + strike.times:
                raise StoreError(f"operation {self._seen} fails")


class Attempt(threading.Thread):
    """One worker, from its start to its end; `paid` counts what its engine answered, by row."""

    def __init__(self, root: str, folder: str, shard: int, strike: Strike | None) -> None:
        super().__init__(daemon=True, name=f"worker of shard {shard}")
        self.control = Control()
        self.store = StrikingStore(root, strike, self._die)
        self.paid: Counter[int] = Counter()
        self.ended: ExitCode | BaseException | None = None
        self._settings = Settings(root, folder, (shard,))

    def run(self) -> None:
        try:
            self.ended = worker_run.run_worker(self._settings, lambda _: None)
        except BaseException as error:
            self.ended = error

    def wait(self) -> bool:
        """Wait until it has ended or is held; whether it has ended."""
        waited = 0.0
        while self.is_alive() and not self.store.holds.is_set():
            self.join(0.01)
            waited += 0.01
            assert waited < _PATIENCE_SECONDS, "the worker hangs"
        return not self.is_alive()

    def wake(self) -> None:
        """Let a held one go on, to its end."""
        self.store.let_go()
        self.join(_PATIENCE_SECONDS)
        assert not self.is_alive(), "the worker hangs"

    def _die(self) -> None:
        """Of the process nothing is left but this thread, which is to end as well."""
        self.control.leave(ExitCode.RECLAIMED, "killed", 0.0)


class _Noting:
    """An engine that tells its `Attempt` what it was paid for: the loop that calls it runs in that thread."""

    def _pay(self, results: Sequence[Any]) -> None:
        attempt = threading.current_thread()
        assert isinstance(attempt, Attempt)
        attempt.paid.update(int(r.key.split("/")[0]) for r in results if isinstance(r, Completion))


class NotingFaultyEngine(_Noting, FaultyEngine):
    pass


class NotingInstantEngine(_Noting, InstantEngine):
    pass


class _NoSignals:
    """The pipe of a process that gets no signal."""

    _read, _write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def received(self) -> list[Any]:
        return []


@contextmanager
def workers_in_threads() -> Iterator[None]:
    """Let `run_worker` take from its `Attempt` what belongs to a process, and wait for nothing."""

    def mine() -> Attempt:
        attempt = threading.current_thread()
        assert isinstance(attempt, Attempt)
        return attempt

    run = worker_run._Worker.run

    def run_and_leave_no_thread(worker: worker_run._Worker) -> ExitCode:
        try:
            return run(worker)
        finally:  # a killed process has no threads left
            worker._announcer.close(forget=False)
            worker._reporter.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_run._Worker, "run", run_and_leave_no_thread)
        patch.setattr(worker_run, "SignalPipe", _NoSignals)
        patch.setattr(worker_run, "Control", lambda: mine().control)
        patch.setattr(worker_run, "open_store", lambda *_: mine().store)
        patch.setattr(worker_run, "mark_children", lambda: None)
        patch.setattr(worker_run, "end_leftovers", lambda: None)
        patch.setattr(watchdog, "_TICK_SECONDS", 0.01)
        patch.setattr(retrying, "_WAIT_SECONDS", (0.0,) * len(retrying._WAIT_SECONDS))
        yield
