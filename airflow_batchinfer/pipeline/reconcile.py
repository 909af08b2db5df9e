"""Reconcile: prove from the plan and the commits that every input row has exactly one outcome.

For each shard the chosen commit's parts are verified by size and SHA-256, and the set of their row ids
is compared with the set of the shard's rows. Memory holds one shard's row ids at a time, as bitmaps,
and one line a shard.
"""

from __future__ import annotations

import array
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from airflow_batchinfer.errors import CorruptError, IncompleteRunError, UnreadableError
from airflow_batchinfer.outcome import Outcome
from airflow_batchinfer.pipeline.duck import THREADS
from airflow_batchinfer.pipeline.split import load_plan
from airflow_batchinfer.run.commit import Commit, Tokens, commits_of
from airflow_batchinfer.run.integrity import commit_problems, file_problem, withdraw_commit
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.ledger import Ledger, LedgerShard
from airflow_batchinfer.run.parquet import open_parquet
from airflow_batchinfer.run.plan import Plan, PlannedShard
from airflow_batchinfer.run.progress import latest_progress
from airflow_batchinfer.run.shard import COPIES, ROW_ID
from airflow_batchinfer.store import Store

log = logging.getLogger(__name__)

_PROOF_COLUMNS = [ROW_ID, "outcome", "reason", "prompt_tokens", "output_tokens"]

_ROWS_REMEDY = "put it back, start a new run, or set `on_changed_spec: restart` and clear split"

_SHOWN = 10
"""Problems that an error message lists; the ledger has them all."""


def reconcile(store: Store, folder: str) -> Ledger:
    """Write the run's ledger, and fail if the run is not complete.

    A ledger that says the same as the one that is there is not written again, so what was published
    from it stays current. A commit that does not hold is withdrawn: as long as it stood, nobody would
    send its shard again.

    Raises:
        IncompleteRunError: names shards, rows done and missing, and what to clear; the ledger is written.
        InputError: there is no plan.
        ReleaseError: a commit is another release's; nothing is written.
    """
    plan, layout = load_plan(store, folder), RunLayout(folder)
    with ThreadPoolExecutor(THREADS) as pool:
        audits = list(pool.map(lambda shard: _audit(store, plan, shard), plan.shards))
    ledger = _keep_if_equal(store, layout, _ledger(plan, audits))
    for commit in (commit for audit in audits for commit in audit.unsound):
        withdraw_commit(store, layout, commit)
    if not ledger.complete:
        shown = "\n".join(f"- {problem}" for problem in ledger.problems[:_SHOWN])
        more = len(ledger.problems) - _SHOWN
        raise IncompleteRunError(
            f"run {plan.run_id!r} of job {plan.job!r} is not complete: "
            f"{ledger.counts[Outcome.UNPROCESSED]} of {ledger.rows} rows have no outcome.\n{shown}"
            + (f"\n- and {more} more, see {store.uri_of(layout.ledger)}" if more > 0 else "")
        )
    return ledger


def _ledger(plan: Plan, audits: Sequence[_Audit]) -> Ledger:
    counts: Counter[str] = Counter({outcome.value: 0 for outcome in Outcome})
    reasons: Counter[str] = Counter()
    for audit in audits:
        counts.update(audit.line.counts)
        reasons.update(audit.line.reasons)
    problems = [problem for audit in audits for problem in audit.problems]
    kept = plan.kept.rows if plan.kept else 0
    if plan.rows + kept != plan.input.rows:
        problems.append(
            f"the plan's shards hold {plan.rows} rows and {kept} are kept, its input has {plan.input.rows}: "
            "run split again"
        )
    return Ledger(
        job=plan.job,
        run_id=plan.run_id,
        generation=plan.generation,
        fingerprint=plan.fingerprint,
        plan_sha256=plan.digest(),
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        complete=not problems and counts.total() == plan.rows,
        rows=plan.rows,
        kept_rows=kept,
        counts=dict(counts),
        reasons=dict(sorted(reasons.items())),
        tokens=Tokens.summed(audit.line.tokens for audit in audits),
        dedup_rows=sum(shard.rows - shard.sent for shard in plan.shards),
        dedup_tokens=sum(audit.line.dedup_tokens for audit in audits),
        problems=problems,
        shards=[audit.line for audit in audits],
    )


