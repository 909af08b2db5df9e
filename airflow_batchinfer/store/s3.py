"""`S3Store`: a prefix of a bucket, on AWS or any server that speaks S3.

Control objects, listings and uploads go through boto3; bulk reads through Arrow's file system. No
conditional write and no chunked upload is used, because S3-like servers differ in them; every object
becomes visible whole, by one PUT or by the completion of a multipart upload.
"""

from __future__ import annotations

import posixpath
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore.exceptions as boto
import urllib3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from airflow_batchinfer.errors import SpecError, StoreError
from airflow_batchinfer.store.base import ObjectInfo
from airflow_batchinfer.store.options import S3Options
from airflow_batchinfer.store.s3_errors import store_errors

if TYPE_CHECKING:
    import pyarrow.fs
    from botocore.credentials import ReadOnlyCredentials
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")

_MAX_ATTEMPTS = 10
"""Of each request by boto3, which outlasts two minutes of throttling; and of each answer that breaks off."""
_MAX_BACKOFF_SECONDS = 20.0
_CONNECT_SECONDS = 10.0
_READ_SECONDS = 60.0
_MULTIPART_BYTES = 64 * 1024 * 1024
"""Files above it are uploaded in parts of this size; S3 takes 10,000 parts, so up to 625 GiB."""
_UPLOAD_THREADS = 4
_BROKEN_OFF = (boto.IncompleteReadError, boto.ResponseStreamingError, urllib3.exceptions.HTTPError)
"""An answer that broke off while it was read. boto3 retries requests, but not the reading of an answer."""


