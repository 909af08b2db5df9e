"""Draws the pilot's rows while the input is cut into shards: evenly over all predicted lengths."""

from __future__ import annotations

import random

import duckdb

from airflow_batchinfer.spec import PilotSpec


def set_aside(connection: duckdb.DuckDBPyConnection, pilot: PilotSpec) -> str | None:
    """Move the pilot's rows from `sent` to the table `pilot`; says why not, if not.

    Systematic sampling: of all rows ordered by length (rows of a length in random order), every n-th
    from a random start. Each stretch of lengths is thus represented by its share, over-long rows too;
    with `stratify`, so is each combination of those columns' values, and the lengths within it.
    """
    (rows,) = connection.execute("SELECT count(*) FROM sent").fetchone() or (0,)
    if rows <= pilot.rows:
        return (
            f"no pilot: the input has {rows} rows to send, and `pilot.rows` is {pilot.rows}, "
            "so the pilot would be the whole run"
        )
    order = f"{'stratum, ' if pilot.stratify else ''}tokens, hash(row_id, {pilot.seed}::BIGINT)"
    start = random.Random(pilot.seed).random()
    connection.execute(
        f"""
        CREATE TABLE pilot AS
        SELECT * EXCLUDE (number) FROM (
            SELECT *, row_number() OVER (ORDER BY {order}) AS number
            FROM sent
        )
        WHERE floor(number * {pilot.rows} / {rows} + {start!r})
            > floor((number - 1) * {pilot.rows} / {rows} + {start!r})
        """
    )
    connection.execute("CREATE TABLE fleet AS SELECT sent.* FROM sent ANTI JOIN pilot USING (row_id)")
    (kind,) = connection.execute(
        "SELECT table_type FROM information_schema.tables WHERE table_name = 'sent'"
    ).fetchone() or ("",)
    connection.execute("DROP VIEW sent" if kind == "VIEW" else "DROP TABLE sent")
    connection.execute("ALTER TABLE fleet RENAME TO sent")
    return None


def put_first(connection: duckdb.DuckDBPyConnection, dedup: bool) -> None:
    """Make the rows set aside shard 0 of the table `placed`, and move the other shards up by one."""
    connection.execute("UPDATE placed SET shard = shard + 1")
    connection.execute(
        f"""
        INSERT INTO placed BY NAME
        SELECT row_id, copies, tokens, {"digest_high, digest_low," if dedup else ""} 0 AS kind, 0 AS shard,
            row_number() OVER (ORDER BY prefix_0, prefix_1, prefix_2, tokens DESC, row_id) AS place
        FROM pilot
        """
    )
