"""The oracle: it reads what is stored with none of the package's code, and counts with plain Python."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from tests.s3 import FaultyProxy, S3Server
from tests.s3.servers import BUCKET


@dataclass(frozen=True)
class Account:
    """What became of a run's rows.

    Attributes:
        lost: input rows in neither table. doubled: rows in the tables more than once.
        wrong: results that are not what the engine answers to that row.
        paid_twice: payments for a row that was durable before the payer began, or by the payer itself.
        paid_beside: payments for a row that another attempt made durable while the payer ran.
        dead: reason by row, of the rows in the dead-letter table.
    """

    lost: int
    doubled: int
    wrong: int
    paid_twice: int
    paid_beside: int
    dead: dict[int, str]


class Files(Protocol):
    """A store's files, read past the package's own store."""

    def durable(self, folder: str) -> dict[str, float]:
        """Files at any depth below a folder, and since when each has been there (Unix seconds)."""
        ...

    def read(self, key: str) -> bytes:
        """A file's bytes."""
        ...

    def table(self, key: str, columns: list[str]) -> list[dict[str, Any]]:
        """The lines of the Delta table at `key`; none if there is no table."""
        ...


class LocalFiles:
    """A folder."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    def durable(self, folder: str) -> dict[str, float]:
        files = (path for path in sorted((self._root / folder).rglob("*")) if path.is_file())
        return {path.relative_to(self._root).as_posix(): path.stat().st_mtime for path in files}

    def read(self, key: str) -> bytes:
        return (self._root / key).read_bytes()

    def table(self, key: str, columns: list[str]) -> list[dict[str, Any]]:
        if not (self._root / key / "_delta_log").is_dir():
            return []
        return DeltaTable(str(self._root / key)).to_pyarrow_table(columns=columns).to_pylist()


class S3Files:
    """A prefix of the bucket, read past the proxy, which only knows since when an object has been there."""

    def __init__(self, prefix: str, server: S3Server, proxy: FaultyProxy) -> None:
        import boto3

        self._prefix, self._proxy = prefix, proxy
        endpoint, credentials = server.endpoint_url, server.credentials
        self._options = {**credentials, "AWS_ENDPOINT_URL_S3": endpoint, "AWS_ALLOW_HTTP": "true"}
        session = boto3.Session(
            credentials["AWS_ACCESS_KEY_ID"],
            credentials["AWS_SECRET_ACCESS_KEY"],
            region_name=credentials["AWS_DEFAULT_REGION"],
        )
        self._client = session.client("s3", endpoint_url=endpoint)

    def durable(self, folder: str) -> dict[str, float]:
        pages = self._client.get_paginator("list_objects_v2")
        cut = len(self._prefix) + 1
        names = [
            item["Key"]
            for page in pages.paginate(Bucket=BUCKET, Prefix=f"{self._prefix}/{folder}/")
            for item in page.get("Contents", ())
        ]
        return {name[cut:]: self._proxy.stored[f"/{BUCKET}/{name}"] for name in names}

    def read(self, key: str) -> bytes:
        found: bytes = self._client.get_object(Bucket=BUCKET, Key=f"{self._prefix}/{key}")["Body"].read()
        return found

    def table(self, key: str, columns: list[str]) -> list[dict[str, Any]]:
        root = f"s3://{BUCKET}/{self._prefix}/"
        try:
            table = DeltaTable(f"{root}{key}", storage_options=self._options)
        except TableNotFoundError:
            return []
        # Not by delta-rs: it may wait for S3 and hold Python up, and with it a proxy in the same process.
        files = [self.read(unquote(uri.removeprefix(root))) for uri in table.file_uris()]
        return [
            line for data in files for line in pq.read_table(io.BytesIO(data), columns=columns).to_pylist()
        ]


def durable_rows(files: Files, run: str, damaged: Collection[str] = ()) -> dict[int, float]:
    """Rows that stand in a readable part of any attempt, and since when.

    Args:
        files: the store.
        run: the run's folder.
        damaged: keys of what the case has damaged: what is in such parts counts as lost.
    """
    since: dict[int, float] = {}
    for key, time in files.durable(f"{run}/shards").items():
        if "/part-" not in key or key in damaged:
            continue
        table = _part(files.read(key))
        for row in [] if table is None else table["row_id"].to_pylist():
            since[row] = min(time, since.get(row, time))
    return since


def _part(data: bytes) -> pa.Table | None:
    try:
        return pq.read_table(io.BytesIO(data), page_checksum_verification=True)
    except (pa.ArrowException, OSError):
        return None


@dataclass(frozen=True)
class Payment:
    """A completion in an engine's log: the row, when it was sent, and when the engine that answered began.

    All of one process have the same `begun`, and no two processes do.
    """

    row: int
    sent: float
    begun: float


def payments(log: Path) -> Iterator[Payment]:
    """What an engine's log says, in the order in which it was answered; half a last line is left out."""
    text = log.read_text() if log.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        key, _, _, sent, begun = line.split("\t")
        yield Payment(int(key.split("/", 1)[0]), float(sent), float(begun))


