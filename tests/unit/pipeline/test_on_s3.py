"""The whole data side with input, store, tables and exports on S3-API servers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_batchinfer.cli import main
from airflow_batchinfer.errors import InputError, StoreError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.pipeline.housekeeping import delete_runs, delete_unfinished, vacuum_tables
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.replay import prepare_replay
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.pipeline.standing import standing_of
from airflow_batchinfer.run.layout import RunLayout, safe_run_id
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store, open_store
from tests.unit.pipeline.runs import frozen_rows, publish_run, table_rows

if TYPE_CHECKING:
    from tests.s3 import S3Server

pytestmark = pytest.mark.airflow_env

OLD = timedelta(0)
"""An age that all has reached after `grow_old`."""
ROWS = [{"id": f"k{i}", "text": f"text {i % 30}", "who": f"w{i}"} for i in range(40)]


def grow_old() -> None:
    """Servers tell times in whole seconds, and may round them up."""
    time.sleep(1.5)


@pytest.fixture(scope="module", params=["moto", "juicefs"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    from tests.s3 import s3_server_of_kind

    with s3_server_of_kind(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store over a prefix of its own, with the credentials in the environment."""
    for name, value in server.credentials.items():
        monkeypatch.setenv(name, value)
    return open_store(f"s3://batch/{uuid.uuid4().hex}", {"endpoint_url": server.endpoint_url})


def put_parquet(bucket: Store, key: str, rows: list[dict[str, Any]]) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    bucket.write_bytes(key, sink.getvalue().to_pybytes())


def job(bucket: Store, path: str, **fields: Any) -> JobSpec:
    spec: dict[str, Any] = {
        "name": "job",
        "store": bucket.uri,
        "storage_options": bucket.options(),
        "input": {
            "path": bucket.uri_of(path),
            "id_column": "id",
            "carry": ["who"],
            "storage_options": bucket.options(),
        },
        "prompt": {"template": "{{ text }}"},
        "model": {"name": "none", "backend": "tests.engines:InstantEngine"},
        "sharding": {"max_rows": 10},
    }
    return JobSpec.parse(spec | fields)


def test_whole_run_with_a_replay(bucket: Store) -> None:
    put_parquet(bucket, "in/a.parquet", ROWS[:25])
    put_parquet(bucket, "in/b.parquet", ROWS[25:])
    export = [{"format": "jsonl", "path": bucket.uri_of("out/{run_id}.jsonl")}]
    run_id = "manual__2026-01-01T00:00:00+00:00"  # its partition's folder has escapes in its name
    plan = split(bucket, job(bucket, "in", export=export), run_id)
    assert plan.rows == 40
    publish_run(bucket, plan, dead=lambda i: Reason.TIMED_OUT if i == 3 else None)
    assert [r["who"] for r in table_rows(bucket, "job/results")] == [
        f"w{i}" for i in range(40) if i not in (3, 33)
    ]
    lines = [json.loads(x) for x in bucket.read_bytes(f"out/{safe_run_id(run_id)}.jsonl").splitlines()]
    assert [x["row_id"] for x in lines] == [i for i in range(40) if i not in (3, 33)]
    publish_run(bucket, prepare_replay(bucket, plan.folder, "again"))
    assert [r["row_id"] for r in table_rows(bucket, "job/results")] == list(range(40))
    assert (standing_of(bucket, plan).resolved, standing_of(bucket, plan).dead) == (2, 0)
    bucket.delete(RunLayout(plan.folder).merge)
    merge(bucket, plan.folder)
    assert [r["row_id"] for r in table_rows(bucket, "job/results")] == list(range(40))
    assert vacuum_tables(bucket, "job").objects == 0
    assert vacuum_tables(bucket, "job", timedelta(0)).objects >= 1
    assert vacuum_tables(bucket, "job", timedelta(0)).objects == 0
    assert [r["row_id"] for r in table_rows(bucket, "job/results")] == list(range(40))
    grow_old()
    deleted = delete_runs(bucket, "job", OLD).runs
    assert sorted(deleted) == ["job/runs/again", plan.folder]
    assert len(table_rows(bucket, "job/results")) == 40


@pytest.mark.parametrize("name", ["in/a.jsonl", "in/a.csv", "in/*.jsonl"])
def test_text_inputs_and_globs(bucket: Store, name: str) -> None:
    if name.endswith("csv"):
        text = "id,text,who\n" + "".join(f"{r['id']},{r['text']},{r['who']}\n" for r in ROWS)
    else:
        text = "".join(json.dumps(r) + "\n" for r in ROWS)
    bucket.write_bytes(name.replace("*", "a"), text.encode())
    bucket.write_bytes("in/below/b.jsonl", b"not of a glob that does not say `**`")
    plan = split(bucket, job(bucket, name), "run")
    texts = {r["row_id"]: r["input"]["text"] for r in frozen_rows(bucket, plan)}
    assert texts == {i: f"text {i}" for i in range(30)}
    assert plan.input.files[0].uri == bucket.uri_of(name.replace("*", "a"))