class S3Store:
    """Objects under `s3://bucket/prefix`.

    Nothing is contacted before the first call. Credentials come from boto3's own chain (environment,
    profile, pod identity, instance), are held by boto3 and refreshed by it. Safe to call from several
    threads.
    """

    def __init__(self, uri: str, options: Mapping[str, str] | None = None) -> None:
        """Args as for `open_store`.

        Raises:
            SpecError: not an `s3://bucket/prefix` address, or options that cannot be.
        """
        address = urlsplit(uri)
        if address.scheme != "s3" or not address.netloc or "@" in address.netloc:
            raise SpecError("an S3 store is `s3://bucket/prefix`, and never holds credentials")
        self._bucket = address.netloc
        self._root = uri.removeprefix(f"s3://{self._bucket}").strip("/")
        self._options = S3Options.parse(options or {})
        self._lock = threading.Lock()
        self._connected: tuple[boto3.Session, S3Client] | None = None
        self._arrow: tuple[int, pyarrow.fs.FileSystem] | None = None
        self.uri = f"s3://{self._bucket}/{self._root}".rstrip("/")

    def __repr__(self) -> str:
        return f"S3Store({self.uri!r})"

    def read_bytes(self, key: str) -> bytes:
        name = self._name(key)
        with store_errors("read", self.uri_of(key)):
            return _answered(partial(_get, self._client(), self._bucket, name))

    def write_bytes(self, key: str, data: bytes) -> None:
        name = self._name(key)
        with store_errors("write", self.uri_of(key)):
            put = partial(self._client().put_object, Bucket=self._bucket, Key=name, Body=data)
            _answered(partial(put, **self._put_arguments()))

    def put_file(self, source: Path, key: str) -> None:
        name = self._name(key)
        transfer = TransferConfig(
            multipart_threshold=_MULTIPART_BYTES,
            multipart_chunksize=_MULTIPART_BYTES,
            max_concurrency=_UPLOAD_THREADS,
            preferred_transfer_client="classic",  # the other one has retries and errors of its own
        )
        try:
            # A failed multipart upload is aborted by boto3; a killed process leaves one behind, which
            # no reader can see and `remove_unfinished` aborts.
            with store_errors("upload", self.uri_of(key)):
                self._client().upload_file(
                    str(source), self._bucket, name, ExtraArgs=self._put_arguments(), Config=transfer
                )
            source.unlink()
        except OSError as error:
            raise StoreError(f"cannot upload {source} to {self.uri_of(key)}: {error}") from error

    def exists(self, key: str) -> bool:
        return self.info(key) is not None

    def info(self, key: str) -> ObjectInfo | None:
        name = self._name(key)
        try:
            with store_errors("look up", self.uri_of(key)):
                head = _answered(partial(self._client().head_object, Bucket=self._bucket, Key=name))
        except FileNotFoundError:
            return None
        return ObjectInfo(key, head["ContentLength"], head["LastModified"].timestamp())

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        cut = len(self._folder(""))
        for page in self._pages(prefix):
            for item in page.get("Contents", []):
                if item["Key"].endswith("/"):  # a folder's placeholder, as consoles make them
                    continue
                modified = item["LastModified"].timestamp()
                yield ObjectInfo(item["Key"][cut:], item["Size"], modified)

    def folders(self, prefix: str) -> Iterator[str]:
        cut = len(self._folder(""))
        for page in self._pages(prefix, Delimiter="/"):
            for found in page.get("CommonPrefixes", []):
                yield found["Prefix"][cut:].removesuffix("/")

    def delete(self, key: str) -> None:
        name = self._name(key)
        with store_errors("delete", self.uri_of(key)):
            _answered(partial(self._client().delete_object, Bucket=self._bucket, Key=name))

    def remove_unfinished(self, prefix: str, older_than: timedelta, *, dry_run: bool = False) -> int:
        begun_before = datetime.now(UTC) - older_than
        found = 0
        with store_errors("abort uploads under", self.uri_of(prefix)):
            pages = self._client().get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._folder(prefix)):
                for upload in page.get("Uploads", []):
                    if upload["Initiated"] >= begun_before:
                        continue
                    found += 1
                    if not dry_run:
                        self._client().abort_multipart_upload(
                            Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
        return found

    def filesystem(self) -> tuple[pyarrow.fs.FileSystem, str]:
        # Arrow cannot refresh credentials: callers ask anew for each bulk read, and get another file
        # system once boto3's credentials have changed.
        import pyarrow.fs

        root = f"{self._bucket}/{self._root}".rstrip("/")
        with store_errors("open", self.uri):
            credentials = self._credentials()
            known_by = hash(credentials)  # not themselves: nothing here may show them
            with self._lock:
                if self._arrow and self._arrow[0] == known_by:
                    return self._arrow[1], root
            location = self._location()
            opened = pyarrow.fs.S3FileSystem(
                access_key=credentials.access_key,
                secret_key=credentials.secret_key,
                session_token=credentials.token,
                region=location.region,
                scheme=location.scheme,
                endpoint_override=location.host,
                force_virtual_addressing=location.host is not None and location.virtual,
                retry_strategy=pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=_MAX_ATTEMPTS),
            )
        with self._lock:
            self._arrow = (known_by, opened)
        return opened, root

    def uri_of(self, key: str) -> str:
        return f"{self.uri}/{key}".rstrip("/")

    def options(self) -> dict[str, str]:
        return self._options.given()

    def delta_options(self) -> dict[str, str]:
        with store_errors("open", self.uri):
            credentials, location = self._credentials(), self._location()
        options = {
            "AWS_ACCESS_KEY_ID": str(credentials.access_key),
            "AWS_SECRET_ACCESS_KEY": str(credentials.secret_key),
            "AWS_REGION": location.region,
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": str(location.virtual).lower(),
        }
        if credentials.token is not None:
            options["AWS_SESSION_TOKEN"] = credentials.token
        if location.host:
            options["AWS_ENDPOINT_URL"] = f"{location.scheme}://{location.host}"
            options["AWS_ALLOW_HTTP"] = str(location.scheme == "http").lower()
        encryption = self._options.put_arguments()
        if encryption:
            options["AWS_SERVER_SIDE_ENCRYPTION"] = encryption["ServerSideEncryption"]
        if "SSEKMSKeyId" in encryption:
            options["AWS_SSE_KMS_KEY_ID"] = encryption["SSEKMSKeyId"]
        return options

    def _pages(self, prefix: str, **options: Any) -> Iterator[Any]:
        """Answers to a listing. S3 lists in the order of keys, so nothing has to be held to sort it."""
        with store_errors("list", self.uri_of(prefix)):
            client, folder = self._client(), self._folder(prefix)
            ask = partial(client.list_objects_v2, Bucket=self._bucket, Prefix=folder, **options)
            more: str | None = ""
            while more is not None:
                page = _answered(partial(ask, ContinuationToken=more) if more else ask)
                more = page.get("NextContinuationToken") if page.get("IsTruncated") else None
                yield page

    def _client(self) -> S3Client:
        return self._connection()[1]

    def _connection(self) -> tuple[boto3.Session, S3Client]:
        with self._lock:
            if self._connected is None:
                with store_errors("connect to", self.uri):
                    session = boto3.Session()
                    client = session.client(
                        "s3",
                        endpoint_url=self._options.endpoint_url or None,
                        region_name=self._options.region or None,
                        config=self._config(),
                    )
                retry_too_many_requests: Any = _retry_too_many_requests  # the stubs say it returns nothing
                client.meta.events.register("needs-retry.s3", retry_too_many_requests)
                self._connected = session, client
            return self._connected

    def _config(self) -> Config:
        style: Any = self._options.addressing_style or ("path" if self._options.endpoint_url else "auto")
        return Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            retries={"mode": "standard", "total_max_attempts": _MAX_ATTEMPTS},
            max_pool_connections=4 * _UPLOAD_THREADS,
            # The checksums that boto3 adds of itself come in chunked uploads, which some servers refuse.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": style},
        )

    def _credentials(self) -> ReadOnlyCredentials:
        credentials = self._connection()[0].get_credentials()
        if credentials is None:
            raise boto.NoCredentialsError
        return credentials.get_frozen_credentials()

    def _location(self) -> _Location:
        """Where the bucket is, for clients that do not look for it as boto3 does."""
        client = self._client()
        endpoint = urlsplit(client.meta.endpoint_url)
        on_aws = bool(re.search(r"\.amazonaws\.com(\.cn)?$", endpoint.hostname or ""))
        region = self._options.region or client.meta.region_name
        if on_aws and region in (None, "aws-global"):
            region = client.head_bucket(Bucket=self._bucket).get("BucketRegion")
        virtual = self._options.addressing_style == "virtual" or (
            on_aws and self._options.addressing_style != "path"
        )
        host = None if on_aws else endpoint.netloc
        return _Location(region or "us-east-1", endpoint.scheme, host, virtual)

    def _put_arguments(self) -> Any:  # a dict of literals, which boto3's stubs want as a TypedDict
        return self._options.put_arguments()

    def _name(self, key: str) -> str:
        """The object's name in the bucket."""
        if key.startswith("/") or posixpath.normpath(f"/{key}") != f"/{key}" or not key:
            raise StoreError(f"key {key!r} leaves the store {self.uri}, or is no plain path")
        return f"{self._root}/{key}".lstrip("/")

    def _folder(self, prefix: str) -> str:
        """What names of objects in the folder `prefix` start with."""
        inside = prefix.strip("/")
        name = self._name(inside) if inside else self._root
        return f"{name}/" if name else ""


