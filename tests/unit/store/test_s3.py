"""`S3Store` on two real servers: moto, and the JuiceFS gateway without conditional writes."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from airflow_batchinfer.errors import CorruptError, InputError, SpecError, StoreError
from airflow_batchinfer.run.parquet import open_parquet
from airflow_batchinfer.store import open_store
from airflow_batchinfer.worker.reader import read_rows
from tests.plans import job, plan_run

if TYPE_CHECKING:
    from airflow_batchinfer.store.s3 import S3Store
    from tests.s3 import FaultyProxy, S3Server

pytestmark = pytest.mark.airflow_env

NOW = timedelta(seconds=-5)
"""An age that all has reached, though a server's clock may be a little ahead."""
NO_SUCH_SERVER = "http://127.0.0.1:9"


def big_file(path: Path, megabytes: int = 70) -> str:
    """Write random bytes, more than one part's; their digest."""
    data = os.urandom(1024 * 1024)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for i in range(megabytes):
            block = i.to_bytes(4, "big") + data[4:]
            file.write(block)
            digest.update(block)
    return digest.hexdigest()


def _always(fault: Any, method: str, path: str) -> Any:
    return fault


class TestPromises:
    def test_objects_come_back(self, store: S3Store) -> None:
        store.write_bytes("job/plan.json", b"{}")
        store.write_bytes("job/plan.json", b"{1}")

        assert store.read_bytes("job/plan.json") == b"{1}"
        assert store.exists("job/plan.json")
        assert store.uri_of("job/plan.json") == f"{store.uri}/job/plan.json"

    def test_an_empty_object(self, store: S3Store) -> None:
        store.write_bytes("empty", b"")

        assert store.read_bytes("empty") == b""

    def test_what_is_not_there(self, store: S3Store) -> None:
        store.write_bytes("folder/file", b"x")

        with pytest.raises(FileNotFoundError, match="jobs/none does not exist"):
            store.read_bytes("none")
        assert not store.exists("none")
        assert not store.exists("folder")
        assert list(store.list("none")) == []
        store.delete("none")

    def test_listing_is_by_folder_and_sorted(self, store: S3Store) -> None:
        keys = ["a/é ü+%/1", "a/b/c", "a/x=1/y", "ab/c"]
        for key in reversed(keys):
            store.write_bytes(key, key.encode())

        found = list(store.list("a"))

        assert [info.key for info in found] == sorted(keys[:3])
        assert [info.size for info in found] == [len(key.encode()) for key in sorted(keys[:3])]
        assert [info.key for info in store.list("")] == sorted(keys)
        assert store.read_bytes("a/é ü+%/1").decode() == "a/é ü+%/1"

    def test_folders_stand_directly_in_one(self, store: S3Store) -> None:
        for key in (
            "runs/b/plan.json",
            "runs/a/shards/0/x",
            "runs/a~2/x",
            "runs/a-b/x",
            "runs/file",
            "other/c/x",
        ):
            store.write_bytes(key, b"x")
        assert list(store.folders("runs")) == ["runs/a-b", "runs/a", "runs/a~2", "runs/b"]
        assert list(store.folders("")) == ["other", "runs"]
        assert list(store.folders("nowhere")) == []

    def test_info(self, store: S3Store) -> None:
        store.write_bytes("a/b", b"123")
        found, listed = store.info("a/b"), next(store.list("a"))
        assert found is not None
        assert (found.key, found.size, int(found.modified)) == ("a/b", 3, int(listed.modified))
        assert store.info("a/c") is None

    def test_listing_more_than_a_page(self, store: S3Store) -> None:
        with ThreadPoolExecutor(8) as pool:  # the store may be called from several threads
            list(pool.map(lambda i: store.write_bytes(f"many/{i:05d}", b""), range(1005)))

        assert [info.key for info in store.list("many")] == [f"many/{i:05d}" for i in range(1005)]

    def test_a_placeholder_of_a_folder_is_no_object(self, store: S3Store) -> None:
        store._client().put_object(Bucket="batch", Key=f"{store._root}/folder/", Body=b"")
        store.write_bytes("folder/file", b"x")

        assert [info.key for info in store.list("folder")] == ["folder/file"]

    def test_deleting(self, store: S3Store) -> None:
        store.write_bytes("a/b", b"x")
        store.delete("a/b")
        store.delete("a/b")

        assert not store.exists("a/b")

    def test_a_small_file_moves_in(self, store: S3Store, tmp_path: Path) -> None:
        source = tmp_path / "part"
        source.write_bytes(b"rows")

        store.put_file(source, "part-00000.parquet")

        assert store.read_bytes("part-00000.parquet") == b"rows"
        assert not source.exists()

    def test_a_big_file_moves_in_by_parts(self, store: S3Store, tmp_path: Path) -> None:
        digest = big_file(tmp_path / "rows")

        store.put_file(tmp_path / "rows", "rows.parquet")

        filesystem, root = store.filesystem()
        with filesystem.open_input_stream(f"{root}/rows.parquet") as stream:
            found = hashlib.sha256()
            while block := stream.read(8 * 1024 * 1024):
                found.update(block)
        assert found.hexdigest() == digest
        assert store._client().list_multipart_uploads(Bucket="batch").get("Uploads", []) == []

    def test_arrow_reads_parquet(self, store: S3Store) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"row_id": [1, 2, 3]}), sink)
        store.write_bytes("rows.parquet", sink.getvalue().to_pybytes())

        filesystem, root = store.filesystem()

        assert pq.read_table(f"{root}/rows.parquet", filesystem=filesystem)["row_id"].to_pylist() == [1, 2, 3]

    def test_delta_tables(self, store: S3Store) -> None:
        import deltalake
        import pyarrow as pa

        address = store.uri_of("results")
        for value in (1, 2):
            table = pa.table({"a": [value]})
            deltalake.write_deltalake(address, table, mode="append", storage_options=store.delta_options())

        table = deltalake.DeltaTable(address, storage_options=store.delta_options()).to_pyarrow_table()
        assert sorted(table["a"].to_pylist()) == [1, 2]

    def test_it_opens_again_from_its_options(self, store: S3Store) -> None:
        store.write_bytes("a", b"x")

        assert open_store(store.uri, store.options()).read_bytes("a") == b"x"

    @pytest.mark.parametrize("key", ["../other", "/absolute", "a/../../b", "a//b", "", "a/."])
    def test_keys_stay_inside(self, store: S3Store, key: str) -> None:
        with pytest.raises(StoreError, match="leaves the store"):
            store.write_bytes(key, b"")

    def test_leftovers_of_killed_uploads_are_aborted(self, store: S3Store) -> None:
        client, key = store._client(), f"{store._root}/run/part"
        upload = client.create_multipart_upload(Bucket="batch", Key=key)["UploadId"]
        client.upload_part(Bucket="batch", Key=key, UploadId=upload, PartNumber=1, Body=b"half")

        assert not store.exists("run/part")
        assert list(store.list("run")) == []
        assert store.remove_unfinished("other", NOW) == 0
        assert store.remove_unfinished("run", NOW, dry_run=True) == 1
        assert store.remove_unfinished("run", NOW) == 1
        assert store.remove_unfinished("run", NOW) == 0

    def test_an_upload_that_may_still_run_is_left_alone(self, s3_server: S3Server, store: S3Store) -> None:
        from tests.s3 import MotoServer

        if isinstance(s3_server, MotoServer):
            pytest.skip("moto says of every upload that it began in 2010")
        store._client().create_multipart_upload(Bucket="batch", Key=f"{store._root}/run/part")

        assert store.remove_unfinished("run", timedelta(days=1)) == 0
        assert store.remove_unfinished("run", NOW) == 1


