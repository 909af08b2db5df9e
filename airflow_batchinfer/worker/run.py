"""Puts a worker together and runs it: plan in, commits out, an exit code that says how it went."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence

from airflow_batchinfer.errors import BatchInferError, EngineError, ExitCode, InputError, SpecError
from airflow_batchinfer.run.epoch import new_epoch
from airflow_batchinfer.run.integrity import sound_commit
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan, PlannedShard
from airflow_batchinfer.run.stop import Stop, set_stop
from airflow_batchinfer.store import Store, open_store
from airflow_batchinfer.worker.checkpoint import PartWriter
from airflow_batchinfer.worker.control import Control
from airflow_batchinfer.worker.guard import GuardedEngine
from airflow_batchinfer.worker.loop import Loop, exit_of
from airflow_batchinfer.worker.prepare import Preparation
from airflow_batchinfer.worker.processes import (
    die_with_parent,
    end_leftovers,
    identity,
    mark_children,
    process_age,
)
from airflow_batchinfer.worker.progress import ProgressWriter, State
from airflow_batchinfer.worker.reporter import Reporter
from airflow_batchinfer.worker.retrying import with_retries
from airflow_batchinfer.worker.settings import Settings
from airflow_batchinfer.worker.signals import SignalPipe
from airflow_batchinfer.worker.suspects import Announcer
from airflow_batchinfer.worker.watchdog import Watchdog
from airflow_batchinfer.worker.work import ShardRun

log = logging.getLogger(__name__)

_LEAVING_SECONDS = 10.0
"""Patience with the store once all results are durable."""

_SAVING_SECONDS = 60.0
"""Patience with the store while they are not, and the loop is held for good."""

_STATES: dict[ExitCode, State] = {
    ExitCode.COMMITTED: "committed",
    ExitCode.RECLAIMED: "reclaimed",
    ExitCode.STOPPED: "stopped",
}


def run_worker(settings: Settings, say: Callable[[str], None]) -> ExitCode:
    """Run a worker's shards; from the main thread only, once a process.

    Args:
        settings: what to run.
        say: prints the one line that tells a person why the worker ended.

    Returns:
        `COMMITTED`, `RECLAIMED` or `STOPPED`.

    Raises:
        BatchInferError: anything else; its `exit_code` is the process's.
    """
    signals, control = SignalPipe(), Control()
    if settings.parent is not None and die_with_parent(settings.parent):
        say("the parent process has ended")
        return ExitCode.RECLAIMED
    store = open_store(settings.store, settings.store_options)
    plan = _plan(store, settings.folder)
    layout = RunLayout(plan.folder)
    planned = []
    for shard in _planned(plan, settings.shards):
        for received in signals.received():  # no watchdog heeds them yet, and each shard's look may take long
            say(f"told to leave by {received.name}")
            return ExitCode.RECLAIMED
        if sound_commit(store, layout, shard.shard, plan.fingerprint) is None:
            planned.append(shard)
    if not planned:
        log.info("every shard has its commit already")
        return ExitCode.COMMITTED
    mark_children()
    end_leftovers()
    worker = _Worker(store, layout, plan, planned, control, signals, say)
    return worker.run()


class _Worker:
    """The parts of one worker, wired."""

    def __init__(
        self,
        store: Store,
        layout: RunLayout,
        plan: Plan,
        planned: Sequence[PlannedShard],
        control: Control,
        signals: SignalPipe,
        say: Callable[[str], None],
    ) -> None:
        self._control = control
        self._say = say
        self._shards = [ShardRun(p, new_epoch()) for p in planned]
        epochs = {run.shard: run.epoch for run in self._shards}
        self._engine = GuardedEngine(plan.spec)
        self._watchdog = Watchdog(plan.spec, control, self._engine, signals, self._give_up)
        self._reporter = Reporter(store, plan, self._shards, control, self._report)
        self._progress = ProgressWriter(store, layout, self._shards, process_age)
        self._writer = PartWriter(store, layout, plan.fingerprint, process_age)
        self._announcer = Announcer(
            store, lambda shard: (epochs[shard], layout.suspects(shard, epochs[shard])), identity()
        )
        preparation = Preparation(store, plan, self._shards, takes_tokens=self._engine.takes_tokens)
        self._loop = Loop(
            plan.spec,
            self._shards,
            preparation,
            self._engine,
            self._writer,
            self._announcer,
            control,
            self._reporter.up_to_date,
            self._stop_line,
        )
        self._store, self._plan = store, plan
        self._marking: threading.Thread | None = None

    def run(self) -> ExitCode:
        """Run to the end, whichever it is; what was paid for is durable when this returns or raises."""
        error: Exception | None = None
        self._watchdog.start()
        self._reporter.start()
        try:
            self._reporter.look()
            if not self._control.leaving:
                self._loop.run()
        except Exception as raised:
            error = raised
        finally:
            if error is None:
                self._engine.close()
            else:
                with contextlib.suppress(EngineError):  # it has been said, or does not matter any more
                    self._engine.bury()
            self._finish_writing()
            self._watchdog.close()
        # A store that fails is the better explanation of whatever else went wrong.
        error = self._writer.error or self._announcer.error or error
        if error is not None:
            # Rows stay named where the engine failed, and where a bug may have met one of them.
            foreseen = isinstance(error, BatchInferError)
            why = str(error) if foreseen else f"{type(error).__name__}: {error}"
            self._take_leave("failed", why, forget=foreseen and not isinstance(error, EngineError))
            raise error
        code = exit_of(self._control, self._shards)
        self._take_leave(_STATES[code], self._control.message, forget=True)
        if code is not ExitCode.COMMITTED:
            self._say(self._control.message)
        return code

    def _take_leave(self, state: State, message: str, *, forget: bool) -> None:
        """Set down how it ended; all results are durable by now, so a slow store is not waited for."""

        def set_down() -> None:
            self._announcer.close(forget=forget)
            self._reporter.close()
            self._write_progress(state, message)

        _within(_LEAVING_SECONDS, set_down)

    def _report(self) -> None:
        self._write_progress(self._loop.state)

    def _stop_line(self, why: str) -> None:
        """Stop this worker, and by the marker in the store all others of the run."""
        by = f"worker of shard {', '.join(f'{s.shard:04d}' for s in self._shards)}"
        log.error("stopping the line: %s", why)
        stop = Stop(created_at="", by=by, reason=why)
        grace = self._plan.spec.checkpoint.grace_seconds
        self._control.leave(ExitCode.STOPPED, stop.advice(self._plan.folder), grace)
        # The loop must not wait for the store: an engine that nobody polls seems to stand still, and ends.
        self._marking = threading.Thread(
            target=self._set_marker, args=(why, by), name="stop-marker", daemon=True
        )
        self._marking.start()

    def _set_marker(self, why: str, by: str) -> None:
        def write() -> None:
            set_stop(self._store, self._plan.folder, why, by)

        try:
            with_retries(write)
        except Exception as error:
            problem = f"the other workers go on, as the stop marker cannot be written: {error}"
            log.error("%s", problem)
            self._control.message += f"; {problem}"

    def _finish_writing(self) -> None:
        """Wait until parts and stop marker are durable, or have failed."""
        self._writer.close()
        if self._marking is not None:
            self._marking.join()

    def _write_progress(self, state: State, message: str = "") -> None:
        self._progress.write(
            state,
            in_flight=self._loop.in_flight,
            restarts=max(0, self._engine.starts - 1),
            message=message,
        )

    def _give_up(self, why: str) -> None:
        """The loop is held by an engine that does not let go: leave without it, with all that is done."""
        try:
            _within(_SAVING_SECONDS, lambda: self._save_what_is_done(why))
            self._say(why)  # the last word: whatever is logged after it would pass for the reason
        finally:
            os._exit(ExitCode.ENGINE_FAILED)

    def _save_what_is_done(self, why: str) -> None:
        for shard in self._shards:
            self._writer.flush(shard)
        self._finish_writing()
        self._write_progress("failed", why)


def _within(seconds: float, call: Callable[[], None]) -> None:
    """Wait for a call for so long, and no longer; the process leaves without it."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def _plan(store: Store, folder: str) -> Plan:
    key = RunLayout(folder).plan
    try:
        return Plan.read(store, key)
    except FileNotFoundError as error:
        raise InputError(f"{store.uri_of(key)} does not exist: give the folder of a planned run") from error


def _planned(plan: Plan, shards: Sequence[int]) -> list[PlannedShard]:
    by_number = {shard.shard: shard for shard in plan.shards}
    if unknown := [str(number) for number in shards if number not in by_number]:
        raise SpecError(
            f"--shards: the plan has no shard {', '.join(unknown)}; it has 0 to {len(plan.shards) - 1}"
        )
    return [by_number[number] for number in shards]
