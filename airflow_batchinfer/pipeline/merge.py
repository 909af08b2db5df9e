"""Merge: publish a proven run's results and dead letters, each by one atomic commit.

Rows are read from the parts of the commits that the ledger names, joined by `row_id`, counted on the
way, and the commit is made only if the counts are those of the run's account. Publishing takes the
place of what the run published before, so a second merge changes nothing.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from pydantic import Field

from airflow_batchinfer.errors import CorruptError, GateError, StaleLedgerError, UnreadableError
from airflow_batchinfer.pipeline import dead_letters, results
from airflow_batchinfer.pipeline.accounting import Account, answered_of_run, current_account, verdict_on
from airflow_batchinfer.pipeline.answered import AnsweredBatch, planned_row_ids
from airflow_batchinfer.pipeline.export import OrderedRows, write_exports
from airflow_batchinfer.pipeline.kept_rows import kept_results
from airflow_batchinfer.pipeline.letters_of_run import ReplayNote, overlaid, replays_of, run_letters
from airflow_batchinfer.pipeline.published import remember_published
from airflow_batchinfer.pipeline.scratch import scratch_folder
from airflow_batchinfer.pipeline.split import load_plan
from airflow_batchinfer.pipeline.standing import merged_rows, planned_otherwise, standing_of
from airflow_batchinfer.pipeline.tables import Publication, dataset_of, open_table, publish, rows_where
from airflow_batchinfer.run.document import Document, FormatVersion, Timestamp
from airflow_batchinfer.run.layout import DEAD_LETTERS, RunLayout, results_table
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store


class MergeResult(Document):
    """What merge published, and from which ledger."""

    format_version: FormatVersion = 1
    created_at: Timestamp
    ledger_sha256: str
    quarantine_sha256: str = Field(description="Digest of what validation had taken out of the results.")
    results_table: str = Field(description="Address of the Delta table.")
    results_version: int
    results: int = Field(description="Rows that this run answered, in the results table.")
    kept: int = Field(0, description="Rows that keep an earlier result, in the results table.")
    dead_letter_table: str = Field(description="Address of the Delta table.")
    dead_letters_version: int
    dead_letters: int = Field(description="Rows of this run in the dead-letter table.")
    exports: list[str] = Field(default_factory=list, description="Files written.")

    def is_of(self, account: Account) -> bool:
        """Whether it was published from this very account."""
        return (self.ledger_sha256, self.quarantine_sha256) == account.digests


def merge(store: Store, folder: str) -> MergeResult:
    """Publish the run and write `merge.json`.

    Raises:
        StaleLedgerError: no complete ledger of this plan, a shard's chosen commit is not the one it names,
            validation has not seen it and takes rows out, or the run was planned anew and published since.
        GateError: validation holds the results back.
        CorruptError: a file is damaged, or the rows do not add up to the account; nothing is published.
        StoreError: a table or file cannot be written.
    """
    plan = load_plan(store, folder)
    account = current_account(store, plan)
    _obey_verdict(store, plan, account.ledger)
    result = _already_published(store, plan, account)
    if result is None:
        with scratch_folder("merge") as scratch:
            result = _Merge(store, plan, account, scratch).run()
        result.write(store, RunLayout(folder).merge)
    remember_published(store, plan)  # a merge killed just before this has not
    return result


def _already_published(store: Store, plan: Plan, account: Account) -> MergeResult | None:
    """What an earlier merge of the same account published, if the tables still have it."""
    try:
        result = MergeResult.read(store, RunLayout(plan.folder).merge)
        home = load_plan(store, plan.replay_of.folder) if plan.replay_of else plan
        standing_of(store, home)
    except (FileNotFoundError, UnreadableError):
        return None
    return result if result.is_of(account) else None


def _obey_verdict(store: Store, plan: Plan, ledger: Ledger) -> None:
    verdict = verdict_on(store, plan.folder, ledger)
    if verdict is not None and not verdict.publish:
        raise GateError(verdict.message)


class _Merge:
    """One publication of one run."""

    def __init__(self, store: Store, plan: Plan, account: Account, scratch: Path) -> None:
        self._store = store
        self._plan = plan
        self._account = account
        self._scratch = scratch
        self._columns = results.ResultColumns(plan)
        self._home = load_plan(store, plan.replay_of.folder) if plan.replay_of else plan
        """The run whose rows these are: another one if this run is a replay."""
        self._results_key = results_table(plan.job)
        # Publications for one run go through one after the other, whichever run makes them.
        self._writer = f"batchinfer/{plan.job}/{self._home.run_id}"

    def run(self) -> MergeResult:
        """See `merge`."""
        if self._plan.replay_of:
            self._check_home()
        self._check_replays()
        ledger, succeeded = self._account.ledger, self._account.succeeded
        results_version = publish(self._store, self._results_key, self._results())
        if self._plan.replay_of:
            self._note_replay()
        letters_version = publish(self._store, DEAD_LETTERS, self._letters())
        exports = self._export() if self._plan.spec.export else []
        return MergeResult(
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            ledger_sha256=ledger.digest(),
            quarantine_sha256=self._account.quarantine.digest(),
            results_table=self._store.uri_of(self._results_key),
            results_version=results_version,
            results=succeeded,
            kept=self._plan.kept.rows if self._plan.kept else 0,
            dead_letter_table=self._store.uri_of(DEAD_LETTERS),
            dead_letters_version=letters_version,
            dead_letters=ledger.rows - succeeded,
            exports=exports,
        )

    def _check_home(self) -> None:
        """A replay repairs what is published, and published from the plan and the ledger that are there."""
        if self._plan.replay_of and self._plan.replay_of.created_at != self._home.created_at:
            raise StaleLedgerError(
                f"{self._home.folder} has another plan than when this replay was planned: plan a new replay"
            )
        try:
            merged = MergeResult.read(self._store, RunLayout(self._home.folder).merge)
        except FileNotFoundError as error:
            raise StaleLedgerError(
                f"run {self._home.run_id!r} is not published yet: run its merge, then clear this one"
            ) from error
        if not merged.is_of(current_account(self._store, self._home)):
            raise StaleLedgerError(
                f"run {self._home.run_id!r} was published from an older ledger or verdict: clear its merge, "
                "then this one"
            )

    def _check_replays(self) -> None:
        """Fail before anything is published if letters of a merged replay cannot be told afterwards."""
        try:
            for replay in self._replays():
                current_account(self._store, replay)
        except (StaleLedgerError, UnreadableError) as error:
            raise type(error)(
                f"a replay merged into {self._home.folder} does not hold any more: {error}; or delete its "
                "folder: what it resolved stays in the results, what it left dead is as the run left it"
            ) from error

    def _note_replay(self) -> None:
        plan = self._plan
        note = ReplayNote(run_id=plan.run_id, folder=plan.folder, created_at=plan.created_at)
        note.write(self._store, RunLayout(self._home.folder).replay(plan.run_id))

    def _results(self) -> Publication:
        def replacement(table: DeltaTable) -> tuple[dict[str, str], Iterator[pa.RecordBatch]]:
            dataset = dataset_of(self._store, self._results_key, table)
            where, elsewhere = {"run_id": self._home.run_id}, np.empty(0, np.int64)
            if not self._replaces_all(dataset):
                where |= {"merged_by": self._plan.run_id}
                elsewhere = self._standing_elsewhere(dataset)
            return where, chain(
                self._fresh(elsewhere), self._kept(dataset, exact=False), self._resolved_before(dataset)
            )

        return Publication(
            schema=self._columns.schema,
            replacement=replacement,
            partition_by=results.PARTITION_BY,
            writer=self._writer,
        )

    def _fresh(self, elsewhere: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """Results that this run answered, but for rows whose result another run has published."""
        for batch in self._counted():
            rows = self._columns.rows(batch, exact=False)
            if rows is not None and len(elsewhere):
                rows = rows.filter(pc.invert(pc.is_in(rows.column("row_id"), pa.array(elsewhere))))
            if rows is not None and rows.num_rows:
                yield rows

    def _kept(self, dataset: ds.Dataset | None, *, exact: bool) -> Iterator[pa.RecordBatch]:
        """Results that this run takes over from the last published one."""
        return kept_results(self._store, self._plan, self._columns, dataset, self._scratch, exact=exact)

    def _resolved_before(self, dataset: ds.Dataset) -> Iterator[pa.RecordBatch]:
        """Results of an earlier generation of this replay for rows that this one does not send.

        The run may have answered such a row itself since then, and its merge have left it to the replay.
        """
        if self._plan.replay_of is None:
            return
        planned = pa.array(planned_row_ids(self._store, self._plan))
        where = (ds.field("run_id") == self._home.run_id) & (ds.field("merged_by") == self._plan.run_id)
        for batch in rows_where(dataset, where):
            rows = batch.filter(pc.invert(pc.is_in(batch.column("row_id"), planned)))
            if rows.num_rows:
                yield rows.select(self._columns.schema.names).cast(self._columns.schema)

    def _replaces_all(self, dataset: ds.Dataset) -> bool:
        """Whether the table has the run's rows by an older plan, of which nothing may stay.

        Raises:
            StaleLedgerError: it has them by a newer plan, or by another one than this replay repairs.
        """
        other = planned_otherwise(self._store, self._home, dataset)
        if other is None:
            return False
        if self._plan.replay_of or other > datetime.fromisoformat(self._home.created_at):
            raise StaleLedgerError(
                f"run {self._home.run_id!r} is published by another plan, made {other.isoformat()}, and "
                f"merging {self._plan.folder} would undo that: nothing was published; "
                + ("plan a new replay" if self._plan.replay_of else "start a new run if you want it anew")
            )
        return True

    def _standing_elsewhere(self, dataset: ds.Dataset) -> npt.NDArray[np.int64]:
        """Rows of the run that replays, but this one, have put into the results.

        To a replay, those count as well that the run itself put there since the replay was planned.
        """
        among = planned_row_ids(self._store, self._plan) if self._plan.replay_of else None
        return merged_rows(dataset, self._home.run_id, but_by=[self._plan.run_id], among=among)

    def _replays(self) -> list[Plan]:
        """Replays that were merged into the run, oldest first, without those whose folder is gone.

        What such a one resolved is in the results, and what it left dead is as the run left it.
        """
        notes = replays_of(self._store, RunLayout(self._home.folder))
        plans = [Plan.find(self._store, RunLayout(note.folder).plan) for note in notes]
        return [plan for plan in plans if plan is not None]

    def _letters(self) -> Publication:
        def replacement(_: DeltaTable) -> tuple[dict[str, str], Iterator[pa.RecordBatch]]:
            replays = self._replays()
            table = open_table(self._store, self._results_key)
            resolved = np.empty(0, np.int64)
            if table is not None:
                dataset = dataset_of(self._store, self._results_key, table)
                resolved = merged_rows(dataset, self._home.run_id, but_by=[self._home.run_id])
            letters = overlaid(
                _dead_letters(self._store, self._home),
                [_dead_letters(self._store, plan) for plan in replays],
                resolved,
                Path(tempfile.mkdtemp(dir=self._scratch)),
            )
            return {"job": self._plan.job, "run_id": self._home.run_id}, letters

        return Publication(
            schema=dead_letters.SCHEMA,
            replacement=replacement,
            partition_by=dead_letters.PARTITION_BY,
            writer=self._writer,
        )

    def _export(self) -> list[str]:
        rows = OrderedRows(self._scratch, self._columns.exact_schema)
        for batch in answered_of_run(self._store, self._plan, self._account):
            exact = self._columns.rows(batch, exact=True)
            if exact is not None:
                rows.add(exact)
        table = open_table(self._store, self._results_key)
        dataset = None if table is None else dataset_of(self._store, self._results_key, table)
        for kept in self._kept(dataset, exact=True):
            rows.add(kept)
        return write_exports(self._plan, rows, self._scratch)

    def _counted(self) -> Iterator[AnsweredBatch]:
        """All answered rows; fails at the end unless they add up to the account."""
        counts: Counter[str] = Counter()
        for batch in answered_of_run(self._store, self._plan, self._account):
            for count in pc.value_counts(batch.answers.column("outcome")).to_pylist():
                counts[count["values"]] += count["counts"]
            yield batch
        stated = {outcome: n for outcome, n in self._account.counts.items() if n}
        if dict(counts) != stated:
            raise CorruptError(
                f"the rows of {self._plan.folder} count {dict(counts)}, its account {stated}: nothing was "
                "published; clear reconcile with its downstream tasks"
            )


def _dead_letters(store: Store, plan: Plan) -> Iterator[pa.RecordBatch]:
    """Letters that one run leaves."""
    return run_letters(plan, answered_of_run(store, plan, current_account(store, plan), dead_only=True))