class TestTrouble:
    @pytest.mark.parametrize("fault", ["503", "500", "slowdown", "429", "reset", "short"])
    def test_a_read_is_tried_again(
        self, store: S3Store, shaky: S3Store, proxy: FaultyProxy, fault: Any
    ) -> None:
        store.write_bytes("a", b"before")
        proxy.fail(fault)

        assert shaky.read_bytes("a") == b"before"
        assert proxy.made == [fault]

    def test_so_is_everything_else(self, store: S3Store, shaky: S3Store, proxy: FaultyProxy) -> None:
        proxy.fail("503", "429")
        shaky.write_bytes("a", b"after")
        assert store.read_bytes("a") == b"after"

        proxy.fail("slowdown")
        assert [info.key for info in shaky.list("")] == ["a"]
        proxy.fail("reset")
        assert shaky.exists("a")
        proxy.fail("500")
        shaky.delete("a")
        assert not store.exists("a")
        assert proxy.made == ["503", "429", "slowdown", "reset", "500"]

    def test_a_body_that_breaks_off_is_read_again(
        self, store: S3Store, shaky: S3Store, proxy: FaultyProxy
    ) -> None:
        store.write_bytes("a", bytes(1000))
        proxy.fail("partial", "partial", method="GET")

        assert shaky.read_bytes("a") == bytes(1000)
        assert proxy.made == ["partial", "partial"]

    def test_an_answer_that_breaks_off_is_asked_for_again(
        self, store: S3Store, shaky: S3Store, proxy: FaultyProxy
    ) -> None:
        store.write_bytes("a", b"x")
        proxy.fail("partial", "partial", method="GET")
        assert [info.key for info in shaky.list("")] == ["a"]
        proxy.fail("partial", method="GET")
        with pytest.raises(FileNotFoundError):
            shaky.read_bytes("missing")
        assert proxy.made == ["partial"] * 3

    def test_each_request_has_one_bound(self, shaky: S3Store, proxy: FaultyProxy, monkeypatch: Any) -> None:
        """boto3's attempts, or ours where an answer breaks off: never the one times the other."""
        monkeypatch.setattr("airflow_batchinfer.store.s3._MAX_ATTEMPTS", 2)
        monkeypatch.setattr("airflow_batchinfer.store.s3._READ_SECONDS", 1.0)
        shaky.write_bytes("a", bytes(1000))
        for fault, told in (
            ("partial", "response stream|total bytes"),
            ("slow", "Read timeout"),
            ("reset", "Connection was closed"),
            ("slowdown", "SlowDown"),
        ):
            proxy.made.clear()
            proxy.rule = partial(_always, fault)
            with pytest.raises(StoreError, match=rf"cannot read .*({told})"):
                shaky.read_bytes("a")
            assert proxy.made == [fault, fault]
        with pytest.raises(StoreError, match="cannot list"):
            list(shaky.list(""))
        assert len(proxy.made) == 4

    def test_arrow_survives_a_body_that_breaks_off(
        self, store: S3Store, shaky: S3Store, proxy: FaultyProxy
    ) -> None:
        store.write_bytes("a", bytes(100_000))
        filesystem, root = shaky.filesystem()
        proxy.fail("partial", "503", method="GET")

        assert filesystem.open_input_file(f"{root}/a").read() == bytes(100_000)

    @pytest.mark.parametrize("method", ["HEAD", "GET"])
    def test_a_read_by_arrow_that_fails_says_nothing_of_the_object(
        self, store: S3Store, shaky: S3Store, proxy: FaultyProxy, method: str
    ) -> None:
        planned = plan_run(job(store.uri, storage_options=store.options()), [["a", "b"]]).shards[0]
        proxy.rule = lambda asked, path: "denied" if asked == method else None

        with pytest.raises(StoreError, match=r"cannot read .*rows-.*DENIED"):
            list(read_rows(shaky, planned, 10))
        with (
            pytest.raises(StoreError, match=r"cannot read .*rows-.*DENIED"),
            open_parquet(shaky, planned.rows_key) as file,
        ):
            file.read()

        store.delete(planned.rows_key)
        proxy.rule = lambda asked, path: None
        with pytest.raises(InputError, match=r"rows-.*cannot be read.*clear `split`"):
            list(read_rows(shaky, planned, 10))
        with (
            pytest.raises(CorruptError, match=r"rows-.*cannot be read"),
            open_parquet(shaky, planned.rows_key),
        ):
            pass

    def test_a_write_whose_answer_is_lost_is_written_once_more(
        self, store: S3Store, shaky: S3Store, proxy: FaultyProxy
    ) -> None:
        proxy.fail("drop_after", method="PUT")

        shaky.write_bytes("a", b"x")

        assert store.read_bytes("a") == b"x"
        assert [method for method, *_ in proxy.requests] == ["PUT", "PUT"]

    def test_a_broken_part_of_an_upload_is_sent_again(
        self, store: S3Store, shaky: S3Store, proxy: FaultyProxy, tmp_path: Path
    ) -> None:
        digest = big_file(tmp_path / "rows")
        proxy.fail("503", "reset", method="PUT")

        shaky.put_file(tmp_path / "rows", "rows")

        assert hashlib.sha256(store.read_bytes("rows")).hexdigest() == digest
        assert sorted(proxy.made) == ["503", "reset"]

    def test_an_upload_that_fails_leaves_nothing_and_keeps_the_file(
        self, store: S3Store, shaky: S3Store, proxy: FaultyProxy, tmp_path: Path, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr("airflow_batchinfer.store.s3._MAX_ATTEMPTS", 1)
        big_file(tmp_path / "rows")
        proxy.fail("503", method="PUT")

        with pytest.raises(StoreError, match=r"cannot upload s3://batch/.*/jobs/rows: "):
            shaky.put_file(tmp_path / "rows", "rows")

        assert (tmp_path / "rows").exists()
        assert not store.exists("rows")
        assert store._client().list_multipart_uploads(Bucket="batch").get("Uploads", []) == []

    def test_nothing_is_sent_in_chunks_or_under_a_condition(
        self, shaky: S3Store, proxy: FaultyProxy, tmp_path: Path
    ) -> None:
        big_file(tmp_path / "rows")
        shaky.write_bytes("a", b"x")
        shaky.put_file(tmp_path / "rows", "rows")

        puts = [headers for method, _, headers in proxy.requests if method == "PUT"]
        assert len(puts) == 3
        for headers in puts:
            assert "content-length" in headers
            assert "transfer-encoding" not in headers
            assert "aws-chunked" not in headers.get("content-encoding", "")
            assert not {"if-match", "if-none-match"} & headers.keys()

    def test_throttling_that_does_not_end_says_what_to_do(
        self, shaky: S3Store, proxy: FaultyProxy, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr("airflow_batchinfer.store.s3._MAX_ATTEMPTS", 2)
        proxy.fail("slowdown", "slowdown")

        with pytest.raises(StoreError, match=r"SlowDown.*max_parallel_shards"):
            shaky.write_bytes("a", b"x")

    def test_encryption_is_asked_for_with_each_write(
        self, proxy: FaultyProxy, credentials: dict[str, str], uri: str, s3_server: S3Server, tmp_path: Path
    ) -> None:
        options = {"endpoint_url": proxy.endpoint_url, "sse": "AES256"}
        store = open_store(uri, options)
        (tmp_path / "file").write_bytes(b"x")
        try:
            store.write_bytes("a", b"x")
            store.put_file(tmp_path / "file", "b")
        except StoreError as error:  # a server without encryption has to say so, not to ignore it
            assert "NotImplemented" in str(error) or "KMS" in str(error)  # noqa: PT017

        sent = [headers for method, _, headers in proxy.requests if method == "PUT"]
        assert sent
        assert all(headers["x-amz-server-side-encryption"] == "AES256" for headers in sent)


class TestCredentials:
    def test_a_session_token_reaches_boto3_and_arrow(
        self, shaky: S3Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_SESSION_TOKEN", "a-session-token")

        for call in (lambda: shaky.exists("a"), lambda: shaky.filesystem()[0].get_file_info("batch/a")):
            with suppress(OSError, StoreError):  # what counts is that it was sent
                call()

        tokens = {headers.get("x-amz-security-token") for *_, headers in proxy.requests}
        agents = {"Boto3" in headers["user-agent"] for *_, headers in proxy.requests}
        assert tokens == {"a-session-token"}
        assert agents == {True, False}

    def test_delta_tables_get_the_token_and_are_encrypted(
        self,
        s3_server: S3Server,
        proxy: FaultyProxy,
        credentials: dict[str, str],
        uri: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        import deltalake
        import pyarrow as pa
        from deltalake.exceptions import DeltaError

        from tests.s3 import MotoServer

        monkeypatch.setenv("AWS_SESSION_TOKEN", "a-session-token")
        store = open_store(uri, {"endpoint_url": proxy.endpoint_url, "sse": "AES256"})
        with suppress(
            OSError, DeltaError
        ):  # the token is not one of the server's: what counts is what was sent
            options = store.delta_options()
            deltalake.write_deltalake(store.uri_of("table"), pa.table({"a": [1]}), storage_options=options)

        assert {headers.get("x-amz-security-token") for *_, headers in proxy.requests} == {"a-session-token"}
        written = [headers for method, _, headers in proxy.requests if method == "PUT"]
        assert written or not isinstance(s3_server, MotoServer)  # which takes any token
        assert all(headers.get("x-amz-server-side-encryption") == "AES256" for headers in written)

    def test_changed_credentials_make_a_new_file_system(
        self, s3_server: S3Server, credentials: dict[str, str], uri: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from botocore.credentials import ReadOnlyCredentials

        store = open_store(uri, {"endpoint_url": s3_server.endpoint_url})
        first = store.filesystem()[0]
        assert store.filesystem()[0] is first
        renewed = ReadOnlyCredentials("another", "secret", "token", None)
        monkeypatch.setattr(type(store), "_credentials", lambda self: renewed)

        assert store.filesystem()[0] is not first

    def test_none_at_all(
        self, store: S3Store, credentials: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

        with pytest.raises(
            StoreError,
            match=r"cannot write s3://.*/a: there are no credentials: .*store_conn_id.* AWS_PROFILE",
        ):
            store.write_bytes("a", b"")
        with pytest.raises(StoreError, match="there are no credentials"):
            store.filesystem()

    def test_they_show_nowhere(
        self, store: S3Store, credentials: dict[str, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        import logging

        caplog.set_level(logging.INFO)
        store.write_bytes("a", b"x")
        store.filesystem()
        with pytest.raises(FileNotFoundError) as caught:
            store.read_bytes("b")

        shown = [
            repr(store),
            str(store),
            str(store.options()),
            caplog.text,
            str(caught.value),
            repr(vars(store)),
        ]
        for secret in (credentials["AWS_ACCESS_KEY_ID"], credentials["AWS_SECRET_ACCESS_KEY"]):
            assert not any(secret in text for text in shown)


class TestRefusals:
    def test_no_such_bucket(self, s3_server: S3Server, credentials: dict[str, str]) -> None:
        store = open_store("s3://no-such-bucket/x", {"endpoint_url": s3_server.endpoint_url})

        for call in (
            lambda: store.write_bytes("a", b""),
            lambda: store.read_bytes("a"),
            lambda: list(store.list("")),
        ):
            with pytest.raises(StoreError, match=r"s3://no-such-bucket/x.*NoSuchBucket.*create it"):
                call()

    def test_no_such_server(self, credentials: dict[str, str], monkeypatch: Any) -> None:
        monkeypatch.setattr("airflow_batchinfer.store.s3._MAX_ATTEMPTS", 1)
        store = open_store("s3://batch/x", {"endpoint_url": NO_SUCH_SERVER})

        with pytest.raises(StoreError, match=r"cannot look up s3://batch/x/a: .*is the server up"):
            store.exists("a")

    @pytest.mark.parametrize(
        ("code", "remedy"),
        [
            ("AccessDenied", "allow s3:GetObject"),
            ("InvalidAccessKeyId", "renew them"),
            ("ExpiredToken", "renew them"),
            ("PermanentRedirect", "`region`"),
            ("RequestTimeTooSkewed", "clock"),
        ],
    )
    def test_remedies(self, code: str, remedy: str) -> None:
        from botocore.exceptions import ClientError

        from airflow_batchinfer.store.s3_errors import store_errors

        answer: Any = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
        message = rf"cannot read s3://b/k: {code}: no .*{remedy}"
        with pytest.raises(StoreError, match=message), store_errors("read", "s3://b/k"):
            raise ClientError(answer, "GetObject")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpont_url": "http://x"}, "unknown storage option `endpont_url`"),
        ({"aws_secret_access_key": "hunter2"}, "give credentials by the environment"),
        ({"endpoint_url": "http://me:hunter2@host"}, "holds a user or a password"),
        ({"endpoint_url": "host:9000"}, r"must be http\(s\)://host"),
        ({"addressing_style": "host"}, "must be one of auto, path, virtual"),
        ({"sse": "AES256/key"}, "`sse` must be one of"),
    ],
)
def test_options_that_cannot_be(options: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        open_store("s3://batch/x", options)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("uri", ["s3://", "s3:///key", "s3://key:hunter2@bucket/x"])
def test_addresses_that_cannot_be(uri: str) -> None:
    with pytest.raises(SpecError, match="s3://bucket/prefix") as caught:
        open_store(uri)
    assert "hunter2" not in str(caught.value)


def test_kms_keys_are_named_in_writes() -> None:
    from airflow_batchinfer.store.options import S3Options

    options = S3Options.parse({"sse": "aws:kms/arn:aws:kms:eu-west-1:1:key/abc"})

    assert options.put_arguments() == {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "arn:aws:kms:eu-west-1:1:key/abc",
    }


def test_a_spec_cannot_hold_credentials() -> None:
    from airflow_batchinfer.spec import JobSpec

    fields = {
        "name": "job",
        "input": {"path": "in.parquet", "storage_options": {"aws_access_key_id": "hunter2"}},
        "prompt": {"template": "{{ text }}"},
        "model": {"name": "m"},
        "store": "s3://batch/x",
        "storage_options": {"session_token": "hunter2"},
    }
    with pytest.raises(
        SpecError, match=r"input\.storage_options: unknown.*\nstorage_options: unknown"
    ) as caught:
        JobSpec.parse(fields)
    assert "hunter2" not in str(caught.value)
