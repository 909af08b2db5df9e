"""Sharding: which row goes into which shard, at which place, and whose answer a copy takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from airflow_batchinfer.pipeline.duck import scalar, sql_text
from airflow_batchinfer.pipeline.keys import SQL_DIGEST
from airflow_batchinfer.pipeline.pilot_rows import put_first, set_aside
from airflow_batchinfer.spec import PilotSpec, ShardingSpec


@dataclass(frozen=True)
class PlacedShard:
    """Sums of one shard: input rows, rows to be sent, predicted tokens of the latter."""

    shard: int
    rows: int
    sent: int
    tokens: int


@dataclass(frozen=True)
class Placement:
    """Where all rows go.

    `path` is a Parquet file with a line per input row, by `row_id`: `shard`; `place`, the order within
    the shard; `copies`; `copy_of`, the row whose answer it takes, null for a row that is sent; `change`
    and `input_digest`, as in `keys`.
    With `pilot`, shard 0 is the pilot.
    """

    path: Path
    shards: list[PlacedShard]
    warnings: list[str]
    pilot: bool = False


def place_rows(
    connection: duckdb.DuckDBPyConnection,
    sharding: ShardingSpec,
    scratch: Path,
    pilot: PilotSpec | None = None,
) -> Placement:
    """Deal the rows of the table `keys` out to shards of equal predicted work.

    Rows that share a prefix with another row stand together, in one stretch that is cut where the work
    is reached; all others are dealt out like cards, longest first, so that every shard gets the same
    mix. Rows predicted to be over-long get shards of their own, at the end. A pilot comes first.
    """
    _find_copies(connection, sharding.dedup, stratified=bool(pilot and pilot.stratify))
    warnings = []
    if pilot is not None and (why_not := _set_aside(connection, sharding, pilot)):
        warnings.append(why_not)
        pilot = None
    if pilot is not None:
        sharding = sharding.model_copy(update={"max_shards": sharding.max_shards - 1})
    _order(connection, sharding)
    warnings += _cut(connection, sharding)
    if pilot is not None:
        put_first(connection, sharding.dedup)
    path = scratch / "placement.parquet"
    connection.execute(
        f"""
        COPY (
            SELECT k.row_id, p.shard, p.place, p.copies,
                CASE WHEN p.row_id <> k.row_id THEN p.row_id END AS copy_of,
                k.change, {_DIGEST} AS input_digest
            FROM keys k JOIN placed p ON {_SAME if sharding.dedup else "k.row_id = p.row_id"}
            ORDER BY k.row_id
        ) TO {sql_text(str(path))} (FORMAT parquet, ROW_GROUP_SIZE 122880)
        """
    )
    shards = [
        PlacedShard(*sums)
        for sums in connection.execute(
            "SELECT shard, sum(copies + 1)::BIGINT, count(*), sum(tokens)::BIGINT FROM placed "
            "GROUP BY shard ORDER BY shard"
        ).fetchall()
    ]
    return Placement(path, shards, warnings, pilot=pilot is not None)


def _set_aside(connection: duckdb.DuckDBPyConnection, sharding: ShardingSpec, pilot: PilotSpec) -> str | None:
    if sharding.max_shards == 1:
        return "no pilot: `sharding.max_shards` is 1, and the pilot is a shard of its own"
    return set_aside(connection, pilot)


def placement_batches(placement: Placement) -> Iterator[pa.RecordBatch]:
    """The placement's batches by `row_id`."""
    with pq.ParquetFile(placement.path, pre_buffer=False) as file:
        yield from file.iter_batches(65_536)


_DIGEST = SQL_DIGEST.replace("digest_", "k.digest_")
_SAME = "k.digest_high = p.digest_high AND k.digest_low = p.digest_low"


def _find_copies(connection: duckdb.DuckDBPyConnection, dedup: bool, *, stratified: bool) -> None:
    """Table `sent`: one row for each set of rows with the same prompt, the one with the lowest id."""
    if not dedup:
        connection.execute("CREATE VIEW sent AS SELECT *, 0::INTEGER AS copies FROM keys")
        return
    connection.execute(
        f"""
        CREATE TABLE sent AS
        SELECT digest_high, digest_low, min(row_id) AS row_id, (count(*) - 1)::INTEGER AS copies,
            any_value(tokens) AS tokens, any_value(overlong) AS overlong, any_value(prefix_0) AS prefix_0,
            any_value(prefix_1) AS prefix_1, any_value(prefix_2) AS prefix_2
            {", any_value(stratum) AS stratum" if stratified else ""}
        FROM keys GROUP BY digest_high, digest_low
        """
    )