@dataclass(frozen=True)
class _Audit:
    line: LedgerShard
    problems: list[str] = field(default_factory=list)
    unsound: list[Commit] = field(default_factory=list)
    """Commits of the shard that do not answer the plan, or whose parts do not hold what they say."""


def _audit(store: Store, plan: Plan, shard: PlannedShard) -> _Audit:
    layout = RunLayout(plan.folder)
    commits, damaged = commits_of(store, layout, shard.shard)
    ours = [c for c in commits if c.fingerprint == plan.fingerprint]
    name, remedy = f"shard {shard.shard}", _remedy(shard)
    if not ours:
        reason = f"{name}: {_how_far(store, layout, shard)}{remedy}"
        return _Audit(_open_line(shard), [*(f"{name}: {d}" for d in damaged), reason])
    try:
        rows = _sent_rows(store, shard)
    except CorruptError as error:
        return _Audit(_open_line(shard), [f"{name}: {error}; {_ROWS_REMEDY}"])
    unsound: list[Commit] = []
    problems: list[str] = []
    for commit in ours:
        try:
            resolved, saved = _prove(store, shard, rows, commit)
        except CorruptError as error:
            # A rows file that was damaged since may still read, as other rows: the commit is not to blame.
            if damage := file_problem(store, shard.rows_key, shard.rows_bytes, shard.rows_sha256):
                return _Audit(_open_line(shard), [f"{name}: {damage}; {_ROWS_REMEDY}"])
            log.warning("commit %s of shard %d is withdrawn: %s", commit.epoch, shard.shard, error)
            unsound.append(commit)
            problems.append(f"{name}: {error}{remedy}")
            continue
        line = LedgerShard(
            shard=shard.shard,
            rows=shard.rows,
            sent=shard.sent,
            epoch=commit.epoch,
            commit_sha256=commit.digest(),
            counts=commit.counts,
            reasons=commit.reasons,
            tokens=commit.tokens,
            duplicates_resolved=resolved,
            dedup_tokens=saved,
            other_commits=len(ours) - len(unsound) - 1,
        )
        return _Audit(line, unsound=unsound)
    return _Audit(_open_line(shard), problems, unsound)


def _open_line(shard: PlannedShard) -> LedgerShard:
    """The line of a shard without a sound commit: none of its rows counts."""
    return LedgerShard(
        shard=shard.shard,
        rows=shard.rows,
        sent=shard.sent,
        counts={Outcome.UNPROCESSED.value: shard.rows},
    )


def _contradictions(shard: PlannedShard, commit: Commit) -> list[str]:
    """Where a commit's numbers differ from the plan's, or from one another."""
    checks = [
        (commit.rows_sha256 == shard.rows_sha256, "its commit answers another rows file"),
        (commit.rows == shard.rows, f"its commit counts {commit.rows} rows, the plan {shard.rows}"),
        (commit.sent == shard.sent, f"its commit counts {commit.sent} sent rows, the plan {shard.sent}"),
        (
            sum(commit.counts.values()) == shard.rows,
            f"its outcomes add up to {sum(commit.counts.values())}, not to {shard.rows}",
        ),
        (not commit.counts.get(Outcome.UNPROCESSED), "its commit has unprocessed rows"),
        (
            sum(commit.reasons.values()) == shard.rows - commit.counts.get(Outcome.SUCCEEDED, 0),
            f"its reasons add up to {sum(commit.reasons.values())}, not to its dead rows",
        ),
    ]
    return [problem for holds, problem in checks if not holds]


def _sent_rows(store: Store, shard: PlannedShard) -> pa.Table:
    """Ids and copies of the shard's sent rows. Raises `CorruptError` if its rows file is damaged."""
    rows = _read(store, shard.rows_key, [ROW_ID, COPIES])
    if len(_bitmap(rows[ROW_ID])) != rows.num_rows or rows.num_rows != shard.sent:
        raise CorruptError(f"{store.uri_of(shard.rows_key)} does not hold its {shard.sent} rows")
    return rows


