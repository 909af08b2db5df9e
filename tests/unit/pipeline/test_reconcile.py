"""The certificate: what completes it, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.errors import IncompleteRunError, InputError
from airflow_batchinfer.operators.shard_work import ShardWork
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.run.commit import Commit, chosen_commit
from airflow_batchinfer.run.integrity import sound_commit
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store
from tests.unit.pipeline.runs import commit_run, commit_shard, job, write_input

pytestmark = pytest.mark.airflow_env

LABEL = "whose label names shard "


@pytest.fixture
def plan(tmp_path: Path, store: Store) -> Plan:
    write_input(tmp_path, [{"text": f"text {i % 80}"} for i in range(100)])
    return split(store, job(tmp_path, sharding={"max_rows": 20}), "run")


def refused(store: Store, plan: Plan, *words: str) -> None:
    with pytest.raises(IncompleteRunError) as caught:
        reconcile(store, plan.folder)
    for word in words:
        assert word in str(caught.value)
    ledger = Ledger.read(store, RunLayout(plan.folder).ledger)
    assert not ledger.complete
    assert sum(ledger.counts.values()) == ledger.rows == 100


def rewrite(store: Store, plan: Plan, commit: Commit, **fields: Any) -> None:
    changed = commit.model_copy(update=fields)
    changed.write(store, RunLayout(plan.folder).commit(commit.shard, commit.epoch))


def test_complete_run(store: Store, plan: Plan) -> None:
    commit_run(store, plan, dead=lambda i: Reason.OVER_LONG if i == 3 else None)
    ledger = reconcile(store, plan.folder)
    assert ledger.complete
    assert (ledger.counts["succeeded"], ledger.counts["rejected"]) == (98, 2)  # row 3 has a copy
    assert ledger.reasons == {"over_long": 2}
    assert (ledger.dedup_rows, ledger.dedup_tokens) == (20, 140)
    assert ledger.tokens.prompt == 400


def test_second_time_writes_nothing(store: Store, plan: Plan) -> None:
    commit_run(store, plan)
    first = reconcile(store, plan.folder)
    assert reconcile(store, plan.folder).digest() == first.digest()


def test_no_plan(store: Store) -> None:
    with pytest.raises(InputError, match="run split first"):
        reconcile(store, "job/runs/none")


def test_missing_commit_names_shard_rows_and_what_to_clear(store: Store, plan: Plan) -> None:
    for shard in plan.shards:
        if shard.shard != 2:
            commit_shard(store, plan, shard)
    refused(store, plan, "shard 2: no commit and no attempt: all 20 rows", f"the `infer` task {LABEL}0002")


def test_the_pilots_shard_has_a_task_of_its_own(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, [{"text": f"text {i}"} for i in range(100)])
    plan = split(store, job(tmp_path, sharding={"max_rows": 50}, pilot={"rows": 10}), "other")
    refused(store, plan, f"the `pilot` task {LABEL}0000", f"the `infer` task {LABEL}0001")


def test_durable_rows_of_an_attempt_are_told(store: Store, plan: Plan) -> None:
    from airflow_batchinfer.run.commit import Tokens
    from airflow_batchinfer.run.progress import Progress

    progress = Progress(
        shard=1,
        epoch="20260101T000000000Z-00000000",
        state="failed",
        message="out of memory",
        updated_at="",
        sent=20,
        done=15,
        durable=12,
        counts={},
        tokens=Tokens(),
    )
    progress.write(store, RunLayout(plan.folder).progress(1, progress.epoch))
    refused(store, plan, "made 12 of 20 rows durable, 8 are missing (out of memory)")


def test_commit_of_another_fingerprint_does_not_count(store: Store, plan: Plan) -> None:
    commit_run(store, plan)
    commit = chosen_commit(store, RunLayout(plan.folder), 0, plan.fingerprint)
    assert commit is not None
    rewrite(store, plan, commit, fingerprint="other")
    refused(store, plan, "shard 0: no commit")


def test_lowest_epoch_is_chosen_and_the_others_counted(store: Store, plan: Plan) -> None:
    first = commit_shard(store, plan, plan.shards[0])
    commit_run(store, plan)
    line = reconcile(store, plan.folder).shards[0]
    assert (line.epoch, line.other_commits) == (first.epoch, 1)


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip"])
def test_damaged_part_is_found_and_the_shard_resumes(store: Store, plan: Plan, damage: str) -> None:
    commit_run(store, plan)
    layout = RunLayout(plan.folder)
    commit = chosen_commit(store, layout, 1, plan.fingerprint)
    assert commit is not None
    key = commit.parts[1].key
    data = store.read_bytes(key)
    store.delete(key)
    if damage != "delete":
        changed = data[:-5] if damage == "truncate" else data[:50] + bytes([data[50] ^ 1]) + data[51:]
        store.write_bytes(key, changed)
    assert ShardWork(store, plan, [1]).open_shards() == []
    refused(store, plan, "shard 1", "part-00001.parquet", f"clear the `infer` task {LABEL}0001")
    # The commit is withdrawn: else the cleared task would find it and have nothing to do.
    assert ShardWork(store, plan, [1]).open_shards() == [1]
    commit_shard(store, plan, plan.shards[1])
    assert reconcile(store, plan.folder).complete


def test_sums_that_do_not_agree(store: Store, plan: Plan) -> None:
    commit_run(store, plan)
    commit = chosen_commit(store, RunLayout(plan.folder), 0, plan.fingerprint)
    assert commit is not None
    rewrite(
        store, plan, commit, counts={"succeeded": commit.rows - 1, "failed": 1}, reasons={"engine_error": 1}
    )
    refused(store, plan, "shard 0", "by outcome")
    assert ShardWork(store, plan, [0]).open_shards() == [0]


def test_a_commit_for_the_rows_of_another_split_is_withdrawn(store: Store, plan: Plan) -> None:
    """Of two splits at once over an input that changes, a worker may have followed the plan that lost."""
    commit_run(store, plan)
    commit = chosen_commit(store, RunLayout(plan.folder), 0, plan.fingerprint)
    assert commit is not None
    rewrite(store, plan, commit, rows_sha256="0" * 64)
    refused(store, plan, "another rows file")
    assert ShardWork(store, plan, [0]).open_shards() == [0]
    commit_shard(store, plan, plan.shards[0])
    assert reconcile(store, plan.folder).complete


def test_a_sound_commit_behind_a_damaged_one_completes_the_shard(store: Store, plan: Plan) -> None:
    """Two attempts at once have both committed: the rows are paid and proven, and nobody sends them again."""
    damaged = commit_shard(store, plan, plan.shards[0])
    commit_run(store, plan)
    store.delete(damaged.parts[0].key)
    ledger = reconcile(store, plan.folder)
    assert ledger.complete
    chosen = chosen_commit(store, RunLayout(plan.folder), 0, plan.fingerprint)
    assert chosen is not None
    assert (ledger.shards[0].epoch, ledger.shards[0].other_commits) == (chosen.epoch, 0)
    assert chosen.epoch != damaged.epoch
    assert reconcile(store, plan.folder) == ledger
    merge(store, plan.folder)


def test_a_worker_withdraws_a_damaged_commit(store: Store, plan: Plan) -> None:
    layout, commit = RunLayout(plan.folder), commit_shard(store, plan, plan.shards[1])
    assert sound_commit(store, layout, 1, plan.fingerprint) == commit
    store.delete(commit.parts[0].key)
    assert sound_commit(store, layout, 1, plan.fingerprint) is None
    assert chosen_commit(store, layout, 1, plan.fingerprint) is None


def test_parts_of_another_shard(store: Store, plan: Plan) -> None:
    one, other = (commit_shard(store, plan, plan.shards[i]) for i in (0, 1))
    for shard in plan.shards[2:]:
        commit_shard(store, plan, shard)
    rewrite(store, plan, one, parts=other.parts)
    refused(store, plan, "shard 0: its parts lack 20 rows (row_id", "that are not the shard's")


def test_rows_in_two_parts_are_counted_once(store: Store, plan: Plan) -> None:
    commit_run(store, plan, overlap=3)
    ledger = reconcile(store, plan.folder)
    assert ledger.counts["succeeded"] == 100
    assert sum(line.duplicates_resolved for line in ledger.shards) == 3 * len(plan.shards)


def test_rows_file_that_is_gone(store: Store, plan: Plan) -> None:
    commit_run(store, plan)
    store.delete(plan.shards[0].rows_key)
    refused(store, plan, "shard 0", "rows-", "on_changed_spec: restart")
    assert ShardWork(store, plan, [0]).open_shards() == []  # nothing is wrong with its commit


def test_a_rows_file_that_reads_as_other_rows_does_not_cost_the_commit(store: Store, plan: Plan) -> None:
    """No checksum covers all of Parquet: a flipped byte may leave a file that reads, with other ids."""
    commit_run(store, plan)
    shard, other = plan.shards[:2]
    whole = store.read_bytes(shard.rows_key)
    store.write_bytes(shard.rows_key, store.read_bytes(other.rows_key))
    refused(store, plan, "shard 0", shard.rows_key, "on_changed_spec: restart")
    assert ShardWork(store, plan, [0]).open_shards() == []  # nothing is wrong with its commit
    store.write_bytes(shard.rows_key, whole)
    assert reconcile(store, plan.folder).complete


def test_unreadable_commit_is_named(store: Store, plan: Plan) -> None:
    commit_run(store, plan)
    commit = chosen_commit(store, RunLayout(plan.folder), 0, plan.fingerprint)
    assert commit is not None
    store.write_bytes(RunLayout(plan.folder).commit(0, commit.epoch), b"{")
    refused(store, plan, "commit.json is damaged", "shard 0: no commit")
