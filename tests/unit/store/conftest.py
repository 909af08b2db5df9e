from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from airflow_batchinfer.store.s3 import S3Store
    from tests.s3 import FaultyProxy, S3Server


@pytest.fixture(scope="session", params=["moto", "juicefs"])
def s3_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    from tests.s3 import s3_server_of_kind

    with s3_server_of_kind(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The server's credentials in the environment, and no others to be found."""
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for name, value in s3_server.credentials.items():
        monkeypatch.setenv(name, value)
    return s3_server.credentials


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    from tests.s3 import FaultyProxy

    with FaultyProxy(s3_server.endpoint_url) as running:
        yield running


@pytest.fixture
def uri() -> str:
    """A prefix of its own for each test."""
    return f"s3://batch/{uuid.uuid4().hex}/jobs"


@pytest.fixture
def store(s3_server: S3Server, credentials: dict[str, str], uri: str) -> S3Store:
    from airflow_batchinfer.store.s3 import S3Store

    return S3Store(uri, {"endpoint_url": s3_server.endpoint_url})


@pytest.fixture
def shaky(proxy: FaultyProxy, credentials: dict[str, str], uri: str) -> S3Store:
    """The same store, reached through the proxy."""
    from airflow_batchinfer.store.s3 import S3Store

    return S3Store(uri, {"endpoint_url": proxy.endpoint_url})
