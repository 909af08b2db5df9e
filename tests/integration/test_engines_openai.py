"""The HTTP engine against a live `vllm serve`, and against a server that is busy on purpose."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from airflow_batchinfer.errors import EngineError, SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.prompts.builder import Prepared
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.worker.engines import load_engine
from airflow_batchinfer.worker.engines.base import EngineDied, Request, RequestFailure
from airflow_batchinfer.worker.engines.openai import OpenAIEngine
from airflow_batchinfer.worker.prepare import prompt_builder
from scripts.ports import free_port
from tests.integration.engine_jobs import MODELS, PATIENCE_SECONDS, collect, completed, job, requests

pytestmark = pytest.mark.worker_env

TEXTS = [f"What is {i} plus 2?" for i in range(40)]
START_SECONDS = 400.0


@contextmanager
def serving(model: str, name: str, folder: Path, *more: str) -> Iterator[str]:
    """Base URL of a live vLLM server with one of the small models under a name."""
    port = free_port()
    log = folder / "log"
    options = ["--model", str(MODELS / model), "--served-model-name", name, "--enforce-eager"]
    options += ["--max-num-seqs", "16", "--host", "127.0.0.1", *more]
    with log.open("wb") as out, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, "--port", str(port)],
            stdout=out,
            stderr=out,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def vllm_serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of SmolLM2 under the name `smol`."""
    with serving("smollm2", "smol", tmp_path_factory.mktemp("server"), "--max-model-len", "512") as url:
        yield url


def served(base_url: str, name: str = "smol", **fields: Any) -> JobSpec:
    extra = fields.pop("model", {})
    return job({"name": name, "backend": "openai", "base_url": base_url, **extra}, **fields)


@contextmanager
def started(spec: JobSpec) -> Iterator[OpenAIEngine]:
    engine = load_engine(spec)
    assert isinstance(engine, OpenAIEngine)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


class TestLiveServer:
    def test_chat(self, vllm_serve: str) -> None:
        spec = served(vllm_serve)
        engine = load_engine(spec)
        info = engine.start()
        assert info.max_model_len == 512
        engine.submit(requests(spec, TEXTS, takes_tokens=False))
        results = completed(collect(engine, len(TEXTS)))
        assert "3" in (results["1"].text or "")
        assert all(r.prompt_tokens > 0 and 0 < r.output_tokens <= 24 for r in results.values())
        assert engine.tokens_made() >= sum(r.output_tokens for r in results.values())
        engine.close()

    def test_plain_text(self, vllm_serve: str) -> None:
        spec = served(vllm_serve, prompt={"template": "{{ text }}", "chat": False})
        with started(spec) as engine:
            engine.submit(requests(spec, ["The capital of France is"], takes_tokens=False))
            assert "Paris" in (completed(collect(engine, 1))["0"].text or "")

    def test_json_choice_and_regex(self, vllm_serve: str) -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}}
        schema |= {"required": ["n"], "additionalProperties": False}
        tasks: list[dict[str, Any]] = [
            {"type": "json", "schema": schema},
            {"type": "choice", "labels": ["odd", "even"]},
            {"type": "regex", "pattern": "[0-9]{2}"},
        ]
        for task in tasks:
            spec = served(vllm_serve, task=task)
            with started(spec) as engine:
                engine.submit(requests(spec, TEXTS[:8], takes_tokens=False))
                for result in completed(collect(engine, 8)).values():
                    text = result.text or ""
                    if task["type"] == "json":
                        assert 0 <= json.loads(text)["n"] <= 9
                    elif task["type"] == "choice":
                        assert text in ("odd", "even")
                    else:
                        assert re.fullmatch("[0-9]{2}", text)

    def test_an_over_long_row_costs_only_itself(self, vllm_serve: str) -> None:
        spec = served(vllm_serve)
        with started(spec) as engine:
            engine.submit(requests(spec, ["word " * 600, "Hello"], takes_tokens=False))
            answers = collect(engine, 2)
            failure = answers["0"]
            assert isinstance(failure, RequestFailure)
            assert failure.reason is Reason.OVER_LONG
            assert not failure.transient
            completed({"1": answers["1"]})

    def test_an_over_long_row_is_cut_to_the_servers_own_context(self, vllm_serve: str) -> None:
        """Whose name of the model is nobody else's, and whose context is shorter than the model's."""
        spec = served(
            vllm_serve,
            model={"tokenizer": str(MODELS / "smollm2")},
            overlong={"policy": "truncate", "column": "text"},
        )
        builder = prompt_builder(spec, takes_tokens=False)
        (cut,) = builder.build([{"text": "word " * 2000}])
        assert isinstance(cut, Prepared)
        with started(spec) as engine:
            engine.submit([Request("0", 0, messages=cut.prompts[0].messages)])
            answer = completed(collect(engine, 1))["0"]
        assert 512 - 24 - 8 < answer.prompt_tokens <= 512 - 24

    def test_an_aborted_row_never_comes_back(self, vllm_serve: str) -> None:
        spec = served(vllm_serve, sampling={"max_tokens": 400})
        with started(spec) as engine:
            engine.submit(requests(spec, ["Count to one thousand.", "Say hi."], takes_tokens=False))
            engine.abort(["0"])
            assert set(collect(engine, 1)) == {"1"}
            assert engine.poll(1.0) == []

    def test_a_job_the_server_cannot_do_is_a_spec_error(self, vllm_serve: str) -> None:
        bad = {"type": "json", "schema": {"type": "object", "properties": {"a": {"type": "odd"}}}}
        for spec, message in [
            (served(vllm_serve, "smoll"), r"model\.name: .* did you mean `smol`"),
            (served(vllm_serve, task=bad), r"task\.schema: the server refuses it"),
            (served(vllm_serve, model={"api_key_env": "NO_SUCH_KEY"}), "has no `NO_SUCH_KEY`"),
        ]:
            engine = load_engine(spec)
            with pytest.raises(SpecError, match=message):
                engine.start()