def _order(connection: duckdb.DuckDBPyConnection, sharding: ShardingSpec) -> None:
    """Table `ordered`: `kind` (0 grouped, 1 single, 2 over-long), `place`, `reached`.

    `reached` is, within the kind, the share of a shard's capacity taken up to and with the row; each row
    takes its part of `target_tokens` or of `max_rows`, whichever is more.
    """
    for level in range(3):
        connection.execute(
            f"CREATE TEMP TABLE shared_{level} AS SELECT prefix_{level} AS shared FROM sent "
            f"WHERE NOT overlong GROUP BY prefix_{level} HAVING count(*) > 1"
        )
    connection.execute(
        f"""
        CREATE TABLE ordered AS
        SELECT *, row_number() OVER everything AS place,
            sum(share) OVER (kinds ROWS UNBOUNDED PRECEDING) AS reached,
            row_number() OVER kinds - 1 AS number
        FROM (
            SELECT row_id, copies, tokens,
                {"digest_high, digest_low," if sharding.dedup else ""}
                CASE WHEN overlong THEN 2 WHEN a.shared IS NULL THEN 1 ELSE 0 END AS kind,
                coalesce(a.shared, 0) AS first, coalesce(b.shared, 0) AS second,
                coalesce(c.shared, 0) AS third,
                greatest(tokens / {sharding.target_tokens}, 1 / {sharding.max_rows}) AS share
            FROM sent LEFT JOIN shared_0 a ON prefix_0 = a.shared
                LEFT JOIN shared_1 b ON prefix_1 = b.shared
                LEFT JOIN shared_2 c ON prefix_2 = c.shared
        )
        WINDOW everything AS (ORDER BY kind, first, second, third, tokens DESC, row_id),
            kinds AS (PARTITION BY kind ORDER BY first, second, third, tokens DESC, row_id)
        """
    )


def _cut(connection: duckdb.DuckDBPyConnection, sharding: ShardingSpec) -> list[str]:
    """Table `placed`: `ordered` with the shard. Returns warnings."""
    sums = {
        kind: (rows, share)
        for kind, rows, share in connection.execute(
            "SELECT kind, count(*), max(reached) FROM ordered GROUP BY kind"
        ).fetchall()
    }
    usual = sum(share for kind, (_, share) in sums.items() if kind != 2)
    wanted = max(1, _ceil(usual)) if usual else 0
    long_wanted = max(1, _ceil(sums[2][1])) if 2 in sums else 0
    most = sharding.max_shards
    long_shards = min(long_wanted, max(1, most - wanted)) if most > 1 and usual else long_wanted
    while True:
        shards = min(wanted, most - long_shards) if long_shards < most else 0
        _place(connection, sums, max(shards, 0), min(long_shards, most))
        largest = scalar(
            connection, "SELECT max(n) FROM (SELECT count(*) AS n FROM placed WHERE kind <> 2 GROUP BY shard)"
        )
        if not largest or largest <= sharding.max_rows or shards >= most - long_shards:
            break
        # Rounding at the cuts can put a few rows too many into a shard: make one shard more.
        wanted = shards + 1
    needed = wanted + long_wanted
    if needed <= most:
        return []
    rows = scalar(connection, "SELECT max(n) FROM (SELECT count(*) AS n FROM placed GROUP BY shard)")
    return [
        f"{needed} shards would be needed for max_rows={sharding.max_rows} and "
        f"target_tokens={sharding.target_tokens}, but max_shards is {most}: shards grow to up to {rows} rows"
    ]


def _place(
    connection: duckdb.DuckDBPyConnection, sums: dict[int, tuple[int, float]], shards: int, long_shards: int
) -> None:
    usual, long = max(1, shards), max(1, long_shards)
    first_long = shards if shards else 0
    connection.execute(
        f"""
        CREATE OR REPLACE TABLE placed AS
        SELECT * EXCLUDE (reached, number, first, second, third, share, shard),
            (dense_rank() OVER (ORDER BY shard) - 1)::INTEGER AS shard
        FROM (SELECT *, (CASE kind
                WHEN 0 THEN {_stretch("number", "reached", sums.get(0), usual)}
                WHEN 1 THEN number % {usual}
                ELSE {first_long} + {_stretch("number", "reached", sums.get(2), long)}
            END)::INTEGER AS shard
            FROM ordered)
        """
    )


def _stretch(number: str, reached: str, sums: tuple[int, float] | None, shards: int) -> str:
    """SQL for the shard of a row in a stretch cut into pieces of equal share."""
    if sums is None:
        return "0"
    return f"least({shards - 1}, floor(({reached} - share / 2) * {shards} / {sums[1]!r}))"


def _ceil(share: float) -> int:
    """Rounded up, but for what summing floats may add."""
    return math.ceil(share - 1e-6)