@dataclass(frozen=True, slots=True)
class _Location:
    region: str
    scheme: str
    host: str | None
    """With its port; none on AWS, where the region says it."""
    virtual: bool
    """Whether the bucket's name stands in the host name."""


def _get(client: S3Client, bucket: str, name: str) -> bytes:
    """The object, whole."""
    body = client.get_object(Bucket=bucket, Key=name)["Body"]
    try:
        return body.read()  # which counts the bytes
    except boto.ReadTimeoutError as error:  # told apart from a request that boto3 has given up on
        raise boto.ResponseStreamingError(error=error) from error


def _answered(ask: Callable[[], T]) -> T:
    """The whole answer to a request that may be made twice, asked for anew where it breaks off."""
    for attempt in range(1, _MAX_ATTEMPTS):
        try:
            return ask()
        except boto.ReadTimeoutError:  # no answer at all, though boto3 has asked all times; also an HTTPError
            raise
        except _BROKEN_OFF:
            time.sleep(_backoff(attempt))
    return ask()


def _backoff(attempt: int) -> float:
    """Seconds to wait after the failed attempt of this number, drawn at random as boto3 does."""
    return random.random() * min(_MAX_BACKOFF_SECONDS, 2.0**attempt)


def _retry_too_many_requests(response: Any, attempts: int, **_: Any) -> float | None:
    """Retry status 429 too: boto3 knows it only with one of Amazon's own codes.

    Called by botocore after each attempt; the seconds to wait, or none to leave it to boto3.
    """
    if response is None or response[0].status_code != 429 or attempts >= _MAX_ATTEMPTS:
        return None
    return _backoff(attempts)