def test_vectors_of_a_live_server(tmp_path: Path) -> None:
    texts = ["A cat sits on the mat.", "A kitten is on the rug.", "The stock market fell.", "word " * 600]
    with serving("minilm", "mini", tmp_path) as url:
        spec = served(url, "mini", task={"type": "embed"})
        with started(spec) as engine:
            engine.submit(requests(spec, texts, takes_tokens=False))
            answers = collect(engine, len(texts))
        raw = served(url, "mini", task={"type": "embed", "normalize": False})
        with started(raw) as engine:
            engine.submit(requests(raw, texts[:1], takes_tokens=False))
            unscaled = completed(collect(engine, 1))["0"].vector or []
    too_long = answers.pop("3")
    assert isinstance(too_long, RequestFailure)
    assert too_long.reason is Reason.OVER_LONG
    vectors = [result.vector or [] for _, result in sorted(completed(answers).items())]
    assert [len(v) for v in vectors] == [384] * 3
    assert [math.isclose(math.hypot(*v), 1.0, rel_tol=1e-3) for v in vectors] == [True] * 3
    near, far = (sum(a * b for a, b in zip(vectors[0], v, strict=True)) for v in vectors[1:])
    assert near > far
    assert not math.isclose(math.hypot(*unscaled), 1.0, rel_tol=1e-3)


HANG = 0
"""In place of a status: no answer at all."""


class BusyServer(ThreadingHTTPServer):
    """Answers chats after `refusals` have been used up; counts requests and how many were open at once.

    A chat that holds `crashing` brings down what is behind the proxy: it gets `crash`, after others.
    """

    daemon_threads = True

    def __init__(self, refusals: list[tuple[int, dict[str, str]]]) -> None:
        super().__init__(("127.0.0.1", 0), _Busy)
        self.refusals = refusals
        self.crashing: str | None = None
        self.crash = 502
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.arrivals: list[float] = []
        self.bodies: list[dict[str, Any]] = []
        self.open = 0
        self.most_open = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def wait_for_crashing(self, times: int) -> None:
        """Wait until the crashing chat has come so often."""
        assert self.crashing is not None
        while sum(self.crashing in json.dumps(body) for body in self.bodies) < times:
            time.sleep(0.01)


