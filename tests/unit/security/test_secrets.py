"""Credentials never reach a plan, a message, a log or a table, however a spec or a server goes wrong."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.errors import BatchInferError, SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import open_store
from airflow_batchinfer.worker.engines.base import Request, RequestFailure
from airflow_batchinfer.worker.engines.openai import OpenAIEngine
from tests.unit.contract.test_spec import LEAST
from tests.unit.worker.conftest import Run

SECRET = "sk-hunter2-0123456789"


@pytest.mark.parametrize(
    "fields",
    [
        {"storage_options": {"aws_secret_access_key": SECRET}},
        {"storage_options": {"secret": {"nested": SECRET}}},
        {"storage_options": SECRET},
        {"input": {"path": "s3://b/x", "storage_options": {"token": SECRET}}},
        {"input": {"path": f"s3://user:{SECRET}@bucket/x"}},
        {"input": {"path": ["a.csv", f"s3://user:{SECRET}@bucket/x"]}},
        {"store": f"s3://user:{SECRET}@bucket/x"},
        {"export": [{"format": "csv", "path": f"s3://user:{SECRET}@bucket/x.csv"}]},
        {"model": {"name": "m", "api_key": SECRET}},
        {"model": {"name": "m", "backend": "openai", "base_url": "http://h/v1", "api_key_env": SECRET}},
        {"model": {"name": "m", "backend": "openai", "base_url": f"http://u:{SECRET}@h/v1"}},
        {"model": {"name": "m", "engine": {"hf_token": SECRET}}},
        {"model": {"name": "m", "engine": {"API_KEY": SECRET}}},
    ],
)
def test_a_spec_with_a_credential_is_refused_without_showing_it(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse(LEAST | fields)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        (f"s3://user:{SECRET}@bucket/x", {}),
        ("s3://bucket/x", {"endpoint_url": f"http://user:{SECRET}@host"}),
        ("s3://bucket/x", {"password": SECRET}),
    ],
)
def test_a_store_with_a_credential_is_refused_without_showing_it(uri: str, options: dict[str, str]) -> None:
    with pytest.raises(SpecError) as caught:
        open_store(uri, options)
    assert SECRET not in str(caught.value)


class _Tattler(BaseHTTPRequestHandler):
    """Says the key again in each of its refusals; the path says which: `/<status of models>/<of others>`."""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        of_models, of_others = self.path.split("/")[1:3]
        status = int(of_models if self.path.endswith("/models") else of_others)
        message = f"bad header {self.headers['Authorization']}"
        body = {"data": []} if status == 200 else {"error": {"message": message}}
        data = json.dumps(body).encode() if status != 299 else message.encode()
        self.send_response(200 if status == 299 else status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _answer  # noqa: N815 (http.server's names)

    def log_message(self, *_: Any) -> None:
        """Keep the test's output quiet."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Tattler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def _engine(address: str, **fields: Any) -> OpenAIEngine:
    model = {"name": "m", "backend": "openai", "base_url": address, "api_key_env": "TEST_KEY"}
    return OpenAIEngine(JobSpec.parse(LEAST | {"model": model} | fields))


@pytest.mark.parametrize("status", [401, 403, 400, 500, 299])
def test_a_server_that_says_the_key_again_at_start(
    server: str, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TEST_KEY", f"{SECRET}\n")  # with the line break that files end with
    with caplog.at_level(logging.DEBUG), pytest.raises(BatchInferError) as caught:
        _engine(f"{server}/{status}/{status}").start()
    assert SECRET not in str(caught.value) + caplog.text


def test_a_schema_refused_by_a_server_that_says_the_key_again(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", SECRET)
    engine = _engine(f"{server}/200/400", task={"type": "choice", "labels": ["a", "b"]})
    with pytest.raises(SpecError, match=r"task\.labels: .*\*\*\*") as caught:
        engine.start()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("status", [400, 401, 500, 299])
def test_a_rows_dead_letter_does_not_say_the_key(
    server: str, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TEST_KEY", SECRET)
    engine = _engine(f"{server}/200/{status}")
    engine.start()
    try:
        with caplog.at_level(logging.DEBUG):
            engine.submit([Request("0/0", seed=0, messages=[{"role": "user", "content": "x"}])])
            answers = engine.poll(30.0)
        message = ""
        for answer in answers:
            assert isinstance(answer, RequestFailure)
            assert answer.reason in (Reason.ENGINE_ERROR, Reason.ENGINE_REFUSED)
            message += answer.message
    except SpecError as error:  # 401: it takes no request at all
        message = str(error)
    finally:
        engine.close()
    assert message
    assert SECRET not in message + caplog.text


def test_a_key_across_the_end_of_what_is_quoted_is_not_said(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", SECRET * 30)
    with pytest.raises(SpecError, match="bad header") as caught:
        _engine(f"{server}/401/401").start()
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize("status", [400, 401, 500, 299])
def test_neither_the_workers_log_nor_its_files_say_the_key(
    server: str, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEST_KEY", SECRET)
    run = Run(tmp_path)
    base_url = f"{server}/200/{status}"
    run.plan(
        ["a"],
        model={"name": "m", "backend": "openai", "base_url": base_url, "api_key_env": "TEST_KEY"},
        retry={"engine_attempts": 1, "engine_restarts": 0},
    )
    said = "".join(run.start().communicate(timeout=60))
    assert "HTTP Request" not in said  # nor is there a line for each request
    if status == 401:
        assert "bad header Bearer ***" in said
    else:
        assert run.outcomes() == {"failed": 1}
        said += run.results()[0]["message"]
    assert SECRET not in said
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize("key", [f"{SECRET}\nX-Other: 1", f"{SECRET}é"])
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", key)
    with pytest.raises(SpecError, match="no HTTP header may have") as caught:
        _engine("http://127.0.0.1:9/v1").start()
    assert SECRET not in str(caught.value)
