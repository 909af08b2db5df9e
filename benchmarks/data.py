"""The data side at size: split, reconcile and merge, beside DuckDB copying the same Parquet.

    python benchmarks/data.py --rows 1000000 --rows 10000000

For each size: generate rows of about 1 kB (lengths skewed, 30 % duplicates), let DuckDB copy the file as
the yardstick, then split, commit every shard with instant results, reconcile and merge. Each step runs
in a process of its own; its time and peak memory (resident set, of the whole process) are printed and
written to `--out` as JSON. `--step` runs one step and prints its measure, for long sizes in slices.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

RUN_ID = "bench"
LIMITS = {"split": 4.0, "reconcile": 0.2, "merge": 3.0}
"""Most times the copy's time that a step may take."""

_MEAN_BYTES = 900
_DUPLICATES = 0.3
_ROW_GROUP = 100_000
_POOL_BYTES = 32 * 1024 * 1024


class Measure:
    """One step's time and processor time in seconds, and its peak resident memory in MiB."""

    def __init__(self, seconds: float, cpu_seconds: float, peak_mib: float) -> None:
        self.seconds = seconds
        self.cpu_seconds = cpu_seconds
        self.peak_mib = peak_mib


def generate(folder: Path, rows: int) -> None:
    """Write `input.parquet`: text cut from a pool of random words, in one file."""
    rng = np.random.default_rng(7)
    pool = _pool(rng)
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("text", pa.string()),
            ("category", pa.dictionary(pa.int32(), pa.string())),
            ("amount", pa.decimal128(12, 2)),
            ("created", pa.timestamp("us", "Europe/Berlin")),
        ]
    )
    categories = pa.array([f"category {i}" for i in range(50)])
    repeated = max(1, rows // 20)
    with pq.ParquetWriter(folder / "input.parquet", schema, compression="zstd") as writer:
        for first in range(0, rows, _ROW_GROUP):
            count = min(_ROW_GROUP, rows - first)
            numbers = np.arange(first, first + count)
            # A duplicate takes its text from a small, skewed set of texts.
            key = np.where(
                rng.random(count) < _DUPLICATES,
                -1 - (repeated * rng.random(count) ** 3).astype(np.int64),
                numbers,
            )
            writer.write_table(
                pa.table(
                    [
                        pa.array(np.char.add("row-", numbers.astype(str))),
                        pa.array(_texts(pool, key)),
                        pa.DictionaryArray.from_arrays(
                            pa.array(rng.integers(0, 50, count), pa.int32()), categories
                        ),
                        pa.array(rng.integers(0, 10**6, count))
                        .cast(pa.decimal128(21, 2))
                        .cast(pa.decimal128(12, 2)),
                        pa.array(1_700_000_000_000_000 + numbers * 1000).cast(schema.field("created").type),
                    ],
                    schema=schema,
                )
            )


def copy(folder: Path, _: int) -> None:
    """The yardstick: DuckDB from Parquet to Parquet, with its defaults but for a bound on its memory."""
    import duckdb

    with duckdb.connect(config={"memory_limit": "4GB"}) as connection:
        connection.execute(
            f"COPY (SELECT * FROM '{folder}/input.parquet') TO '{folder}/copy.parquet' "
            "(FORMAT parquet, COMPRESSION zstd)"
        )
    (folder / "copy.parquet").unlink()


def split(folder: Path, rows: int) -> None:
    """Plan the run."""
    from airflow_batchinfer.pipeline.split import split as split_run

    plan = split_run(_store(folder), _spec(folder), RUN_ID)
    assert plan.rows == rows


def commit(folder: Path, _: int) -> None:
    """Not measured: what workers would have left behind, made at once by DuckDB."""
    import duckdb

    from airflow_batchinfer.pipeline.freeze import file_sha256
    from airflow_batchinfer.pipeline.split import load_plan
    from airflow_batchinfer.run.commit import Commit, CommittedPart, Tokens
    from airflow_batchinfer.run.epoch import new_epoch
    from airflow_batchinfer.run.layout import RunLayout
    from airflow_batchinfer.run.shard import PART_SCHEMA

    store = _store(folder)
    plan = load_plan(store, f"bench/runs/{RUN_ID}")
    layout = RunLayout(plan.folder)
    epoch = new_epoch()
    local = folder / "part.parquet"
    answer = """
        SELECT row_id, copies, row_id % 1000 = 0 AS dead,
            CASE WHEN dead THEN NULL ELSE 'the answer to row ' || row_id END AS output
    """
    with duckdb.connect() as connection:
        for shard in plan.shards:
            source = f"FROM '{store.uri_of(shard.rows_key)}'"
            table = connection.sql(f"{answer} {source}").to_arrow_table()
            dead = table["dead"]
            count = table.num_rows

            def same(value: Any, kind: pa.DataType, count: int = count) -> pa.Array:
                return pa.repeat(pa.scalar(value, kind), count)

            columns = {
                "row_id": table["row_id"],
                "outcome": pa.compute.if_else(dead, "rejected", "succeeded"),
                "reason": pa.compute.if_else(dead, "over_long", pa.scalar(None, pa.string())),
                "message": pa.compute.if_else(dead, "too long", pa.scalar(None, pa.string())),
                "output": table["output"],
                "vector": same(None, pa.list_(pa.float32())),
                "finish_reason": same("stop", pa.string()),
                "prompt_tokens": same(250, pa.int32()),
                "output_tokens": same(8, pa.int32()),
                "cached_tokens": same(0, pa.int32()),
                "attempts": same(1, pa.int16()),
                "finished_at": same(1_790_000_000_000, pa.timestamp("ms", "UTC")),
            }
            pq.write_table(pa.table(columns, schema=PART_SCHEMA), local, compression="zstd")
            weights = pa.compute.add(table["copies"].cast(pa.int64()), 1)
            bad = int(pa.compute.sum(weights.filter(dead)).as_py() or 0)
            part = CommittedPart(
                key=layout.part(shard.shard, epoch, 0),
                rows=count,
                bytes=local.stat().st_size,
                sha256=file_sha256(local),
            )
            store.put_file(local, part.key)
            Commit(
                shard=shard.shard,
                epoch=epoch,
                fingerprint=plan.fingerprint,
                created_at="2026-01-01T00:00:00Z",
                rows_sha256=shard.rows_sha256,
                rows=shard.rows,
                sent=shard.sent,
                counts={"succeeded": shard.rows - bad} | ({"rejected": bad} if bad else {}),
                reasons={"over_long": bad} if bad else {},
                tokens=Tokens(prompt=250 * count, output=8 * count),
                parts=[part],
            ).write(store, layout.commit(shard.shard, epoch))


def reconcile(folder: Path, rows: int) -> None:
    """Prove the run."""
    from airflow_batchinfer.pipeline.reconcile import reconcile as reconcile_run

    ledger = reconcile_run(_store(folder), f"bench/runs/{RUN_ID}")
    assert ledger.complete
    assert sum(ledger.counts.values()) == rows
    shown = ledger.model_dump(exclude={"shards"}) | {"shards": len(ledger.shards)}
    (folder / "certificate.json").write_text(json.dumps(shown, indent=1))


def merge(folder: Path, rows: int) -> None:
    """Publish the run."""
    from airflow_batchinfer.pipeline.merge import merge as merge_run

    merged = merge_run(_store(folder), f"bench/runs/{RUN_ID}")
    assert merged.results + merged.dead_letters == rows


STEPS: dict[str, Callable[[Path, int], None]] = {
    "generate": generate,
    "copy": copy,
    "split": split,
    "commit": commit,
    "reconcile": reconcile,
    "merge": merge,
}


def measured(step: str, folder: Path, rows: int) -> Measure:
    """Run one step in a fresh process."""
    before = time.monotonic()
    command = [sys.executable, __file__, "--rows", str(rows), "--folder", str(folder), "--step", step]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=_environment(folder))
    measure = json.loads(done.stdout.splitlines()[-1])
    assert measure["seconds"] <= time.monotonic() - before
    return Measure(measure["seconds"], measure["cpu_seconds"], measure["peak_mib"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, action="append", help="size; may be given several times")
    parser.add_argument("--folder", type=Path, default=Path("bench-data"), help="working folder")
    parser.add_argument("--step", choices=STEPS, help="run only this step, in this process")
    parser.add_argument("--out", type=Path, help="write the measures here as JSON")
    arguments = parser.parse_args()
    sizes = arguments.rows or [1_000_000, 10_000_000]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.step:
        started = time.monotonic()
        STEPS[arguments.step](arguments.folder.resolve(), sizes[0])
        seconds = time.monotonic() - started
        used = resource.getrusage(resource.RUSAGE_SELF)
        measure = Measure(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
        print(json.dumps({"step": arguments.step, "rows": sizes[0], **vars(measure)}))
        return
    measures: dict[int, dict[str, Measure]] = {}
    for rows in sizes:
        folder = arguments.folder.resolve() / str(rows)
        folder.mkdir(parents=True, exist_ok=True)
        measures[rows] = {step: measured(step, folder, rows) for step in STEPS}
        shutil.rmtree(folder / "store")
        (folder / "input.parquet").unlink()
        print(table(measures), flush=True)
    if arguments.out:
        data = {n: {s: vars(m) for s, m in steps.items()} for n, steps in measures.items()}
        arguments.out.write_text(json.dumps(data, indent=1))


def table(measures: dict[int, dict[str, Measure]]) -> str:
    """The measures as a Markdown table with the ratios to the copy."""
    lines = [
        "| rows | step | seconds | of the copy | limit | peak MiB |",
        "|---|---|---|---|---|---|",
    ]
    for rows, steps in measures.items():
        for step in ("copy", *LIMITS):
            m = steps[step]
            limit = f"{LIMITS[step]:g}" if step in LIMITS else ""
            ratio = m.seconds / steps["copy"].seconds
            lines.append(
                f"| {rows:,} | {step} | {m.seconds:.1f} | {ratio:.2f} | {limit} | {m.peak_mib:.0f} |"
            )
    return "\n".join(lines)


def _spec(folder: Path) -> Any:
    from airflow_batchinfer.spec import JobSpec

    return JobSpec.parse(
        {
            "name": "bench",
            "input": {
                "path": str(folder / "input.parquet"),
                "id_column": "id",
                "carry": ["category", "amount", "created"],
            },
            "prompt": {"template": "Summarise: {{ text }}"},
            "model": {"name": "none", "backend": "tests.engines:InstantEngine"},
            "store": str(folder / "store"),
        }
    )


def _store(folder: Path) -> Any:
    from airflow_batchinfer.store import open_store

    return open_store(str(folder / "store"))


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {"BATCHINFER_SCRATCH": str(folder / "scratch")}


def _pool(rng: np.random.Generator) -> str:
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = np.array(["".join(rng.choice(letters, n)) for n in rng.integers(2, 11, 20_000)])
    ranks = np.minimum(rng.zipf(1.3, _POOL_BYTES // 5) - 1, len(words) - 1)
    return " ".join(words[ranks])


def _texts(pool: str, key: npt.NDArray[np.int64]) -> list[str]:
    """A text for each key, always the same for the same key: where it starts and how long it is."""
    mixed = (key.astype(np.uint64) + np.uint64(1 << 40)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    start = (mixed % np.uint64(len(pool) - 64 * 1024)).astype(np.int64)
    uniform = ((mixed >> np.uint64(11)) % np.uint64(10**6)).astype(np.float64) / 10**6
    # An exponential: most texts are short, a few ten times the mean.
    length = np.clip(-_MEAN_BYTES * np.log1p(-uniform), 20, 20_000).astype(np.int64)
    return [pool[a : a + n] for a, n in zip(start.tolist(), length.tolist(), strict=True)]


if __name__ == "__main__":
    main()