def paid_again(log: Path, since: Mapping[int, float]) -> tuple[int, int]:
    """Payments for rows that were durable when they were sent: paid twice, and paid beside another.

    A row that is on its way when a part with it lands is neither: nobody could have known. An attempt that
    runs on while another makes its rows durable (a zombie) looks at the store now and then only; what it
    sends in between is *beside*, unless it had an answer to that row before, and so made the part itself
    or dropped the answer.
    """
    twice = beside = 0
    answered: set[tuple[int, float]] = set()
    for payment in payments(log):
        durable, payer = since.get(payment.row), (payment.row, payment.begun)
        if durable is not None and payment.sent > durable:
            if payment.begun > durable or payer in answered:
                twice += 1
            else:
                beside += 1
        answered.add(payer)
    return twice, beside


@dataclass(frozen=True)
class Published:
    """What stands in the two tables: answers and reasons by row, and rows that stand there twice."""

    results: dict[int, str]
    dead: dict[int, str]
    doubled: int


def published(files: Files, job: str) -> Published:
    """Read the tables as they are; a dead letter that a replay has resolved stands in the results."""
    answers = files.table(f"{job}/results", ["row_id", "output"])
    letters = files.table("dead_letters", ["row_id", "reason", "status"])
    dead = [letter for letter in letters if letter["status"] != "resolved"]
    seen = Counter(line["row_id"] for line in (*answers, *dead))
    return Published(
        {line["row_id"]: line["output"] for line in answers},
        {letter["row_id"]: letter["reason"] for letter in dead},
        sum(1 for count in seen.values() if count > 1),
    )


def verdict(
    files: Files,
    job: str,
    run: str,
    answers: Mapping[int, str],
    again: tuple[int, int],
    damaged: Collection[str] = (),
) -> Account:
    """Count every input row in the tables, and compare answers; fail if the ledger says otherwise.

    Args:
        files: the store.
        job: the job's name.
        run: the run's folder.
        answers: what the engine says to each input row.
        again: what `paid_again` found.
        damaged: as for `durable_rows`.
    """
    found = published(files, job)
    seen = found.results.keys() | found.dead.keys()
    assert seen <= answers.keys(), f"rows that were never in the input: {sorted(seen - answers.keys())}"
    _check_ledger(files, run, damaged)
    return Account(
        lost=len(answers.keys() - seen),
        doubled=found.doubled,
        wrong=sum(1 for row, output in found.results.items() if output != answers[row]),
        paid_twice=again[0],
        paid_beside=again[1],
        dead=found.dead,
    )


def _check_ledger(files: Files, run: str, damaged: Collection[str]) -> None:
    """Fail unless the ledger counts what stands in the parts of each shard's commit of the lowest epoch."""
    plan, ledger = _document(files, f"{run}/plan.json"), _document(files, f"{run}/ledger.json")
    keys = [key for key in files.durable(f"{run}/shards") if key not in damaged]
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for shard in plan["shards"]:
        folder = f"{run}/shards/{shard['shard']:05d}/"
        names = [key for key in keys if key.startswith(folder) and key.endswith("/commit.json")]
        commits = [_commit(files, name) for name in names]
        ours = [c for c in commits if c.get("fingerprint") == plan["fingerprint"]]
        commit = min(ours, key=lambda c: c["epoch"])
        seen: set[int] = set()
        for part in commit["parts"]:
            table = _part(files.read(part["key"]))
            assert table is not None, f"{part['key']}, which a commit names, cannot be read"
            for line in table.select(["row_id", "outcome", "reason"]).to_pylist():
                if line["row_id"] not in seen:
                    seen.add(line["row_id"])
                    counts[line["outcome"]] += 1
                    reasons.update([line["reason"]] if line["reason"] else [])
    stated = {outcome: n for outcome, n in ledger["counts"].items() if n}
    assert stated == counts, f"the ledger counts {stated}, the parts hold {dict(counts)}"
    assert ledger["reasons"] == reasons, f"the ledger says {ledger['reasons']}, the parts {dict(reasons)}"


def _commit(files: Files, key: str) -> dict[str, Any]:
    """A commit; an empty one where it is no JSON: half a commit is none."""
    try:
        return _document(files, key)
    except json.JSONDecodeError:
        return {}


def _document(files: Files, key: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files.read(key))
    return found
