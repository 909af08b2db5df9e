"""Faults of an S3 server: a proxy makes them, between the victim and a server that works."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_batchinfer.errors import ExitCode
from airflow_batchinfer.pipeline.split import newest_plan
from airflow_batchinfer.store import open_store
from tests.chaos.case import Case
from tests.chaos.injection import note_strike
from tests.chaos.oracle import Account, S3Files
from tests.chaos.run import NO_FAULT, STRIKES, ChaosRun, chaos_job, start_victim
from tests.s3 import FaultyProxy, MotoServer
from tests.s3.proxy import Fault as S3Fault
from tests.s3.servers import BUCKET

_URI = "s3://batch/store"
_WRITE_FAULTS: tuple[S3Fault, ...] = ("500", "503", "slowdown", "429", "reset", "short", "drop_after", "slow")
_READ_FAULTS: tuple[S3Fault, ...] = ("500", "slowdown", "reset", "partial", "short")
_BIG_ROWS = 40
_UPLOAD = (("PUT", "partNumber=1"), ("PUT", "partNumber=2"), ("POST", "uploadId="))
"""Requests of an upload in pieces: method, and what its address holds."""


def s3_cases() -> Iterator[Case]:
    """Storage errors on S3."""
    for method, faults in (("PUT", _WRITE_FAULTS), ("GET", _READ_FAULTS)):
        what = "write" if method == "PUT" else "read"
        yield Case(
            f"S3 fails each {what} once",
            f"the first {method} of each object: {', '.join(faults)}",
            tuple(partial(_once_each, method, fault) for fault in faults),
        )
    point = "on parts and commits from the second part on, until the worker gives up"
    yield Case("S3 throttles for long", f"503 SlowDown {point}", (partial(_refused, "slowdown"),))
    yield Case("S3 takes the permission away", f"403 AccessDenied {point}", (partial(_refused, "denied"),))
    yield Case(
        "S3 takes the permission away",
        "403 AccessDenied when a shard resumes: at its plan, its listing, its part; the worker gives up",
        tuple(partial(_unreadable, "GET", what) for what in ("plan.json", "list-type=2", "part-00000")),
    )
    for kills, what in ((False, "an error"), (True, "SIGKILL of split")):
        yield Case(
            "a multipart upload breaks off",
            f"at its first piece, its second, its completion: {what}; then split again",
            tuple(partial(_multipart, request, kills) for request in _UPLOAD),
        )


@contextmanager
def _server(folder: Path) -> Iterator[tuple[FaultyProxy, S3Files]]:
    """A server behind a proxy, the environment in which boto3 finds it, and the oracle's look at it."""
    with MotoServer(folder / "server") as server, FaultyProxy(server.endpoint_url) as proxy:
        found = dict(os.environ)
        os.environ.update(server.credentials | {"AWS_ENDPOINT_URL_S3": proxy.endpoint_url})
        try:
            yield proxy, S3Files(_URI.removeprefix(f"s3://{BUCKET}/"), server, proxy)
        finally:
            for fault in proxy.made:
                note_strike(folder / STRIKES, f"S3 {fault}")
            os.environ.clear()
            os.environ.update(found)


def _once_each(method: str, fault: S3Fault, folder: Path) -> Account:
    with _server(folder) as (proxy, files):
        run = ChaosRun(folder, store=_URI, files=files)
        seen: set[str] = set()

        def rule(asked: str, path: str) -> S3Fault | None:
            first = asked == method and path not in seen
            seen.add(path)
            return fault if first else None

        proxy.rule = rule
        code = run.attempt()
        assert proxy.made, "the fault never struck"
        assert code == ExitCode.COMMITTED, f"exit {code}; log: {folder / 'log.txt'}"
        return run.account()


def _refused(fault: S3Fault, folder: Path) -> Account:
    with _server(folder) as (proxy, files):
        run = ChaosRun(folder, store=_URI, files=files)
        _give_up(run, proxy, _late_writes(fault))
        run.finish()
        return run.account()


def _unreadable(method: str, what: str, folder: Path) -> Account:
    """What cannot be read now may be there: nothing is paid before that is known."""
    with _server(folder) as (proxy, files):
        run = ChaosRun(folder, store=_URI, files=files)
        _give_up(run, proxy, _late_writes("denied"))
        paid = run.paid_rows()
        _give_up(run, proxy, lambda asked, path: "denied" if asked == method and what in path else None)
        assert run.paid_rows() == paid, "it paid for rows before it knew which are durable"
        run.finish()
        return run.account()


def _late_writes(fault: S3Fault) -> Callable[[str, str], S3Fault | None]:
    def rule(method: str, path: str) -> S3Fault | None:
        late = "part-" in path and "part-00000" not in path
        return fault if method == "PUT" and (late or "commit.json" in path) else None

    return rule


def _give_up(run: ChaosRun, proxy: FaultyProxy, rule: Callable[[str, str], S3Fault | None]) -> None:
    """An attempt that the rule must strike, and that must end for that reason."""
    made = len(proxy.made)
    proxy.rule = rule
    code = run.attempt()
    proxy.rule = _no_fault
    assert len(proxy.made) > made, f"the fault never struck (exit {code})"
    assert code == ExitCode.STORE_FAILED, f"exit {code}; log: {run.folder / 'log.txt'}"


def _multipart(request: tuple[str, str], kills: bool, folder: Path) -> Account:
    """The rows file goes up in pieces; half of it must be nothing to any reader, and no hindrance."""
    texts = [secrets.token_hex(256 * 1024) for _ in range(_BIG_ROWS)]
    pq.write_table(pa.table({"text": texts}), folder / "in.parquet")
    with _server(folder) as (proxy, files):
        spec = chaos_job(folder, _URI, input={"path": str(folder / "in.parquet")})
        (folder / "job.yaml").write_text(spec.to_yaml())
        split = start_victim(folder, NO_FAULT, "split", [str(folder / "job.yaml")])
        proxy.rule = _at_request(request, split, kills)
        code = split.wait(60)
        assert proxy.made, "nothing was uploaded in pieces"
        assert code == (-signal.SIGKILL if kills else 1), f"exit {code}; log: {folder / 'log.txt'}"
        proxy.rule = _no_fault
        store = open_store(spec.store)
        left = [info.key for info in store.list(f"{spec.name}/runs")]
        assert not left, f"half an upload can be seen: {left}"
        assert start_victim(folder, NO_FAULT, "split", [str(folder / "job.yaml")]).wait(60) == 0
        plan = newest_plan(store, spec.name, "run")
        assert plan is not None
        run = ChaosRun(folder, texts, plan=plan, files=files)
        run.finish()
        return run.account()


def _at_request(
    request: tuple[str, str], process: subprocess.Popen[bytes], kills: bool
) -> Callable[[str, str], S3Fault | None]:
    def rule(method: str, path: str) -> S3Fault | None:
        if method != request[0] or request[1] not in path:
            return None
        if kills:
            process.kill()
        return "reset"

    return rule


def _no_fault(method: str, path: str) -> S3Fault | None:
    return None
