"""What a run answered, read shard by shard: the chosen commit's parts, joined by `row_id`.

For reports and checks, which also look at runs that are not finished: a shard without a commit is
read from the parts that are durable so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from airflow_batchinfer.pipeline.quarantine import Quarantine, QuarantinedShard, quarantined_rows, take_out
from airflow_batchinfer.run.commit import Commit, chosen_commit
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.parquet import open_parquet
from airflow_batchinfer.run.plan import Plan, PlannedShard
from airflow_batchinfer.run.shard import CARRY, COPIES, CUSTOM_ID, INPUT, PART_METADATA_PREFIX, ROW_ID
from airflow_batchinfer.store import Store

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardAnswers:
    """One shard of a run: its rows, its copies, and the answers durable so far.

    Rows that validation has quarantined have the outcome that this gave them.
    """

    store: Store
    plan: Plan
    planned: PlannedShard
    commit: Commit | None
    part_keys: tuple[str, ...]
    quarantined: QuarantinedShard | None = None

    def as_committed(self) -> ShardAnswers:
        """The same with the worker's own outcomes."""
        return replace(self, quarantined=None)

    def quarantined_inputs(self, row_ids: Ids) -> Ids:
        """How many input rows are quarantined that have the answer of each of the given sent rows."""
        if self.quarantined is None:
            return np.zeros(len(row_ids), np.int64)
        out = quarantined_rows(self.store, self.quarantined)[ROW_ID].to_numpy()
        copies = self.copies([ROW_ID, "copy_of"])
        answered_by = out
        if copies is not None:
            at, is_copy = positions(copies[ROW_ID].to_numpy(), out)
            answered_by = np.where(is_copy, copies["copy_of"].to_numpy()[at], out)
        sent, count = np.unique(answered_by, return_counts=True)
        at, found = positions(sent, row_ids)
        return np.where(found, count[at], 0) if len(sent) else np.zeros(len(row_ids), np.int64)

    def answers(self, columns: Sequence[str], keep: Ids | None = None) -> pa.Table:
        """Answers of sent rows: `row_id` and the part columns asked for, each row once.

        Args:
            columns: columns of `PART_SCHEMA` besides `row_id`.
            keep: only these rows; their parts are filtered one by one, so memory follows the result.

        Raises:
            CorruptError: a part cannot be read, naming it.
        """
        wanted = [ROW_ID, *(c for c in columns if c != ROW_ID)]
        tables: list[pa.Table] = []
        seen: Ids = np.empty(0, np.int64)
        for key in self.part_keys:
            table = _read(self.store, key, wanted)
            ids = table[ROW_ID].to_numpy()
            mask = ~np.isin(ids, seen)
            seen = np.concatenate([seen, ids[mask]])
            if keep is not None:
                mask &= np.isin(ids, keep)
            tables.append(table.filter(pa.array(mask)))
        return self._settled(pa.concat_tables(tables) if tables else pa.table({c: [] for c in wanted}))

    def sent(self, columns: Sequence[str]) -> pa.Table:
        """Columns of the rows file, in the order to be sent. Raises `CorruptError`."""
        return _read(self.store, self.planned.rows_key, columns)

    def copies(self, columns: Sequence[str]) -> pa.Table | None:
        """Columns of the copies file; none if no row of the shard has copies. Raises `CorruptError`."""
        if self.planned.copies_key is None:
            return None
        return _read(self.store, self.planned.copies_key, columns)

    def input_rows(
        self, answer_columns: Sequence[str], carried: Sequence[str], keep: Ids | None = None
    ) -> pa.Table:
        """Answered *input* rows, copies included: `row_id`, `custom_id`, the answer's columns, `carry`.

        The answer's columns keep the names of `PART_SCHEMA`. What the input carries stands in the struct
        `carry` (absent if nothing is asked for): a column of the user's may well be named `output`. `keep`
        names the input rows wanted, all if none. Raises `CorruptError`.
        """
        sent = self.sent([ROW_ID, CUSTOM_ID, *self._structs(carried)])
        copies = self.copies([ROW_ID, "copy_of", CUSTOM_ID, *self._carry_of_copies(carried)])
        wanted, needed = sent, None
        if keep is not None:
            wanted = _only(sent, keep)
            needed = wanted[ROW_ID].to_numpy()
            if copies is not None:
                copies = _only(copies, keep)
                needed = np.concatenate([needed, copies["copy_of"].to_numpy()])
        answers = self.as_committed().answers(answer_columns, needed)
        tables = [self._beside(answers, wanted, sent, ROW_ID, carried)]
        if copies is not None:
            tables.append(self._beside(answers, copies, sent, "copy_of", carried))
        return self._settled(pa.concat_tables(tables))

    def _settled(self, answers: pa.Table) -> pa.Table:
        if self.quarantined is None or not answers.num_rows:
            return answers
        return take_out(answers, answers[ROW_ID], quarantined_rows(self.store, self.quarantined))

    def _beside(
        self, answers: pa.Table, own: pa.Table, sent: pa.Table, answered_by: str, carried: Sequence[str]
    ) -> pa.Table:
        """Lines of `own` whose `answered_by` row has an answer, with that answer and what they carry."""
        asked = own[answered_by].to_numpy()
        position, found = positions(answers[ROW_ID].to_numpy(), asked)
        own, asked, position = own.filter(pa.array(found)), asked[found], position[found]
        in_sent, _ = positions(sent[ROW_ID].to_numpy(), asked)
        columns = {ROW_ID: own[ROW_ID], CUSTOM_ID: own[CUSTOM_ID]}
        answered = answers.take(pa.array(position))
        columns |= {name: answered[name] for name in answers.column_names if name != ROW_ID}
        if carried:
            own_names = _field_names(own, CARRY)
            values = [
                struct_field(own[CARRY], name)
                if name in own_names
                else struct_field(sent[INPUT], name).take(pa.array(in_sent))
                for name in carried
            ]
            columns[CARRY] = pc.make_struct(*values, field_names=list(carried))
        return pa.table(columns)

    def _structs(self, carried: Sequence[str]) -> list[str]:
        names = _schema(self.store, self.planned.rows_key).names
        return [s for s in (INPUT, CARRY) if carried and s in names]

    def _carry_of_copies(self, carried: Sequence[str]) -> list[str]:
        if self.planned.copies_key is None or not carried:
            return []
        names = _schema(self.store, self.planned.copies_key).names
        return [CARRY] if CARRY in names else []


