"""What earlier attempts at a shard have already made durable: it is never paid for again."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64

from airflow_batchinfer import __version__
from airflow_batchinfer.errors import ReleaseError
from airflow_batchinfer.outcome import Outcome, Reason, outcome_of
from airflow_batchinfer.run.commit import CommittedPart, Tokens
from airflow_batchinfer.run.document import written_elsewhere
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import PlannedShard
from airflow_batchinfer.run.shard import PART_METADATA_PREFIX, PART_SCHEMA, ROW_ID
from airflow_batchinfer.store import Store
from airflow_batchinfer.store.arrow_errors import arrow_reads

log = logging.getLogger(__name__)

ROWS_METADATA = f"{PART_METADATA_PREFIX}rows"
"""How many rows a part's writer put into it: no checksum covers Parquet's own counts."""

RELEASE_METADATA = f"{PART_METADATA_PREFIX}written_by"
"""The release that wrote a part: columns that this one does not know are no damage then."""

_TOKENS = ("prompt_tokens", "output_tokens", "cached_tokens")


@dataclass(slots=True)
class Resumed:
    """Rows of a shard with a durable outcome. Bitmaps, so the size hardly depends on their number."""

    done: BitMap64 = field(default_factory=BitMap64)
    by_reason: dict[Reason | None, BitMap64] = field(default_factory=dict)
    """The same rows by the reason they did not succeed; none: they did."""
    parts: list[CommittedPart] = field(default_factory=list)
    """Parts that hold them, in the order in which readers must take them."""
    epochs: set[str] = field(default_factory=set)
    tokens: Tokens = field(default_factory=Tokens)
    overlapping_rows: int = 0
    warnings: list[str] = field(default_factory=list)

    def reason_of(self, row_id: int) -> Reason | None:
        """Why a done row did not succeed; none if it did."""
        return next(reason for reason, rows in self.by_reason.items() if row_id in rows)


def part_metadata(fingerprint: str, epoch: str, planned: PlannedShard) -> dict[str, str]:
    """What a part says of itself; a part that says otherwise answers another question."""
    values = {
        "fingerprint": fingerprint,
        "epoch": epoch,
        "shard": str(planned.shard),
        "rows_sha256": planned.rows_sha256,
    }
    return {PART_METADATA_PREFIX + name: value for name, value in values.items()}


def resume(store: Store, layout: RunLayout, planned: PlannedShard, fingerprint: str, epoch: str) -> Resumed:
    """Take the parts of all attempts but `epoch` that answer these rows with this fingerprint.

    A part that cannot be read is set aside with a warning: nothing names it, so no reader sees it, and
    its rows run again.

    Raises:
        ReleaseError: a part is another release's and not understood: its rows are paid for.
    """
    resumed = Resumed()
    for key, part_epoch in _parts(store, layout, planned.shard):
        if part_epoch == epoch:
            continue
        try:
            data = store.read_bytes(key)
            with arrow_reads(store.uri_of(key)):
                table = _checked(data, part_metadata(fingerprint, part_epoch, planned), store.uri_of(key))
        except (pa.ArrowException, OSError, ValueError) as error:
            resumed.warnings.append(f"{store.uri_of(key)} is set aside, its rows run again: {error}")
            log.warning(resumed.warnings[-1])
            continue
        if table is not None:
            digest = hashlib.sha256(data).hexdigest()
            part = CommittedPart(key=key, rows=table.num_rows, bytes=len(data), sha256=digest)
            _take(resumed, table, part, part_epoch)
    return resumed


def _parts(store: Store, layout: RunLayout, shard: int) -> Iterator[tuple[str, str]]:
    """Keys of a shard's parts by epoch and index, and their epochs."""
    folder = layout.shard(shard)
    for info in store.list(folder):
        epoch, _, name = info.key.removeprefix(f"{folder}/").rpartition("/")
        if name.startswith("part-") and name.endswith(".parquet"):
            yield info.key, epoch


def _checked(data: bytes, expected: dict[str, str], uri: str) -> pa.Table | None:
    """A part's table; none if it answers another question.

    Raises:
        ReleaseError: it has columns or reasons that this release does not know, and is another one's.
        ValueError: the content breaks what a part promises.
        pyarrow.ArrowException, OSError: it is no Parquet, or a page's checksum is wrong.
    """
    file = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True)
    metadata = file.schema_arrow.metadata or {}
    if any(metadata.get(name.encode()) != value.encode() for name, value in expected.items()):
        return None
    table = file.read(use_threads=False)
    release = metadata.get(RELEASE_METADATA.encode(), __version__.encode()).decode("utf-8", "replace")
    if not table.schema.equals(PART_SCHEMA):
        raise _not_a_part("its columns are not those of a part", release, uri)
    table.validate(full=True)
    rows = table.column(ROW_ID)
    if metadata.get(ROWS_METADATA.encode(), str(len(rows)).encode()) != str(len(rows)).encode():
        raise ValueError("it does not hold as many rows as its writer put into it")
    if len(rows) and (pc.min(rows).as_py() or 0) < 0:
        raise ValueError("a row id is negative")
    if rows.null_count or pc.count_distinct(rows).as_py() != len(rows):
        raise ValueError("a row stands in it twice")
    try:
        _by_reason(table)
    except ValueError as error:
        raise _not_a_part(str(error), release, uri) from error
    return table


def _not_a_part(problem: str, release: str, uri: str) -> ReleaseError | ValueError:
    """What to make of a sound file that is no part as this release knows them."""
    if release == __version__:
        return ValueError(problem)
    return ReleaseError(f"{uri} holds rows that are paid for, but {written_elsewhere(release)} ({problem})")


def _take(resumed: Resumed, table: pa.Table, part: CommittedPart, epoch: str) -> None:
    ids = BitMap64(table.column(ROW_ID).to_pylist())
    new = ids - resumed.done
    if not new:
        return
    if len(new) < len(ids):
        resumed.overlapping_rows += len(ids) - len(new)
        table = table.filter(pa.array([i in new for i in table.column(ROW_ID).to_pylist()]))
    resumed.done |= new
    resumed.parts.append(part)
    resumed.epochs.add(epoch)
    resumed.tokens = _add(resumed.tokens, table)
    for reason, rows in _by_reason(table).items():
        resumed.by_reason.setdefault(reason, BitMap64()).update(rows)


def _add(tokens: Tokens, table: pa.Table) -> Tokens:
    prompt, output, cached = (pc.sum(table.column(name)).as_py() or 0 for name in _TOKENS)
    return Tokens(prompt=tokens.prompt + prompt, output=tokens.output + output, cached=tokens.cached + cached)


def _by_reason(table: pa.Table) -> dict[Reason | None, list[int]]:
    """Row ids by reason. Raises `ValueError` where an outcome is not its reason's."""
    grouped = table.select(["outcome", "reason", ROW_ID]).group_by(["outcome", "reason"], use_threads=False)
    found: dict[Reason | None, list[int]] = {}
    for group in grouped.aggregate([(ROW_ID, "list")]).to_pylist():
        reason = None if group["reason"] is None else Reason(group["reason"])
        if Outcome(group["outcome"]) is not outcome_of(reason):
            raise ValueError(f"outcome {group['outcome']} with reason {reason}")
        found[reason] = group[f"{ROW_ID}_list"]
    return found