class _Busy(BaseHTTPRequestHandler):
    server: BusyServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.arrivals.append(time.monotonic())
            self.server.open += 1
            self.server.most_open = max(self.server.most_open, self.server.open)
            refusal = self.server.refusals.pop(0) if self.server.refusals else None
        if self.server.crashing is not None and self.server.crashing in json.dumps(body):
            time.sleep(0.3)
            refusal = (self.server.crash, {})
        if refusal is not None and refusal[0] == HANG:
            self.server.closing.wait()
        time.sleep(0.01)
        with self.server.lock:
            self.server.open -= 1
        if refusal is not None:
            self._answer(refusal[0], {"error": {"message": "refused"}}, refusal[1])
        else:
            choice = {"message": {"content": "yes"}, "finish_reason": "stop"}
            self._answer(200, {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})

    def _answer(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(payload)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def busy(*refusals: tuple[int, dict[str, str]]) -> Iterator[BusyServer]:
    server = BusyServer(list(refusals))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_busy_server_costs_no_row_an_attempt_and_is_left_alone_as_long_as_it_asks() -> None:
    with busy((429, {"Retry-After": "1"})) as server:
        spec = served(server.base_url, model={"max_concurrency": 1})
        with started(spec) as engine:
            engine.submit(requests(spec, TEXTS[:5], takes_tokens=False))
            completed(collect(engine, 5))
        assert len(server.arrivals) == 6
        assert server.arrivals[1] - server.arrivals[0] >= 1.0


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_wait_that_the_server_asks_for_counts_as_progress(status: int) -> None:
    with busy((status, {"Retry-After": "1"})) as server, started(served(server.base_url)) as engine:
        engine.submit(requests(engine._spec, TEXTS[:1], takes_tokens=False))
        made, answers = set(), []
        while not answers:
            answers = engine.poll(0.05)
            made.add(engine.tokens_made())
        completed({a.key: a for a in answers})
        assert len(made) > 2  # more than none, and the answer


def test_a_row_that_the_proxy_has_no_answer_to_holds_up_no_other() -> None:
    with busy() as server:
        server.crashing = TEXTS[20]
        spec = served(server.base_url, model={"max_concurrency": 4})
        asked = requests(spec, TEXTS, takes_tokens=False)
        with started(spec) as engine:
            engine.submit(asked[18:21])
            answers = collect(engine, 2)
            server.wait_for_crashing(2)
            assert engine._limit.size == 2, "the first time the server may have too much to do"
            engine.submit(asked[:18] + asked[21:])
            answers |= collect(engine, len(TEXTS) - 3)
            server.wait_for_crashing(3)
            assert (engine._limit.size, engine._limit.paused) == (4, False)
        assert "20" not in completed(answers)


@pytest.mark.parametrize("status", [500, 504])
def test_errors_lower_the_number_of_open_requests_also_where_others_go_well(status: int) -> None:
    with busy() as server:
        server.crashing, server.crash = TEXTS[0], status
        spec = served(server.base_url, model={"max_concurrency": 4})
        with started(spec) as engine:
            engine.submit(requests(spec, TEXTS[:8], takes_tokens=False))
            answers = collect(engine, 8)
            assert engine._limit.size == 2
        assert isinstance(answers["0"], RequestFailure)


def test_no_more_requests_are_open_than_allowed() -> None:
    with busy() as server:
        spec = served(server.base_url, model={"max_concurrency": 3})
        with started(spec) as engine:
            engine.submit(requests(spec, TEXTS, takes_tokens=False))
            completed(collect(engine, len(TEXTS)))
        assert 1 < server.most_open <= 3


def test_a_server_error_is_the_rows_transient_failure() -> None:
    with busy((500, {})) as server:
        spec = served(server.base_url, model={"max_concurrency": 1})
        with started(spec) as engine:
            engine.submit(requests(spec, TEXTS[:2], takes_tokens=False))
            answers = collect(engine, 2)
        failures = [a for a in answers.values() if isinstance(a, RequestFailure)]
        assert [(f.reason, f.transient) for f in failures] == [(Reason.ENGINE_ERROR, True)]


def test_a_request_that_hangs_is_given_up_and_those_that_wait_for_their_turn_are_not() -> None:
    with busy((HANG, {}), (429, {"Retry-After": "2"})) as server:
        spec = served(
            server.base_url,
            model={"max_concurrency": 1},
            retry={"row_timeout_seconds": 1.0, "engine_attempts": 1},
        )
        with started(spec) as engine:
            engine.submit(requests(spec, TEXTS[:3], takes_tokens=False))
            answers = collect(engine, 3)
        late = answers.pop("0")
        assert isinstance(late, RequestFailure)
        assert (late.reason, late.transient) == (Reason.TIMED_OUT, True)
        assert "retry.row_timeout_seconds=1" in late.message
        completed(answers)


def test_a_key_that_is_refused_also_without_a_rows_text_is_no_rows_fault() -> None:
    with busy((401, {}), (401, {})) as server:
        spec = served(server.base_url)
        with started(spec) as engine:
            engine.submit(requests(spec, TEXTS[:1], takes_tokens=False))
            with pytest.raises(SpecError, match=r"model\.api_key_env: .* 401: refused"):
                engine.poll(PATIENCE_SECONDS)


def test_a_server_that_is_not_there_is_an_engine_error() -> None:
    engine = load_engine(served(f"http://127.0.0.1:{free_port()}/v1"))
    with pytest.raises(EngineError, match="does not answer"):
        engine.start()


def test_a_server_whose_machine_is_gone_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_batchinfer.worker.engines.openai._CONNECT_SECONDS", 0.2)
    monkeypatch.setattr("airflow_batchinfer.worker.engines.openai._AWAY_SECONDS", 0.5)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        once = threading.Thread(target=_answer_once, args=(listener,), daemon=True)
        once.start()
        spec = served(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
        engine = stack.enter_context(started(spec))
        once.join(PATIENCE_SECONDS)
        for _ in range(4):  # once its queue is full, Linux answers a connection with silence
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        engine.submit(requests(spec, TEXTS[:2], takes_tokens=False))
        with pytest.raises(EngineDied, match=r"cannot be reached for .*ConnectTimeout"):
            collect(engine, 2)


def _answer_once(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def test_the_check_of_a_schema_sends_only_fields_that_the_job_sends() -> None:
    with busy() as server:
        engine = {"max_tokens": None, "max_completion_tokens": 50}
        task = {"type": "choice", "labels": ["yes", "no"]}
        with started(served(server.base_url, task=task, model={"engine": engine})):
            (body,) = server.bodies
        assert "max_tokens" not in body
        assert body["max_completion_tokens"] == 1


def test_kill_wakes_a_waiting_poll() -> None:
    with busy() as server, started(served(server.base_url)) as engine:
        threading.Timer(0.2, engine.kill).start()
        with pytest.raises(EngineDied):
            engine.poll(PATIENCE_SECONDS)