def shards_of(
    store: Store,
    plan: Plan,
    only: Iterable[int] | None = None,
    quarantine: Quarantine | None = None,
) -> Iterator[ShardAnswers]:
    """The run's shards in order, each opened when its turn comes.

    Args:
        store: the run's.
        plan: the run's.
        only: these shards; all by default.
        quarantine: what validation took out of the results; nothing by default.
    """
    chosen = None if only is None else set(only)
    layout = RunLayout(plan.folder)
    for planned in plan.shards:
        if chosen is not None and planned.shard not in chosen:
            continue
        commit = chosen_commit(store, layout, planned.shard, plan.fingerprint)
        if commit is not None:
            keys = tuple(part.key for part in commit.parts)
        else:
            keys = tuple(_durable_parts(store, layout, planned.shard, plan.fingerprint))
        quarantined = quarantine.of(planned.shard) if quarantine else None
        yield ShardAnswers(store, plan, planned, commit, keys, quarantined)


def positions(keys: Ids, wanted: Ids) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Where each of `wanted` stands in `keys` (which hold no value twice), and whether it does."""
    if len(keys) == 0:
        return np.zeros(len(wanted), np.intp), np.zeros(len(wanted), np.bool_)
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)
    position = order[at]
    return position, keys[position] == wanted


def struct_field(column: pa.Array | pa.ChunkedArray, name: str) -> pa.Array | pa.ChunkedArray:
    """One field of a struct column; null where the struct is null."""
    # In a list: Arrow takes a plain name for a path, and `user.name` for a field of `user`.
    return pc.struct_field(column, [name])


def copies_of(shard: ShardAnswers, row_ids: Ids) -> Ids:
    """How many other input rows take the answer of each of the given sent rows."""
    sent = shard.sent([ROW_ID, COPIES])
    position, _ = positions(sent[ROW_ID].to_numpy(), row_ids)
    copies: Ids = sent[COPIES].to_numpy().astype(np.int64)[position]
    return copies


def _durable_parts(store: Store, layout: RunLayout, shard: int, fingerprint: str) -> Iterator[str]:
    for info in store.list(layout.shard(shard)):
        name = info.key.rsplit("/", 1)[-1]
        if name.startswith("part-") and name.endswith(".parquet"):
            metadata = _schema(store, info.key).metadata or {}
            if metadata.get(f"{PART_METADATA_PREFIX}fingerprint".encode()) == fingerprint.encode():
                yield info.key


def _read(store: Store, key: str, columns: Sequence[str]) -> pa.Table:
    with open_parquet(store, key) as file:
        return file.read(list(columns))


def _schema(store: Store, key: str) -> pa.Schema:
    with open_parquet(store, key) as file:
        return file.schema_arrow


def _only(table: pa.Table, keep: Ids) -> pa.Table:
    return table.filter(pa.array(np.isin(table[ROW_ID].to_numpy(), keep)))


def _field_names(table: pa.Table, struct: str) -> set[str]:
    if struct not in table.column_names:
        return set()
    return {field.name for field in table.schema.field(struct).type}