def _prove(store: Store, shard: PlannedShard, rows: pa.Table, commit: Commit) -> tuple[int, int]:
    """Prove that a commit answers the plan and that its parts hold what it says; returns as `_prove_rows`.

    Raises:
        CorruptError: says all that is wrong with it.
    """
    problems = [*_contradictions(shard, commit), *commit_problems(store, commit)]
    if problems:
        raise CorruptError("; ".join(problems))
    return _prove_rows(store, rows, commit)


def _prove_rows(store: Store, rows: pa.Table, commit: Commit) -> tuple[int, int]:
    """Prove that the parts hold each sent row, and that outcomes and copies add up to the commit.

    Returns the number of lines that stand in more than one part and were passed over, and the tokens that
    copies would have cost.

    Raises:
        CorruptError: a file is damaged, or the sets or sums differ.
    """
    expected = _bitmap(rows[ROW_ID])
    seen, repeated = BitMap64(), 0
    kept: list[pa.Table] = []
    for part in commit.parts:
        table = _read(store, part.key, _PROOF_COLUMNS)
        ids = _bitmap(table[ROW_ID])
        if len(ids) != table.num_rows or table.num_rows != part.rows:
            raise CorruptError(f"{store.uri_of(part.key)} does not hold {part.rows} different rows")
        again = seen & ids
        if again:
            repeated += len(again)
            table = table.filter(pc.invert(pc.is_in(table[ROW_ID], pa.array(again.to_array(), pa.int64()))))
        kept.append(table)
        seen |= ids
    missing, foreign = expected - seen, seen - expected
    if missing or foreign:
        raise CorruptError(
            f"its parts lack {len(missing)} rows {_some(missing)} and have {len(foreign)} "
            f"that are not the shard's {_some(foreign)}"
        )
    answers = pa.concat_tables(kept).join(rows, ROW_ID)
    for column, stated in (("outcome", commit.counts), ("reason", commit.reasons)):
        weights = answers.append_column("weight", pc.add(answers[COPIES].cast(pa.int64()), 1))
        sums = weights.group_by(column).aggregate([("weight", "sum")]).to_pylist()
        found = {s[column]: s["weight_sum"] for s in sums if s[column] is not None}
        if found != {k: n for k, n in stated.items() if n}:
            raise CorruptError(f"its parts count {found} by {column}, its commit {stated}")
    tokens = pc.add(answers["prompt_tokens"], answers["output_tokens"]).cast(pa.int64())
    saved = pc.sum(pc.multiply(tokens, answers[COPIES].cast(pa.int64()))).as_py() or 0
    return repeated, saved


def _how_far(store: Store, layout: RunLayout, shard: PlannedShard) -> str:
    progress = latest_progress(store, layout, shard.shard)
    if progress is None:
        return f"no commit and no attempt: all {shard.sent} rows are missing"
    return (
        f"no commit; the last attempt ({progress.epoch}, {progress.state}) made {progress.durable} of "
        f"{shard.sent} rows durable, {shard.sent - progress.durable} are missing"
        + (f" ({progress.message})" if progress.message else "")
    )


def _remedy(shard: PlannedShard) -> str:
    """What to clear in Airflow. Labels name the shards; the map index depends on Airflow's settings."""
    task = "pilot" if shard.pilot else "infer"
    return (
        f"; clear the `{task}` task whose label names shard {shard.shard:04d}, with its downstream tasks: it "
        "resumes"
    )


def _keep_if_equal(store: Store, layout: RunLayout, ledger: Ledger) -> Ledger:
    """Write the ledger, unless the stored one says the same."""
    try:
        stored = Ledger.read(store, layout.ledger)
    except (FileNotFoundError, UnreadableError):
        stored = None
    if stored is not None and stored.model_copy(update={"created_at": ledger.created_at}) == ledger:
        return stored
    ledger.write(store, layout.ledger)
    return ledger


def _read(store: Store, key: str, columns: list[str]) -> pa.Table:
    with open_parquet(store, key) as file:
        return file.read(columns, use_threads=False)


def _bitmap(ids: pa.ChunkedArray) -> BitMap64:
    return BitMap64(array.array("Q", ids.to_numpy().tobytes()))


def _some(ids: BitMap64) -> str:
    shown = ", ".join(str(i) for _, i in zip(range(3), ids, strict=False))
    return f"(row_id {shown}{', ...' if len(ids) > 3 else ''})" if shown else ""
