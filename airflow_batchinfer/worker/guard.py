"""The engine under guard: its pulse, its deadlines, its restarts.

The worker's loop calls the engine from one thread and may be stuck in that call. A second thread (see
`watchdog`) calls `inspect`, which kills an engine that has shown no life for too long; the call then
returns or raises, and the loop treats the engine as dead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from enum import Enum

from airflow_batchinfer.errors import BatchInferError, EngineError
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.worker.engines import load_engine
from airflow_batchinfer.worker.engines.base import (
    Completion,
    Engine,
    EngineDied,
    EngineInfo,
    Request,
    RequestFailure,
)

log = logging.getLogger(__name__)

STUCK_SECONDS = 60.0
"""A call into a killed engine that has not returned after so long never will."""

_OVERTIME_SECONDS = 60.0
"""Patience beyond `retry.row_timeout_seconds` with an engine that keeps this limit itself."""


class EngineGone(EngineDied):
    """The engine was dead before these requests came: none of them has reached it."""


class _Phase(Enum):
    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"


class GuardedEngine:
    """An engine and its successors. All methods but `inspect` and `kill` belong to the loop's thread."""

    def __init__(self, spec: JobSpec) -> None:
        """Build the engine; nothing is started. Raises `SpecError` if there is none of that name."""
        self._spec = spec
        self._engine: Engine = load_engine(spec)
        self.takes_tokens = self._engine.takes_tokens
        self.starts = 0
        self._preloaded = False
        self.stalled = False
        """Whether the engine was killed because it made no progress."""
        self._lock = threading.Lock()
        self._phase = _Phase.IDLE
        self._since = time.monotonic()
        self._pulse = time.monotonic()
        self._made = 0
        self._stall_seconds = spec.retry.stall_seconds
        self._waiting = False
        """Whether something is in flight."""
        self._killed_at: float | None = None
        self._killed_why = ""

    @property
    def started(self) -> bool:
        """Whether an engine is up."""
        return self._phase is _Phase.RUNNING

    @property
    def silence(self) -> float:
        """Seconds since the engine last made progress on anything."""
        return time.monotonic() - self._pulse

    def preload(self) -> None:
        """Let the engine begin what takes time and no accelerator; `start` or `close` follows."""
        self._preloaded = True
        try:
            self._engine.preload()
        except Exception as error:  # `start` will meet it again, and has words for it
            log.warning("the engine cannot be preloaded: %s", error)

    def start(self) -> EngineInfo:
        """Start the engine, or its successor if one has run before.

        Raises:
            SpecError: the job cannot work.
            EngineError: the engine did not start, or not in time, or was killed meanwhile.
        """
        if self.starts:
            self._engine = load_engine(self._spec)
        with self._lock:
            self.starts += 1
            self._preloaded = False
            self.stalled = False
            self._killed_at = None
            self._phase, self._since = _Phase.STARTING, time.monotonic()
        began = self._since
        try:
            info = self._engine.start()
        except BatchInferError as error:
            self._enter(_Phase.IDLE)
            if self._killed_at is not None:
                raise EngineError(self._killed_why) from error
            raise
        except Exception as error:
            self._enter(_Phase.IDLE)
            why = self._killed_why if self._killed_at is not None else f"{type(error).__name__}: {error}"
            raise EngineError(f"the engine did not start: {why}") from error
        # Before the watchdog looks: these are still the last engine's, which may have died in silence.
        self._made, self._pulse, self._waiting = self._engine.tokens_made(), time.monotonic(), False
        if info.keeps_row_timeout:  # it shows no life before a whole answer, which may take as long
            longest = self._spec.retry.row_timeout_seconds + _OVERTIME_SECONDS
            self._stall_seconds = max(self._stall_seconds, longest)
        self._enter(_Phase.RUNNING)
        if self._killed_at is not None:
            raise EngineError(self._killed_why)
        log.info("engine %s %s started in %.1f s", info.name, info.version, time.monotonic() - began)
        return info

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Raises:
            EngineGone: the engine has died before.
            EngineDied: it failed at these requests.
            BatchInferError: it takes no request of the job's.
        """
        if not self._waiting:
            self._pulse = time.monotonic()
            self._waiting = True
        try:
            self._engine.submit(requests)
        except EngineDied as error:
            raise EngineGone(self._killed_why if self._killed_at is not None else str(error)) from error
        except BatchInferError:
            raise
        except Exception as error:
            raise EngineDied(f"{type(error).__name__}: {error}") from error

    def poll(self, timeout: float) -> list[Completion | RequestFailure]:
        """What finished; only while requests are in flight.

        Raises:
            EngineDied: the engine is dead.
            BatchInferError: it takes no request of the job's.
        """
        try:
            results = self._engine.poll(timeout)
            made = self._engine.tokens_made()
        except EngineDied as error:
            raise EngineDied(self._killed_why if self._killed_at is not None else str(error)) from error
        except BatchInferError:
            raise
        except Exception as error:
            log.exception("the engine failed")
            raise EngineDied(f"{type(error).__name__}: {error}") from error
        if self._killed_at is not None and not results:  # whatever still holds it up, it is dead to us
            raise EngineDied(self._killed_why)
        if results or made != self._made:
            self._made, self._pulse = made, time.monotonic()
        return results

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """While the loop is at work on what it has got, and does not listen: silence is no stall then."""
        waiting, self._waiting = self._waiting, False
        try:
            yield
        finally:  # in this order, as the watchdog looks at any time
            self._pulse = time.monotonic()
            self._waiting = waiting

    def rest(self) -> None:
        """Nothing is in flight: until the next `submit`, silence is no stall."""
        self._waiting = False

    def abort(self, keys: Sequence[str]) -> None:
        """Forget requests; a dead engine has forgotten them already."""
        with contextlib.suppress(Exception):
            self._engine.abort(keys)

    def bury(self) -> None:
        """End a dead engine's remains. Raises `EngineError`: it does not end, so no other can be started."""
        self._enter(_Phase.ENDING)
        with contextlib.suppress(Exception):
            self._engine.kill()
        self._end()

    def close(self) -> None:
        """End the engine in good order, if one is up or preloaded; what is done stands, however it ends."""
        if self._phase is _Phase.RUNNING or self._preloaded:
            try:
                self._end()
            except EngineError as error:
                log.error("%s", error)

    def _end(self) -> None:
        self._preloaded = False
        self._enter(_Phase.ENDING)
        try:
            self._engine.close()
        except EngineError:
            raise
        except Exception as error:
            log.warning("the engine did not end in good order: %s: %s", type(error).__name__, error)
        finally:
            self._enter(_Phase.IDLE)

    def kill(self, why: str, *, only_starting: bool = False) -> None:
        """End the engine at once, from any thread; its calls then fail, saying `why`."""
        with self._lock:
            idle = self._phase is _Phase.IDLE
            if idle or self._killed_at is not None or (only_starting and self._phase is not _Phase.STARTING):
                return
            self._killed_at, self._killed_why = time.monotonic(), why
            log.warning("killing the engine: %s", why)
            with contextlib.suppress(Exception):
                self._engine.kill()

    def inspect(self) -> str | None:
        """Kill an engine that is past a deadline; from any thread.

        Returns:
            Why the worker itself has to end, if even a killed engine does not let go of it.
        """
        retry, now = self._spec.retry, time.monotonic()
        if self._phase is _Phase.ENDING:
            return "the engine does not end" if now - self._since > STUCK_SECONDS else None
        if self._killed_at is not None:
            stuck = self._phase is not _Phase.IDLE and now - self._killed_at > STUCK_SECONDS
            return f"{self._killed_why}; and the engine does not end" if stuck else None
        if self._phase is _Phase.STARTING and now - self._since > retry.startup_seconds:
            self.kill(f"the engine did not start within retry.startup_seconds={retry.startup_seconds:g}")
        elif self._phase is _Phase.RUNNING and self._waiting and self.silence > self._stall_seconds:
            self.stalled = True
            self.kill(self._why_stalled())
        return None

    def _why_stalled(self) -> str:
        retry = self._spec.retry
        if self._stall_seconds == retry.stall_seconds:
            return f"the engine made no token for retry.stall_seconds={retry.stall_seconds:g}"
        return (
            f"the engine gave no answer for {self._stall_seconds:g} s, although it gives up a row after "
            f"retry.row_timeout_seconds={retry.row_timeout_seconds:g}"
        )

    def _enter(self, phase: _Phase) -> None:
        with self._lock:
            self._phase, self._since = phase, time.monotonic()
