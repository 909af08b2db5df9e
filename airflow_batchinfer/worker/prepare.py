"""Rows made ready ahead of the engine, in a thread of its own: read, render, tokenise, order.

It begins while the engine loads and stays a fixed distance ahead of it, so memory stays flat.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from airflow_batchinfer.errors import InputError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.prompts.builder import Prepared, PromptBuilder, Rejected
from airflow_batchinfer.prompts.tokens import context_length, load_tokenizer
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.shard import COPIES, INPUT, ROW_ID
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store
from airflow_batchinfer.worker.ordering import order
from airflow_batchinfer.worker.reader import read_rows
from airflow_batchinfer.worker.resume import resume
from airflow_batchinfer.worker.suspects import EarlierDeaths, earlier_deaths
from airflow_batchinfer.worker.work import Result, Row, ShardRun, result_of

log = logging.getLogger(__name__)

_READ_ROWS = 256
"""Rows that are read, rendered and tokenised in one go."""

_BLOCK_ROWS = 1024
_BLOCK_TOKENS = 1 << 20
"""A block is what is put in order: so many rows or prompt tokens, whichever comes first."""

_BLOCKS_AHEAD = 1


@dataclass(slots=True)
class Block:
    """What preparation hands over: rows in order, and outcomes that need no engine."""

    shard: ShardRun
    rows: list[Row] = field(default_factory=list)
    settled: list[tuple[Result, Reason, int]] = field(default_factory=list)
    """Results of rows that are never sent, each with its reason and weight."""
    resumed: Counter[Reason | None] = field(default_factory=Counter)
    """Input rows whose outcome earlier attempts made durable, by the reason they did not succeed."""
    last: bool = False
    """Whether the shard ends with it."""
    tokens: int = 0


class Preparation:
    """Prepares the rows of several shards, one shard after another."""

    def __init__(self, store: Store, plan: Plan, shards: Sequence[ShardRun], *, takes_tokens: bool) -> None:
        """Set up; `start` begins.

        Args:
            store: where.
            plan: the run's plan.
            shards: the shard runs to prepare; what earlier attempts did is looked up for each.
            takes_tokens: whether the engine wants token ids.
        """
        self._store = store
        self._plan = plan
        self._layout = RunLayout(plan.folder)
        self._shards = shards
        self._takes_tokens = takes_tokens
        self._blocks: queue.Queue[Block | BaseException | None] = queue.Queue(_BLOCKS_AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="preparation", daemon=True)
        self.engine_needed = threading.Event()
        """Set when it is known whether any row needs the engine; see `rows_found`."""
        self.rows_found = False
        self.exhausted = False
        """Whether `next_block` has given everything."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def next_block(self, timeout: float) -> Block | None:
        """The next block, or none if there is none within `timeout` seconds or at all (`exhausted`).

        Raises:
            BatchInferError: preparation failed; the blocks before are unharmed.
        """
        if self.exhausted:
            return None
        try:
            item = self._blocks.get(timeout=timeout) if timeout > 0 else self._blocks.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, Block):
            return item
        self.exhausted = True
        if item is not None:
            raise item
        return None

    def stop(self) -> None:
        """Prepare no more; what was prepared is dropped."""
        self._stopped.set()
        self.exhausted = True

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            for shard in self._shards:
                self._prepare_shard(shard)
        except _Stopped:
            pass
        except BaseException as error:
            end = error
        self.engine_needed.set()
        self._put(end)

    def _put(self, item: Block | BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                return self._blocks.put(item, timeout=0.2)
            except queue.Full:
                continue

    def _prepare_shard(self, shard: ShardRun) -> None:
        plan, planned = self._plan, shard.planned
        resumed = resume(self._store, self._layout, planned, plan.fingerprint, shard.epoch)
        deaths = earlier_deaths(
            self._store,
            self._layout,
            planned.shard,
            shard.epoch,
            resumed.by_reason.get(Reason.ENGINE_KILLED, ()),
            plan.spec.checkpoint.progress_seconds,
        )
        shard.take(resumed)
        if resumed.done:
            log.info("shard %d: %d rows resumed", planned.shard, len(resumed.done))
        block, matched = Block(shard), 0
        for batch in read_rows(self._store, planned, _READ_ROWS):
            if self._stopped.is_set():
                raise _Stopped
            pending = self._pending(block, batch)
            matched += batch.num_rows - len(pending)
            if pending:
                self._fill(block, pending, deaths)
            if len(block.rows) + len(block.settled) >= _BLOCK_ROWS or block.tokens >= _BLOCK_TOKENS:
                self._hand_over(block)
                block = Block(shard)
        if matched != len(resumed.done):
            raise InputError(
                f"shard {planned.shard}: earlier parts hold {len(resumed.done) - matched} rows that are "
                f"not in {planned.rows_key}; remove the parts in {self._layout.shard(planned.shard)}"
            )
        block.last = True
        self._hand_over(block)

    def _pending(self, block: Block, batch: pa.RecordBatch) -> list[_Frozen]:
        """The batch's rows that have no outcome; the others are counted for what they came to."""
        ids = batch.column(ROW_ID).to_pylist()
        copies = batch.column(COPIES).to_pylist()
        earlier = block.shard.resumed
        done = earlier.done
        if not done:
            inputs = batch.column(INPUT).to_pylist()
            return [_Frozen(*values) for values in zip(ids, copies, inputs, strict=True)]
        keep = [row_id not in done for row_id in ids]
        for row_id, extra, kept in zip(ids, copies, keep, strict=True):
            if not kept:
                block.resumed[earlier.reason_of(row_id)] += 1 + extra
        inputs = batch.column(INPUT).filter(pa.array(keep)).to_pylist()
        kept_rows = [(i, c) for i, c, kept in zip(ids, copies, keep, strict=True) if kept]
        return [_Frozen(i, c, values) for (i, c), values in zip(kept_rows, inputs, strict=True)]

    def _fill(self, block: Block, rows: list[_Frozen], deaths: EarlierDeaths) -> None:
        prepared = self._builder().build([row.input for row in rows])
        now = int(time.time() * 1000)
        for frozen, made in zip(rows, prepared, strict=True):
            row = Row(block.shard, frozen.row_id, 1 + frozen.copies, _NOTHING)
            evidence = deaths.culprits.get(frozen.row_id)
            if evidence is not None:
                made = Rejected(Reason.ENGINE_KILLED, evidence)
            if isinstance(made, Rejected):
                result = result_of(row, made.reason, now, message=made.message)
                block.settled.append((result, made.reason, row.weight))
                continue
            row.prepared = made
            row.deaths = deaths.deaths[frozen.row_id]
            block.rows.append(row)
            block.tokens += made.tokens
        if block.rows and not self.rows_found:
            self.rows_found = True
            self.engine_needed.set()

    def _hand_over(self, block: Block) -> None:
        block.rows = order(block.rows)
        self._put(block)

    def _builder(self) -> PromptBuilder:
        if self._built is None:
            self._built = prompt_builder(self._plan.spec, takes_tokens=self._takes_tokens)
        return self._built

    _built: PromptBuilder | None = None


def prompt_builder(spec: JobSpec, *, takes_tokens: bool) -> PromptBuilder:
    """The job's prompt builder; loads the tokenizer if anything has to be counted.

    Raises:
        SpecError: the tokenizer, the template or the lengths cannot work.
        EngineError: the tokenizer cannot be loaded now, as the hub is away, or the server does not answer.
    """
    if takes_tokens:
        return PromptBuilder(spec, load_tokenizer(spec), context_length(spec))
    if spec.overlong.policy == "reject" and spec.model.tokenizer is None:
        return PromptBuilder(spec, None, None, takes_tokens=False)
    return PromptBuilder(spec, load_tokenizer(spec), _length_at_the_server(spec), takes_tokens=False)


def _length_at_the_server(spec: JobSpec) -> int:
    """The context of an engine that takes text, whose `model.name` need not be a model's on the hub."""
    if spec.model.backend != "openai":
        return context_length(spec)
    from airflow_batchinfer.worker.engines import openai

    return openai.context_length(spec)


@dataclass(frozen=True, slots=True)
class _Frozen:
    """A row as it stands in the shard's file."""

    row_id: int
    copies: int
    input: dict[str, object]


class _Stopped(Exception):
    pass


_NOTHING = Prepared(())
