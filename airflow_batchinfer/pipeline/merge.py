"""Merge: publish a proven run's results and dead letters, each by one atomic commit.

Rows are read from the parts of the commits that the ledger names, joined by `row_id`, counted on the
way, and the commit is made only if the counts are the ledger's. Publishing takes the place of what the
run published before, so a second merge changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pydantic import Field

from airflow_batchinfer.errors import CorruptError, GateError, StaleLedgerError
from airflow_batchinfer.pipeline import dead_letters, results
from airflow_batchinfer.pipeline.answered import AnsweredBatch, answered_rows
from airflow_batchinfer.pipeline.export import OrderedRows, write_exports
from airflow_batchinfer.pipeline.published import remember_published
from airflow_batchinfer.pipeline.scratch import scratch_folder
from airflow_batchinfer.pipeline.split import load_plan
from airflow_batchinfer.pipeline.tables import Publication, publish
from airflow_batchinfer.run.commit import chosen_commit
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.layout import DEAD_LETTERS, RunLayout, results_table
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.outcome import Outcome
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.pipeline.verdict import Verdict
from airflow_batchinfer.store import Store


class MergeResult(Document):
    """What merge published, and from which ledger."""

    format_version: int = 1
    created_at: str
    ledger_sha256: str
    results_table: str = Field(description="Address of the Delta table.")
    results_version: int
    results: int = Field(description="Rows of this run in the results table.")
    dead_letter_table: str = Field(description="Address of the Delta table.")
    dead_letters_version: int
    dead_letters: int = Field(description="Rows of this run in the dead-letter table.")
    exports: list[str] = Field(default_factory=list, description="Files written.")


def merge(store: Store, folder: str) -> MergeResult:
    """Publish the run and write `merge.json`.

    Raises:
        StaleLedgerError: no complete ledger of this plan, or a shard's chosen commit is not the one it names.
        GateError: validation holds the results back.
        CorruptError: a file is damaged, or the rows do not add up to the ledger; nothing is published.
        StoreError: a table or file cannot be written.
    """
    plan = load_plan(store, folder)
    ledger = current_ledger(store, plan)
    _obey_verdict(store, plan, ledger)
    with scratch_folder("merge") as scratch:
        result = _Merge(store, plan, ledger, scratch).run()
    result.write(store, RunLayout(folder).merge)
    remember_published(store, plan)
    return result


def current_ledger(store: Store, plan: Plan) -> Ledger:
    """The run's ledger, if it is complete and no reader would choose other commits today.

    Raises:
        StaleLedgerError: it is not; says what differs and what to clear.
    """
    layout = RunLayout(plan.folder)
    remedy = "clear reconcile with its downstream tasks"
    try:
        ledger = Ledger.read(store, layout.ledger)
    except FileNotFoundError as error:
        raise StaleLedgerError(f"{plan.folder} has no ledger: {remedy}") from error
    if ledger.plan_sha256 != plan.digest():
        raise StaleLedgerError(f"the ledger of {plan.folder} was made for another plan: {remedy}")
    if not ledger.complete:
        first = ledger.problems[0] if ledger.problems else "its sums do not add up"
        raise StaleLedgerError(f"the ledger of {plan.folder} is not complete ({first}): {remedy}")
    for line in ledger.shards:
        commit = chosen_commit(store, layout, line.shard, plan.fingerprint)
        if commit is None or commit.digest() != line.commit_sha256:
            now = "has no commit" if commit is None else f"now has the commit {commit.epoch}"
            raise StaleLedgerError(
                f"shard {line.shard} of {plan.folder} {now}, the ledger was made from {line.epoch}: {remedy}"
            )
    return ledger


def _obey_verdict(store: Store, plan: Plan, ledger: Ledger) -> None:
    try:
        verdict = Verdict.read(store, RunLayout(plan.folder).validation)
    except FileNotFoundError:
        return
    if verdict.ledger_sha256 == ledger.digest() and not verdict.publish:
        raise GateError(verdict.message)


class _Merge:
    """One publication of one run."""

    def __init__(self, store: Store, plan: Plan, ledger: Ledger, scratch: Path) -> None:
        self._store = store
        self._plan = plan
        self._ledger = ledger
        self._scratch = scratch
        self._columns = results.ResultColumns(
            plan, run_id=plan.run_id, run_created_at=plan.created_at, generation=plan.generation
        )
        self._writer = f"batchinfer/{plan.job}/{plan.run_id}"

    def run(self) -> MergeResult:
        """See `merge`."""
        key = results_table(self._plan.job)
        results_version = publish(self._store, key, self._results())
        letters_version = publish(self._store, DEAD_LETTERS, self._letters())
        exports = self._export() if self._plan.spec.export else []
        succeeded = self._ledger.counts.get(Outcome.SUCCEEDED, 0)
        return MergeResult(
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            ledger_sha256=self._ledger.digest(),
            results_table=self._store.uri_of(key),
            results_version=results_version,
            results=succeeded,
            dead_letter_table=self._store.uri_of(DEAD_LETTERS),
            dead_letters_version=letters_version,
            dead_letters=self._ledger.rows - succeeded,
            exports=exports,
        )

    def _results(self) -> Publication:
        def batches(_: DeltaTable | None) -> Iterator[pa.RecordBatch]:
            for batch in self._counted():
                rows = self._columns.rows(batch, exact=False)
                if rows is not None:
                    yield rows

        return Publication(
            schema=self._columns.schema,
            batches=batches,
            where={"run_id": self._plan.run_id, "answered_in": self._plan.run_id},
            partition_by=results.PARTITION_BY,
            writer=self._writer,
        )

    def _letters(self) -> Publication:
        writer = dead_letters.LetterWriter(self._plan, self._plan.run_id)

        def batches(_: DeltaTable | None) -> Iterator[pa.RecordBatch]:
            for batch in self._rows(dead_only=True):
                letters = writer.letters(batch)
                if letters is not None:
                    yield letters

        return Publication(
            schema=dead_letters.SCHEMA,
            batches=batches,
            where={"job": self._plan.job, "run_id": self._plan.run_id},
            partition_by=dead_letters.PARTITION_BY,
            writer=self._writer,
        )

    def _export(self) -> list[str]:
        rows = OrderedRows(self._scratch / "ordered", self._columns.exact_schema)
        for batch in self._rows():
            exact = self._columns.rows(batch, exact=True)
            if exact is not None:
                rows.add(exact)
        return write_exports(self._plan, rows, self._scratch)

    def _counted(self) -> Iterator[AnsweredBatch]:
        """All answered rows; fails at the end unless they add up to the ledger."""
        counts: Counter[str] = Counter()
        for batch in self._rows():
            for count in pc.value_counts(batch.answers.column("outcome")).to_pylist():
                counts[count["values"]] += count["counts"]
            yield batch
        stated = {outcome: n for outcome, n in self._ledger.counts.items() if n}
        if dict(counts) != stated:
            raise CorruptError(
                f"the rows of {self._plan.folder} count {dict(counts)}, the ledger {stated}: nothing was "
                "published; clear reconcile with its downstream tasks"
            )

    def _rows(self, *, dead_only: bool = False) -> Iterator[AnsweredBatch]:
        layout = RunLayout(self._plan.folder)
        for shard, line in zip(self._plan.shards, self._ledger.shards, strict=True):
            if dead_only and line.counts.get(Outcome.SUCCEEDED, 0) == line.rows:
                continue
            commit = chosen_commit(self._store, layout, shard.shard, self._plan.fingerprint)
            if commit is None or commit.digest() != line.commit_sha256:
                raise StaleLedgerError(
                    f"shard {shard.shard} of {self._plan.folder} got another commit during merge: "
                    "clear reconcile with its downstream tasks"
                )
            yield from answered_rows(self._store, shard, commit, self._plan.spec.carried)
