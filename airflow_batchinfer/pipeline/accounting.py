"""A run's account: what reconcile proved of its commits, less what validation took out of the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from airflow_batchinfer.errors import StaleLedgerError
from airflow_batchinfer.outcome import Outcome, Reason
from airflow_batchinfer.pipeline.answered import AnsweredBatch, answered_rows
from airflow_batchinfer.pipeline.quarantine import Quarantine, quarantined_rows
from airflow_batchinfer.pipeline.verdict import Verdict
from airflow_batchinfer.run.commit import Commit, chosen_commit
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.ledger import Ledger, LedgerShard
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store

_CLEAR_RECONCILE = "clear reconcile with its downstream tasks"


@dataclass(frozen=True)
class Account:
    """The final word on a run's rows. Its counts add up to `ledger.rows`, as the ledger's own do."""

    ledger: Ledger
    quarantine: Quarantine

    @property
    def counts(self) -> dict[str, int]:
        """Input rows by outcome."""
        return self._moved(self.ledger.counts, self.quarantine.rows)

    @property
    def reasons(self) -> dict[str, int]:
        """Dead input rows by reason."""
        reasons = dict(self.ledger.reasons)
        if self.quarantine.rows:
            reason = Reason.EXPECTATION_FAILED.value
            reasons[reason] = reasons.get(reason, 0) + self.quarantine.rows
        return dict(sorted(reasons.items()))

    @property
    def digests(self) -> tuple[str, str]:
        """Digests of ledger and quarantine: what is published or reported from others is out of date."""
        return self.ledger.digest(), self.quarantine.digest()

    @property
    def succeeded(self) -> int:
        """Input rows that are results."""
        return self.counts.get(Outcome.SUCCEEDED, 0)

    def counts_of(self, line: LedgerShard) -> dict[str, int]:
        """One shard's input rows by outcome."""
        quarantined = self.quarantine.of(line.shard)
        return self._moved(line.counts, quarantined.rows if quarantined else 0)

    @staticmethod
    def _moved(counts: dict[str, int], rows: int) -> dict[str, int]:
        if not rows:
            return dict(counts)
        good, bad = Outcome.SUCCEEDED.value, Outcome.INVALID.value
        return counts | {good: counts.get(good, 0) - rows, bad: counts.get(bad, 0) + rows}


def read_account(store: Store, folder: str) -> Account | None:
    """The account after the ledger that the run has; none if it has none. Raises `CorruptError`."""
    ledger = Ledger.find(store, RunLayout(folder).ledger)
    return account_of(store, folder, ledger) if ledger else None


def account_of(store: Store, folder: str, ledger: Ledger) -> Account:
    """The account after a ledger. Nothing is quarantined as long as no verdict judges this very ledger.

    Raises:
        CorruptError: the verdict is damaged.
    """
    verdict = verdict_on(store, folder, ledger)
    return Account(ledger, verdict.quarantine if verdict else Quarantine())


def current_account(store: Store, plan: Plan) -> Account:
    """The run's account, if its ledger is current and validation has seen that ledger where it must.

    Raises:
        StaleLedgerError: it is not; says what differs and what to clear.
    """
    ledger = current_ledger(store, plan)
    verdict = verdict_on(store, plan.folder, ledger)
    if verdict is None and plan.spec.validation.quarantines:
        raise StaleLedgerError(
            f"{plan.folder} was not validated since its newest ledger, and `validation` takes failing "
            "rows out of the results: clear validate with its downstream tasks"
        )
    return Account(ledger, verdict.quarantine if verdict else Quarantine())


def verdict_on(store: Store, folder: str, ledger: Ledger) -> Verdict | None:
    """The verdict that judges this very ledger, if there is one. Raises `CorruptError`."""
    verdict = Verdict.find(store, RunLayout(folder).validation)
    return verdict if verdict is not None and verdict.ledger_sha256 == ledger.digest() else None


def current_ledger(store: Store, plan: Plan) -> Ledger:
    """The run's ledger, if it is complete and no reader would choose other commits today.

    Raises:
        StaleLedgerError: it is not; says what differs and what to clear.
    """
    try:
        ledger = Ledger.read(store, RunLayout(plan.folder).ledger)
    except FileNotFoundError as error:
        raise StaleLedgerError(f"{plan.folder} has no ledger: {_CLEAR_RECONCILE}") from error
    if ledger.plan_sha256 != plan.digest():
        raise StaleLedgerError(f"the ledger of {plan.folder} was made for another plan: {_CLEAR_RECONCILE}")
    if not ledger.complete:
        first = ledger.problems[0] if ledger.problems else "its sums do not add up"
        raise StaleLedgerError(f"the ledger of {plan.folder} is not complete ({first}): {_CLEAR_RECONCILE}")
    for line in ledger.shards:
        _proven_commit(store, plan, line)
    return ledger


def _proven_commit(store: Store, plan: Plan, line: LedgerShard) -> Commit:
    """The shard's commit, if it is the one that the ledger names. Raises `StaleLedgerError`."""
    commit = chosen_commit(store, RunLayout(plan.folder), line.shard, plan.fingerprint)
    if commit is None or commit.digest() != line.commit_sha256:
        now = "has no commit" if commit is None else f"now has the commit {commit.epoch}"
        raise StaleLedgerError(
            f"shard {line.shard} of {plan.folder} {now}, the ledger was made from {line.epoch}: "
            f"{_CLEAR_RECONCILE}"
        )
    return commit


def answered_of_run(
    store: Store, plan: Plan, account: Account, *, dead_only: bool = False
) -> Iterator[AnsweredBatch]:
    """Answered rows of a run from the very commits that its ledger names, shard by shard.

    Quarantined rows come as the dead letters that they are.

    Args:
        store: the run's.
        plan: the run's.
        account: the run's.
        dead_only: leave out shards without a dead row.

    Raises:
        StaleLedgerError: a shard has another commit by now.
        CorruptError: a file is missing or damaged.
    """
    for shard, line in zip(plan.shards, account.ledger.shards, strict=True):
        if dead_only and account.counts_of(line).get(Outcome.SUCCEEDED, 0) == line.rows:
            continue
        commit = _proven_commit(store, plan, line)
        quarantined = account.quarantine.of(shard.shard)
        rows = quarantined_rows(store, quarantined) if quarantined else None
        for batch in answered_rows(store, shard, commit, plan.spec.carried):
            yield batch if rows is None else batch.without(rows)
        # A shard's answers are freed whole; kept in pieces by the allocator, they would add up.
        pa.default_memory_pool().release_unused()
