"""Draw the answers that the judge sees, and plan its run: an ordinary run, inside the folder of its own.

Its name is made from what it is asked and of which answers, so that a second call finds the run that is
there, with all it has paid for, and another rubric, or other answers, make another run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.outcome import Outcome
from airflow_batchinfer.pipeline.accounting import current_ledger
from airflow_batchinfer.pipeline.answers import Ids, ShardAnswers, positions, shards_of, struct_field
from airflow_batchinfer.pipeline.freeze import freeze
from airflow_batchinfer.pipeline.judging import check_judge, judge_columns, judge_job
from airflow_batchinfer.pipeline.sampling import StratifiedSample
from airflow_batchinfer.pipeline.scratch import scratch_folder
from airflow_batchinfer.pipeline.split import load_plan, write_plan
from airflow_batchinfer.run.epoch import new_epoch
from airflow_batchinfer.run.fingerprint import fingerprint
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.plan import InputFile, Plan
from airflow_batchinfer.run.shard import CARRY, INPUT, ROW_ID
from airflow_batchinfer.spec import ChoiceTask, JobSpec, JudgeSpec
from airflow_batchinfer.store import Store


def prepare_judge(store: Store, folder: str) -> Plan:
    """Plan the judge's run over a sample of the answers of the run at `folder`, or return it.

    The sample is drawn from the rows that were sent and succeeded, so that a prompt that stands in the
    input many times counts once. It has no shards if no row succeeded.

    Raises:
        SpecError: the job has no judge, or one that cannot work.
        StaleLedgerError: the run is not complete.
        CorruptError: a part cannot be read.
        StoreError: the store cannot be written.
    """
    plan = load_plan(store, folder)
    judge = plan.spec.judge
    if judge is None:
        raise SpecError(f"the job of {folder} has no `judge`")
    check_judge(plan.spec)
    home = judge_folder(plan, judge, current_ledger(store, plan))
    layout, epoch = RunLayout(home), new_epoch()
    if store.exists(layout.plan):
        return load_plan(store, home)
    job = judge_job(plan.spec, judge)
    with scratch_folder("judge") as scratch:
        reader = AnswerReader(store, plan, judge)
        frozen = freeze(store, job, layout, epoch, reader, scratch)
    return write_plan(store, job, plan.run_id, plan.generation, epoch, frozen, folder=home)


def judge_folder(plan: Plan, judge: JudgeSpec, ledger: Ledger) -> str:
    """Folder of the run in which this judge judges the answers that the ledger proves."""
    answers = [line.commit_sha256 for line in ledger.shards]
    asked = [fingerprint(judge_job(plan.spec, judge)), judge.rows, judge.seed, answers]
    return RunLayout(plan.folder).judge(hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16])


class AnswerReader:
    """A `Reader` of sampled rows: what their prompt read, what they carry, and their answer."""

    files: list[InputFile]
    schema: pa.Schema
    warnings: list[str]
    row_ids: npt.NDArray[np.int64] | None
    tracked: tuple[str, ...] = ()

    def __init__(self, store: Store, plan: Plan, judge: JudgeSpec) -> None:
        """Draw the sample, one shard in memory at a time. Raises `CorruptError`."""
        drawn = StratifiedSample(judge.rows, judge.seed)
        for shard in shards_of(store, plan):
            _offer(drawn, plan.spec, shard)
        chosen = drawn.by_tag()
        rows = [_rows(shard, chosen[shard.planned.shard]) for shard in shards_of(store, plan, chosen)]
        columns = judge_columns(plan.spec)
        nothing = pa.table({name: pa.array([], pa.string()) for name in columns})
        self._table = pa.concat_tables([t.select(columns) for _, t in rows]) if rows else nothing
        self.row_ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in rows)])
        self.schema = self._table.schema
        self.warnings = []
        source = f"{store.uri_of(plan.folder)}#answers"
        self.files = [InputFile(uri=source, size=self._table.nbytes, version=plan.fingerprint)]

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """See `Reader.batches`."""
        yield from self._table.select(list(columns)).combine_chunks().to_batches()

    def unchanged(self) -> bool:
        """A run's rows and commits never change."""
        return True


def _offer(drawn: StratifiedSample, spec: JobSpec, shard: ShardAnswers) -> None:
    """Strata: labels; of other answers, lengths in powers of two."""
    labelled = isinstance(spec.task, ChoiceTask)
    table = shard.answers(["outcome", "output" if labelled else "output_tokens"])
    table = table.filter(pc.equal(table["outcome"], Outcome.SUCCEEDED.value))
    if labelled:
        strata = np.array(table["output"].to_pylist(), np.str_)
    else:
        tokens = table["output_tokens"].to_numpy().astype(np.int64)
        strata = np.floor(np.log2(tokens + 1)).astype(np.int64).astype(np.str_)
    drawn.add(table[ROW_ID].to_numpy(), strata, shard.planned.shard)


def _rows(shard: ShardAnswers, row_ids: Ids) -> tuple[Ids, pa.Table]:
    """Row ids of the given sent rows; and their columns: the prompt's, the carried ones, the answer."""
    spec = shard.plan.spec
    answered = shard.input_rows(["output"], spec.carried, keep=row_ids)
    ids: Ids = answered[ROW_ID].to_numpy()
    sent = shard.sent([ROW_ID, INPUT])
    at, _ = positions(sent[ROW_ID].to_numpy(), ids)
    inputs = sent[INPUT].take(pa.array(at))
    columns = {name: struct_field(answered[CARRY], name) for name in spec.carried}
    columns |= {f.name: struct_field(inputs, f.name) for f in inputs.type.fields}
    return ids, pa.table(columns | {spec.output.column: answered["output"]})
