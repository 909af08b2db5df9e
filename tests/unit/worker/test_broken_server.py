"""A server that breaks HTTP, JSON, UTF-8 or its own API costs the rows it answers so, never the worker."""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from airflow_batchinfer.errors import ExitCode
from tests.unit.worker.conftest import Run, assert_sums, texts


def reply(body: bytes, *headers: str, status: int = 200, missing: int = 0) -> bytes:
    """A raw HTTP response; `missing` bytes fewer than it announces."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body) + missing}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chat(content: Any = "yes", **more: Any) -> bytes:
    choice = {"message": {"content": content}, "finish_reason": "stop"}
    return json.dumps(
        {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}} | more
    ).encode()


def vector(value: Any) -> bytes:
    return json.dumps({"data": [{"embedding": value}], "usage": {"prompt_tokens": 3}}).encode()


BROKEN = {
    "no UTF-8": reply(chat("NOT").replace(b"NOT", b"a\xff\xfeb")),
    "half a character": reply(chat("NOT").replace(b"NOT", b"\xc3")),
    "cut JSON": reply(chat()[:-9]),
    "cut body": reply(chat(), missing=5),
    "nothing": reply(b""),
    "no HTTP": b"\xff\xfe\x00nonsense\r\n\r\n",
    "a page": reply(b"<html>502</html>", "Content-Type: text/html"),
    "a list": reply(b"[]"),
    "null": reply(b"null"),
    "deep": reply(b"[" * 100_000),
    "no choice": reply(b'{"choices": []}'),
    "no message": reply(b'{"choices": [{"finish_reason": "stop", "message": null}]}'),
    "a number for text": reply(chat(5)),
    "parts for text": reply(chat([{"type": "text", "text": "yes"}])),
    "an odd finish": reply(chat().replace(b'"stop"', b'{"a": []}')),
    "no gzip": reply(chat(), "Content-Encoding: gzip"),
    "odd details": reply(chat(usage={"prompt_tokens_details": "x"})),
    "odd usage": reply(chat(usage=[1])),
    "a wait that is no number": reply(b"{}", "Retry-After: nan", status=500),
    "an error that is no text": reply(b"\xff\xfe", "Content-Type: text/plain; charset=nonsense", status=500),
}
ODD_BUT_ANSWERS = {
    "odd type": reply(chat(), "Content-Type: application/octet-stream"),
    "odd counts": reply(
        chat(
            usage={
                "prompt_tokens": 1.5,
                "completion_tokens": -3,
                "prompt_tokens_details": {"cached_tokens": "7"},
            }
        )
    ),
    "a count too big": reply(chat(usage={"prompt_tokens": 2**40, "completion_tokens": True})),
    "half a pair": reply(chat("a\ud800b")),
}
NO_VECTORS = {
    "text": reply(vector("AAAA")),
    "texts": reply(vector(["a", "b"])),
    "nested": reply(vector([[1.0], [2.0]])),
    "null inside": reply(vector([1.0, None])),
    "huge": reply(vector([10**400])),
    "none": reply(vector(None)),
    "object": reply(vector({"a": 1.0})),
}


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Start a server: `<<name>>` in a prompt gets the reply of that name, every other prompt the good one.

    `<<slow>>` gets the good one too, a second late. After `lasts` requests every one gets `then`.
    """
    running: list[ThreadingHTTPServer] = []

    def start(replies: dict[str, bytes], good: bytes, then: bytes = b"", lasts: float = math.inf) -> str:
        came = itertools.count(1)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.wfile.write(reply(b"", status=404))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                asked = re.search("<<(.*?)>>", body)
                if asked and asked[1] == "slow":
                    time.sleep(1.0)
                answer = replies.get(asked[1], good) if asked else good
                self.wfile.write(answer if next(came) <= lasts else then)
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                """Keep the test's output quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        running.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def _results(run: Run, base_url: str, names: list[str], **fields: Any) -> dict[str, dict[str, Any]]:
    """What became of a row for each name, in a run in which all other rows succeed."""
    faults = {2 * i + 1: f"<<{name}>>" for i, name in enumerate(names)}
    model = {"name": "m", "backend": "openai", "base_url": base_url}
    run.plan(
        texts(2 * len(names) + 1, faults),
        model=model,
        retry={"engine_attempts": 2, "backoff_seconds": 0.01},
        line={"max_dead": 1.0},
        **fields,
    )
    assert run.work()[0] == ExitCode.COMMITTED
    assert_sums(run.commit())
    results = run.results()
    assert all(results[row]["outcome"] == "succeeded" for row in results if row not in faults)
    return {name: results[2 * i + 1] for i, name in enumerate(names)}


def test_what_cannot_be_understood_costs_its_row(run: Run, serve: Any) -> None:
    results = _results(run, serve(BROKEN, reply(chat())), list(BROKEN))
    for name, result in results.items():
        found = (result["outcome"], result["reason"], result["attempts"])
        assert found == ("failed", "engine_error", 2), name
        assert result["message"], name


def test_what_can_be_understood_is_taken(run: Run, serve: Any) -> None:
    results = _results(run, serve(ODD_BUT_ANSWERS, reply(chat())), list(ODD_BUT_ANSWERS))
    assert {result["outcome"] for result in results.values()} == {"succeeded"}
    assert results["half a pair"]["output"] == "a?b"
    for name in ("odd counts", "a count too big"):
        counts = ("prompt_tokens", "output_tokens", "cached_tokens")
        assert [results[name][count] for count in counts] == [0, 0, 0], name


def test_what_is_no_vector_costs_its_row(run: Run, serve: Any) -> None:
    good = reply(vector([1.0, 2.0]))
    task = {"type": "embed", "normalize": False}
    results = _results(run, serve(NO_VECTORS, good), list(NO_VECTORS), task=task)
    for name, result in results.items():
        assert result["outcome"] in ("failed", "invalid"), name
        assert result["message"], name


@pytest.mark.parametrize("status", [307, 402, 403, 404, 405])
def test_a_refusal_that_only_one_row_gets_is_its_own(run: Run, serve: Any, status: int) -> None:
    refused = reply(b"your text is not wanted", status=status)
    result = _results(run, serve({"wall": refused}, reply(chat())), ["wall"])["wall"]
    assert (result["outcome"], result["reason"], result["attempts"]) == ("failed", "engine_refused", 2)
    assert f"the server answered {status}: your text is not wanted" in result["message"]
    assert run.progress().engine_restarts == 0


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, ExitCode.BAD_SPEC, "model.api_key_env: "),
        (403, ExitCode.BAD_SPEC, "model.api_key_env: "),
        (402, ExitCode.ENGINE_FAILED, "see the account's balance"),
        (404, ExitCode.ENGINE_FAILED, "see that model.base_url and model.name are right"),
    ],
)
def test_a_server_that_refuses_all_requests_ends_the_worker_and_no_row_is_to_blame(
    run: Run, serve: Any, status: int, code: ExitCode, said: str
) -> None:
    model = {"name": "m", "backend": "openai", "base_url": serve({}, reply(b"go away", status=status))}
    run.plan(texts(60), model=model)
    for _ in range(3):
        found, last = run.work()
        assert found == code
        assert said in last
        assert f"{status}: go away" in last
    assert run.durable() == set()
    assert run.files("suspects.json") == []
    assert run.progress().engine_restarts == 0


def test_a_key_that_stops_working_ends_the_worker_and_what_is_done_stays(run: Run, serve: Any) -> None:
    address = serve({}, reply(chat()), reply(b"expired", status=401), 25)
    run.plan(texts(60), model={"name": "m", "backend": "openai", "base_url": address})
    code, said = run.work()
    assert code == ExitCode.ENGINE_FAILED, "it has worked, so it may do so again"
    assert "401: expired; see that the key in model.api_key_env is still good" in said
    assert 0 < len(run.durable()) <= 25
    assert run.files("suspects.json") == []


def test_a_server_that_takes_its_time_for_an_answer_does_not_stall(run: Run, serve: Any) -> None:
    model = {"name": "m", "backend": "openai", "base_url": serve({}, reply(chat()))}
    run.plan(texts(2, {1: "<<slow>>"}), model=model, retry={"stall_seconds": 0.3})
    assert run.work()[0] == ExitCode.COMMITTED
    assert run.outcomes() == {"succeeded": 2}
    assert run.progress().engine_restarts == 0