def test_delta_table_and_a_missing_object(bucket: Store) -> None:
    from deltalake import write_deltalake

    write_deltalake(bucket.uri_of("in"), pa.Table.from_pylist(ROWS), storage_options=bucket.delta_options())
    assert split(bucket, job(bucket, "in"), "run").rows == 40
    with pytest.raises(InputError, match="no such object"):
        split(bucket, job(bucket, "nothing", name="other"), "run")
    bucket.write_bytes("text/a.txt", b"text")
    with pytest.raises(InputError, match="1 objects, none with a known extension"):
        split(bucket, job(bucket, "text", name="other"), "run")


@pytest.mark.parametrize("name", ["in/a.parquet", "in/a.csv", "in/a.jsonl"])
def test_an_input_that_cannot_be_read_now_is_not_taken_for_a_damaged_one(
    server: S3Server, bucket: Store, name: str
) -> None:
    from tests.s3 import FaultyProxy

    put_parquet(bucket, "in/a.parquet", ROWS)
    bucket.write_bytes("in/a.csv", b"id,text,who\n1,a,b\n")
    bucket.write_bytes("in/a.jsonl", b'{"id": 1, "text": "a", "who": "b"}\n')
    with FaultyProxy(server.endpoint_url) as proxy:
        proxy.rule = lambda method, path: "denied" if path.endswith(name) else None
        shaken = open_store(bucket.uri, {"endpoint_url": proxy.endpoint_url})
        with pytest.raises(StoreError, match=f"cannot read .*{name}: .*ACCESS_DENIED"):
            split(bucket, job(shaken, name, store=bucket.uri, storage_options=bucket.options()), "run")


def test_old_runs_are_pruned(bucket: Store, capsys: pytest.CaptureFixture[str]) -> None:
    put_parquet(bucket, "in/a.parquet", ROWS)
    for name in ("one", "two's", "three"):
        plan = split(bucket, job(bucket, "in"), name)
        publish_run(bucket, plan, dead=lambda i: Reason.TIMED_OUT if i == 3 else None)
    option = f"endpoint_url={bucket.options()['endpoint_url']}"
    where = ("--store", bucket.uri, "--store-option", option)
    assert main(["prune", "job", "--keep-runs", "1", *where]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "one",
        "two's",
        "rows: 76 results, 4 dead letters deleted",
    ]
    for table in ("job/results", "dead_letters"):
        assert {r["run_id"] for r in table_rows(bucket, table)} == {"three"}


@pytest.mark.parametrize("name", ["in", "in-404", "connections"])
def test_a_delta_input_that_cannot_be_read_now_is_not_taken_for_a_damaged_one(
    server: S3Server, bucket: Store, name: str
) -> None:
    from deltalake import write_deltalake

    from tests.s3 import FaultyProxy

    write_deltalake(bucket.uri_of(name), pa.Table.from_pylist(ROWS), storage_options=bucket.delta_options())
    with FaultyProxy(server.endpoint_url) as proxy:
        proxy.rule = lambda method, path: "denied" if path.endswith("00000.json") else None
        shaken = open_store(bucket.uri, {"endpoint_url": proxy.endpoint_url})
        spec = job(shaken, name, store=bucket.uri, storage_options=bucket.options())
        with pytest.raises(StoreError, match="cannot read the table "):
            split(bucket, spec, "run")
        proxy.rule = lambda method, path: None
        assert split(bucket, spec, "run").rows == 40
    bucket.write_bytes(f"{name}/_delta_log/00000000000000000001.json", b"{")
    with pytest.raises(InputError, match=r"00001\.json is damaged: restore it"):
        split(bucket, job(bucket, name), "damaged")


def begin_upload(bucket: Store, key: str) -> None:
    """What a worker leaves that was killed while it uploaded a big part."""
    client = boto3.client("s3", endpoint_url=bucket.options()["endpoint_url"])
    name = bucket.uri_of(key).removeprefix("s3://batch/")
    upload = client.create_multipart_upload(Bucket="batch", Key=name)["UploadId"]
    client.upload_part(Bucket="batch", Key=name, UploadId=upload, PartNumber=1, Body=b"half")


def test_uploads_that_nobody_ended_are_swept(bucket: Store, capsys: pytest.CaptureFixture[str]) -> None:
    put_parquet(bucket, "in/a.parquet", ROWS)
    plan = split(bucket, job(bucket, "in"), "run")
    publish_run(bucket, plan)
    for key in (f"{plan.folder}/shards/00000/e/part-00000.parquet", "job/results/x.parquet", "other/x"):
        begin_upload(bucket, key)
    option = f"endpoint_url={bucket.options()['endpoint_url']}"

    assert main(["sweep", "job", "--dry-run", "--store", bucket.uri, "--store-option", option]) == 0
    assert "half-written: " in capsys.readouterr().out
    grow_old()
    assert delete_unfinished(bucket, "job", OLD, dry_run=True).objects == 2
    assert delete_runs(bucket, "job", OLD).runs == [plan.folder]  # with what was begun in it
    assert delete_unfinished(bucket, "job", OLD).objects == 1
    assert delete_unfinished(bucket, "job", OLD).objects == 0
    assert delete_unfinished(bucket, "other", OLD).objects == 1
    assert len(table_rows(bucket, "job/results")) == 40
