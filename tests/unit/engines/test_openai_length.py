"""How long the context of a server's model is: what decides which rows are over-long."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.errors import EngineError, SpecError
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.worker.engines.openai import context_length
from airflow_batchinfer.worker.prepare import prompt_builder
from tests.plans import job

Serve = Callable[[int, Any], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server with one answer to everything; its base URL."""
    servers = []

    def start(status: int, body: Any) -> str:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                payload = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def at(base_url: str, tmp_path: Path, **model: Any) -> JobSpec:
    return job(tmp_path, model={"name": "served", "backend": "openai", "base_url": base_url, **model})


def test_the_server_is_asked(serve: Serve, tmp_path: Path) -> None:
    models = {"data": [{"id": "served", "max_model_len": 4096}, {"id": "other", "max_model_len": 8}]}
    url = serve(200, models)
    assert context_length(at(url, tmp_path)) == 4096
    with pytest.raises(SpecError, match=r"serves no `sreved`; did you mean `served`"):
        context_length(at(url, tmp_path, name="sreved"))


@pytest.mark.parametrize(("status", "body"), [(200, {"data": [{"id": "served"}]}), (404, {})])
def test_a_server_that_does_not_say(serve: Serve, tmp_path: Path, status: int, body: Any) -> None:
    url = serve(status, body)
    with pytest.raises(SpecError, match=r"model\.engine\.max_model_len: set it; .* `served`"):
        context_length(at(url, tmp_path))
    assert context_length(at(url, tmp_path, engine={"max_model_len": 2048})) == 2048


def test_a_server_that_is_away_may_be_back_later(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not answer"):
        context_length(at("http://127.0.0.1:9/v1", tmp_path))
    with pytest.raises(EngineError, match="503"):
        context_length(at(serve(503, {}), tmp_path))
    with pytest.raises(EngineError, match="does not speak OpenAI's API"):
        context_length(at(serve(200, ["nothing"]), tmp_path))


def test_counting_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = at("http://localhost/v1", tmp_path, tokenizer="org/model")
    with pytest.raises(SpecError, match=r"install `airflow-provider-batchinfer\[tokenizer\]`"):
        prompt_builder(spec, takes_tokens=False)
