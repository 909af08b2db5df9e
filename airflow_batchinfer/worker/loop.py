"""The worker's loop: rows flow from preparation through the engine into parts, and nothing waits.

It is the only place that decides what becomes of a row. Everything slow is elsewhere: preparation,
parts and announcements have threads of their own, and the engine has its own processes.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from itertools import islice

from airflow_batchinfer.errors import AccessError, BatchInferError, EngineError, ExitCode, SpecError
from airflow_batchinfer.outcome import Reason, outcome_of
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.worker.admission import Admission
from airflow_batchinfer.worker.checkpoint import PartWriter
from airflow_batchinfer.worker.control import Control
from airflow_batchinfer.worker.engines.base import (
    FINISHED,
    Completion,
    EngineDied,
    EngineInfo,
    Request,
    RequestFailure,
)
from airflow_batchinfer.worker.guard import EngineGone, GuardedEngine
from airflow_batchinfer.worker.line import Line
from airflow_batchinfer.worker.outputs import output_judge
from airflow_batchinfer.worker.poison import Search
from airflow_batchinfer.worker.prepare import Block, Preparation
from airflow_batchinfer.worker.progress import State
from airflow_batchinfer.worker.suspects import Announcer
from airflow_batchinfer.worker.work import DEATHS_ALONE, DEATHS_TO_ISOLATE, Piece, Row, ShardRun, result_of

log = logging.getLogger(__name__)

_IDLE_SECONDS = 0.25
"""Longest wait for an engine that is as full as it can be."""

_HUNGRY_SECONDS = 0.005
"""The same while requests could be added soon."""

_ANNOUNCED_SECONDS = 0.5
"""Announcements reach so far ahead of what the engine takes in, and at least one window."""

_MOST_BACKOFF_SECONDS = 60.0


class Loop:
    """Runs shards to their end, or until told to leave."""

    def __init__(
        self,
        spec: JobSpec,
        shards: Sequence[ShardRun],
        preparation: Preparation,
        engine: GuardedEngine,
        writer: PartWriter,
        announcer: Announcer,
        control: Control,
        up_to_date: Callable[[], bool],
        stop_line: Callable[[str], None],
    ) -> None:
        """Set up; nothing is started.

        Args:
            spec: the job.
            shards: the shard runs, in order.
            preparation: gives their rows.
            engine: answers them.
            writer: makes outcomes durable.
            announcer: names on disk what may be in the engine.
            control: orders from outside.
            up_to_date: whether rows may be sent, by what is known of the store; asked in each round.
            stop_line: told why, when what comes out is not worth going on; gives the order to leave.

        Raises:
            SpecError: the task cannot be judged.
        """
        self._retry = spec.retry
        self._checkpoint = spec.checkpoint
        self._invalid_attempts = spec.retry.invalid_attempts
        self._seed = spec.sampling.seed
        self._draws = spec.sampling.temperature > 0
        self._judge = output_judge(spec)
        self._shards = shards
        self._open = list(shards)
        self._preparation = preparation
        self._engine = engine
        self._writer = writer
        self._announcer = announcer
        self._control = control
        self._line = Line(spec.line)
        self._up_to_date = up_to_date
        self._stop_line = stop_line
        self._admission = Admission()
        self._info: EngineInfo | None = None
        self._window = 0
        self._search: Search | None = None
        self._group: list[Row] = []
        self._isolated: list[Row] = []
        """Rows that were in flight at several deaths of earlier workers: they run last, and apart."""
        self._failure: BatchInferError | None = None
        self._restarts_left = self._retry.engine_restarts
        self._admitted = 0
        self._announced_at = (time.monotonic(), 0)
        self._now_ms = 0

    @property
    def state(self) -> State:
        """What the worker is doing, for its progress."""
        if self._control.leaving:
            return "draining"
        return "running" if self._engine.started else "loading"

    @property
    def in_flight(self) -> int:
        """Requests in the engine."""
        return len(self._admission.in_flight)

    def run(self) -> None:
        """Run until every shard has its commit handed over, or the worker has to leave.

        What has an outcome when this ends, in whatever way, has been handed to the part writer.

        Raises:
            BatchInferError: something ended the work; every row that was already paid for is kept.
        """
        self._preparation.start()
        self._engine.preload()
        try:
            self._start_when_needed()
            while self._open and not self._may_leave():
                self._step()
        finally:
            self._preparation.stop()
            for shard in self._open:
                self._writer.flush(shard)
        if self._failure is not None and self._open:
            raise self._failure

    def _start_when_needed(self) -> None:
        """Start the engine once a row is known that goes into it; shards without such a row need none."""
        while not self._preparation.engine_needed.wait(_HUNGRY_SECONDS):
            self._check_helpers()
            self._take_blocks()
            self._checkpoint_due()
            if self._control.leaving or self._failure is not None:
                return
        if self._preparation.rows_found:
            self._start_engine()

    def _start_engine(self) -> None:
        """Start the engine. Told to leave meanwhile, it returns without one."""
        try:
            if not self._control.leaving:
                self._info = self._engine.start()
                self._window = self._info.max_in_flight
                self._invalid_attempts = 1 if self._info.greedy else self._retry.invalid_attempts
        except EngineError:
            if not self._control.leaving:
                raise

    def _restart_engine(self) -> None:
        """Start the successor of an engine that has died, `retry.restart_attempts` times if need be.

        The job is known to work, so what fails a start is likely to pass, even where it reads as the job's
        fault: memory not yet given back, a device that is being reset, a hub or a server that is away.
        """
        for attempt in itertools.count(1):
            try:
                return self._start_engine()
            except (AccessError, EngineError, SpecError) as error:
                self._engine.bury()
                if attempt >= self._retry.restart_attempts:
                    raise EngineError(
                        f"{error} (attempt {attempt} of retry.restart_attempts to start it after it had died)"
                    ) from error
                wait = self._backoff(attempt)
                log.warning("the engine did not start again, next attempt in %.1f s: %s", wait, error)
            until = time.monotonic() + wait
            while time.monotonic() < until and not self._control.leaving:
                time.sleep(min(_IDLE_SECONDS, wait))

    def _backoff(self, attempt: int) -> float:
        """Seconds to wait after a failed attempt; the first is 1."""
        return min(self._retry.backoff_seconds * 2.0 ** (attempt - 1), _MOST_BACKOFF_SECONDS)

    def _step(self) -> None:
        """One round: take in, send, collect, checkpoint."""
        self._check_helpers()
        self._take_blocks()
        if self._control.leaving:
            self._drain()
        else:
            self._advance_search()
            self._announce()
        try:
            if self._up_to_date() and not self._control.leaving:
                self._admit()
            if self._admission.in_flight:
                self._collect()
                self._check_deadlines()
            else:
                self._wait_for_work()
            if not self._admission.in_flight:
                self._engine.rest()
        except EngineDied as error:
            self._bury(str(error))
        except (AccessError, SpecError) as error:
            if not self._control.leaving:
                # After a restart the job is known to work.
                raise AccessError(str(error)) if self._engine.starts > 1 else error from error
            self._bury(str(error))
        self._checkpoint_due()

    def _check_helpers(self) -> None:
        """Raise what a thread beside this one has met."""
        for failed in (self._writer.error, self._announcer.error):
            if failed is not None:
                raise failed

    def _may_leave(self) -> bool:
        if self._admission.in_flight:
            return False
        return self._control.leaving or (self._failure is not None and self._quiet)

    @property
    def _quiet(self) -> bool:
        """Whether nothing is in the engine or on its way there."""
        nobody = not self._admission.in_flight and not self._admission.waiting and not self._isolated
        return nobody and self._search is None and self._preparation.exhausted

    # Rows in

    def _take_blocks(self, wait: float = 0.0) -> None:
        """Take prepared rows while fewer wait than the engine may soon ask for.

        If there are none yet, wait for one for up to `wait` seconds.
        """
        while not self._preparation.exhausted and self._wants_rows():
            try:
                block = self._preparation.next_block(wait)
            except BatchInferError as error:
                # What came before is unharmed: finish it, keep it, and only then say what is wrong.
                self._failure = error
                return
            if block is None:
                return
            self._take_block(block)
            wait = 0.0

    def _wants_rows(self) -> bool:
        calm = self._search is None and not self._control.leaving
        slow_store = self._writer.backlog > 2 * self._checkpoint.rows + self._window
        return calm and not slow_store and len(self._admission.ready) <= 2 * self._window

    def _take_block(self, block: Block) -> None:
        shard = block.shard
        for reason, weight in block.resumed.items():
            shard.count(reason, weight)
        for result, reason, weight in block.settled:
            shard.record(result, reason, weight)
        if len(shard.buffer) >= self._checkpoint.rows:
            self._flush(shard)
        self._isolated.extend(row for row in block.rows if row.deaths >= DEATHS_TO_ISOLATE)
        self._admission.add(row for row in block.rows if row.deaths < DEATHS_TO_ISOLATE)
        shard.read_all |= block.last
        shard.last_flush = shard.last_flush or time.monotonic()

    # Into the engine

    def _announce(self) -> None:
        """Name on disk, ahead of need, the rows that will be in the engine next."""
        ready = self._admission.ready
        if self._search is not None or not ready or not self._announcer.idle:
            return
        then, admitted = self._announced_at
        seconds = max(time.monotonic() - then, 0.01)
        ahead = max(self._window, int((self._admitted - admitted) / seconds * _ANNOUNCED_SECONDS))
        if ready[min(ahead // 2, len(ready) - 1)].row.announced:
            return
        rows = {piece.row: None for piece in self._admission.in_flight.values()}
        rows.update(dict.fromkeys(self._admission.retrying()))
        rows.update((piece.row, None) for piece in islice(ready, ahead))
        self._announce_rows(rows, apart=False)
        self._announced_at = (time.monotonic(), self._admitted)

    def _announce_rows(self, rows: dict[Row, None] | list[Row], *, apart: bool) -> None:
        by_shard: dict[int, list[int]] = {}
        for row in rows:
            by_shard.setdefault(row.shard.shard, []).append(row.row_id)
        number = self._announcer.announce(by_shard, apart=apart)
        for row in rows:
            row.announced = row.announced or number

    def _admit(self) -> None:
        room = self._window - len(self._admission.in_flight)
        if room <= 0 or not self._engine.started:
            return
        pieces = self._admission.take(room, self._announcer.durable)
        if not pieces:
            return
        try:
            self._engine.submit([self._request(piece) for piece in pieces])
        except EngineGone:  # nobody of them had a part in its death
            self._admission.put_back(pieces)
            raise
        self._admitted += len(pieces)

    def _request(self, piece: Piece) -> Request:
        prompt = piece.prompt
        return Request(
            piece.key, self._seed + piece.tries - 1, prompt.token_ids, prompt.messages, prompt.text
        )

    def _wait_for_work(self) -> None:
        """Nothing is in flight: wait for rows, an announcement or a retry, whichever is due."""
        if self._control.leaving:
            return
        if not self._engine.started and self._preparation.rows_found:
            self._start_engine()
        if self._admission.ready:
            time.sleep(0.001)
            return
        due = self._admission.next_retry()
        wait = _IDLE_SECONDS if due is None else min(due, _IDLE_SECONDS)
        if not self._preparation.exhausted and self._wants_rows():
            self._take_blocks(wait)
        elif not self._quiet:
            time.sleep(min(wait, _HUNGRY_SECONDS))
        elif self._failure is None:
            for shard in self._open:  # nothing is left to do: either all is done, or the sums are wrong
                shard.check()

    # Out of the engine

    def _collect(self) -> None:
        admission = self._admission
        full = len(admission.in_flight) >= self._window or (
            not admission.waiting and self._preparation.exhausted
        )
        results = self._engine.poll(_IDLE_SECONDS if full else _HUNGRY_SECONDS)
        self._now_ms = int(time.time() * 1000)
        now = time.monotonic()
        for result in results:
            piece = admission.answered(result.key, now)
            if piece is None:  # a second answer, or one that came too late
                log.debug("nobody waits for the answer to %s", result.key)
            elif isinstance(result, Completion):
                self._completed(piece, result)
            else:
                self._failed(piece, result)

    def _completed(self, piece: Piece, completion: Completion) -> None:
        row = piece.row
        row.prompt_tokens += completion.prompt_tokens
        row.output_tokens += completion.output_tokens
        row.cached_tokens += completion.cached_tokens
        finish_reason = completion.finish_reason
        if finish_reason not in FINISHED:
            message = f"the engine ended the request with finish_reason `{finish_reason}`"
            self._failed(piece, RequestFailure(piece.key, Reason.ENGINE_ERROR, message, transient=True))
            return
        with self._engine.unheard():
            output, reason, fault = self._judge(completion)
        if reason is not None:
            piece.invalid += 1
            if piece.invalid < self._invalid_attempts:
                self._admission.retry(piece, 0.0)
                return
            if piece.invalid > 1:
                fault = f"{fault} ({self._attempt(piece)})"
            self._finish(row, reason, message=fault, output=output, finish_reason=finish_reason)
            return
        row.cut_off |= finish_reason == "length"
        row.answers[piece.index] = output
        row.missing -= 1
        if row.missing == 0:
            if len(row.answers) > 1:
                output = row.prepared.combine([answer or "" for answer in row.answers])
            self._finish(
                row,
                None,
                output=output,
                vector=completion.vector,
                finish_reason="length" if row.cut_off else "stop",
                message=f"{self._attempt(piece)}: invalid before" if piece.invalid else None,
            )

    def _attempt(self, piece: Piece) -> str:
        seed = f", with seed {self._seed + piece.tries - 1}" if self._draws else ""
        return f"attempt {piece.tries}{seed}"

    def _failed(self, piece: Piece, failure: RequestFailure) -> None:
        piece.errors += 1
        if failure.transient and piece.errors < self._retry.engine_attempts:
            delay = failure.retry_after
            if delay is None:
                delay = self._backoff(piece.errors)
            self._admission.retry(piece, delay)
            return
        message = failure.message
        if piece.errors > 1:
            message = f"{message} (attempt {piece.errors})"
        self._finish(piece.row, failure.reason, message=message)

    def _finish(self, row: Row, reason: Reason | None, **values: object) -> None:
        """Give a row its outcome."""
        row.finished = True
        row.attempts = max((piece.tries for piece in row.requests), default=0)
        if len(row.requests) > 1 and reason is not None and (keys := self._admission.drop(row)):
            self._engine.abort(keys)
        row.requests = []  # they point back at the row: without this, only the cycle collector frees them
        shard = row.shard
        result = result_of(row, reason, self._now_ms, **values)
        shard.record(result, reason, row.weight)
        why = self._line.see(outcome_of(reason), result.output, result.finish_reason)
        if why is not None and not self._control.leaving:
            self._stop_line(why)
        if len(shard.buffer) >= self._checkpoint.rows:
            self._flush(shard)

    def _check_deadlines(self) -> None:
        """Abort a request that has been running for too long, and only that one, if others move."""
        assert self._info is not None
        if self._info.keeps_row_timeout:
            return
        limit, now = self._retry.row_timeout_seconds, time.monotonic()
        while (piece := self._admission.overdue(limit, now)) is not None:
            if self._engine.silence > limit / 2:
                # Nothing moves. If it stays so, the engine is stuck: this request may not be to blame, and
                # whatever took its place would be blamed next.
                if self._engine.silence > limit:
                    self._engine.stalled = True
                    self._engine.kill(f"the engine made no token for retry.row_timeout_seconds={limit:g}")
                return
            del self._admission.in_flight[piece.key]
            self._engine.abort([piece.key])
            message = f"no answer within retry.row_timeout_seconds={limit:g}"
            self._failed(piece, RequestFailure(piece.key, Reason.TIMED_OUT, message, True, 0.0))

    # Deaths

    def _bury(self, cause: str) -> None:
        """The engine is dead: note who was there, find out who did it, and start its successor."""
        stalled = self._engine.stalled
        suspects = self._admission.died()
        for row in suspects:
            row.deaths += 1
        log.warning("the engine died with %d rows in flight: %s", len(suspects), cause)
        try:
            self._engine.bury()
        except EngineError as error:
            if not self._control.leaving:
                raise EngineError(f"{cause}; {error}") from error
        if self._control.leaving:
            return
        self._investigate(suspects, cause, stalled)
        for shard in self._open:
            self._flush(shard)  # the verdict too: a start may take long, and the node may be the next to go
        if not any(not shard.complete for shard in self._open):
            return
        if self._restarts_left <= 0:
            raise EngineError(
                f"the engine died more than retry.engine_restarts={self._retry.engine_restarts} times; "
                f"the last time: {cause}"
            )
        self._restarts_left -= 1
        self._restart_engine()

    def _investigate(self, suspects: list[Row], cause: str, stalled: bool) -> None:
        search = self._search or Search()
        culprit, freed = search.died(suspects)
        self._admission.release(freed)
        self._group = []
        self._search = search if search.group else None
        if culprit is None:
            return
        log.warning("row %d is the one", culprit.row_id)
        self._now_ms = int(time.time() * 1000)
        if stalled:
            self._finish(culprit, Reason.TIMED_OUT, message=f"alone in the engine: {cause}")
        else:
            self._finish(
                culprit,
                Reason.ENGINE_KILLED,
                message=f"the engine died {culprit.deaths} times with this row in flight, "
                f"{DEATHS_ALONE} of them with no other row beside it: {cause}",
            )
        # The deaths are explained: whoever else was there goes with the rest again.
        self._admission.add(self._isolated)
        self._isolated = []

    def _advance_search(self) -> None:
        """Keep the suspects' present group, and only it, going through the engine."""
        if self._search is None:
            self._begin_late_search()
        if self._search is None:
            return
        while self._group and all(row.finished for row in self._group):
            self._search.survived()
            for shard in self._open:
                self._flush(shard)  # so that not even the next death of the worker runs them again
            self._group = []
            if not self._search.group:
                log.info("no row killed the engine again")
                self._search = None
                self._admission.release()
                return
        if not self._group:
            self._group = self._search.group
            self._admission.set_apart(self._group)
            for row in self._group:
                row.announced = 0
            self._announce_rows(self._group, apart=True)

    def _begin_late_search(self) -> None:
        """Once nothing else is left, turn to the rows that earlier workers died with."""
        quiet = not self._admission.in_flight and not self._admission.waiting
        if not self._isolated or not quiet or not self._preparation.exhausted:
            return
        worst = max(row.deaths for row in self._isolated)
        suspects = [row for row in self._isolated if row.deaths == worst]
        self._isolated = [row for row in self._isolated if row.deaths < worst]
        for row in suspects:
            row.begin()
        self._search = Search(suspects)

    # Out of the worker

    def _drain(self) -> None:
        """Told to leave: let what is in flight finish, or abort it when time is up."""
        if self._control.overdue and self._admission.in_flight:
            log.warning("aborting %d requests in flight", len(self._admission.in_flight))
            self._engine.abort(list(self._admission.in_flight))
            self._admission.in_flight.clear()

    def _checkpoint_due(self) -> None:
        now = time.monotonic()
        for shard in list(self._open):
            if shard.complete:
                self._flush(shard)
                self._writer.commit(shard, self._info)
                self._open.remove(shard)
                self._restarts_left = self._retry.engine_restarts
            elif now - shard.last_flush >= self._checkpoint.seconds:
                self._flush(shard)

    def _flush(self, shard: ShardRun) -> None:
        self._writer.flush(shard)
        shard.last_flush = time.monotonic()


def exit_of(control: Control, shards: Sequence[ShardRun]) -> ExitCode:
    """What the worker's end means, if nothing went wrong."""
    if all(shard.committed or shard.overtaken for shard in shards):
        return ExitCode.COMMITTED
    assert control.reason is not None
    return control.reason
