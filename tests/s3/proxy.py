"""An HTTP proxy before an S3 server: passes requests on, or makes the trouble it was told to.

It also refuses chunked uploads with 411, as some servers do, so that every test shows we send none.
"""

from __future__ import annotations

import http.client
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

Fault = Literal["503", "500", "slowdown", "denied", "429", "reset", "partial", "short", "slow", "drop_after"]
"""What may happen to a request:

- `503`, `500`: refused with that status and no body.
- `slowdown`: 503 with S3's throttling code. `429`: that status and no body. `denied`: 403, access denied.
- `reset`: the connection is reset before an answer.
- `partial`: the connection closes in the middle of the answer's body.
- `short`: the request is passed on, the answer is reset halfway through its head.
- `slow`: the answer comes late. `drop_after`: the server acts, the answer is lost.
"""

_LATE_SECONDS = 2.0
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class FaultyProxy:
    """Faults are taken from a queue, one a request that matches; others pass. A context manager."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target).netloc
        self._faults: deque[tuple[Fault, str]] = deque()
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        """Method, path and headers (lower case) of every request."""
        self.rule: Callable[[str, str], Fault | None] = lambda method, path: None
        """The fault for a method and a path where none is in the queue."""
        self.made: list[Fault] = []
        """Faults that were made."""
        self.stored: dict[str, float] = {}
        """When the server first had an object, by its path (Unix seconds); S3 itself knows whole seconds."""
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail(self, *faults: Fault, method: str = "") -> None:
        """Have the next requests (of `method`, if given) go wrong, one after the other."""
        with self._lock:
            self._faults.extend((fault, method) for fault in faults)

    def take(self, method: str, path: str) -> Fault | None:
        """The fault for a request, if one is due."""
        with self._lock:
            fault: Fault | None
            if self._faults and self._faults[0][1] in ("", method):
                fault = self._faults.popleft()[0]
            else:
                fault = self.rule(method, path)
            if fault is not None:
                self.made.append(fault)
            return fault

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        """The server's answer, read whole: status, headers, body."""
        connection = http.client.HTTPConnection(self._target, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            whole = "uploadId=" in path if method == "POST" else method == "PUT" and "partNumber=" not in path
            if whole and answer.status == 200:
                self.stored.setdefault(unquote(urlsplit(path).path), time.time())
            return answer.status, answer.getheaders(), data
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *where: Any) -> None:
        """A client that goes away, as a killed one does, is no news."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*where)


def _handler(proxy: FaultyProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            proxy.requests.append((self.command, self.path, headers))
            chunked = "transfer-encoding" in headers or "aws-chunked" in headers.get("content-encoding", "")
            if chunked:
                self.close_connection = True
                self._answer(411, [], b"")
                return
            if "100-continue" in headers.pop("expect", ""):
                self.send_response_only(100)
                self.end_headers()
            body = self.rfile.read(int(headers.get("content-length") or 0))
            fault = proxy.take(self.command, self.path)
            match fault:
                case "503" | "500" | "429":
                    self._answer(int(fault), [], b"")
                    return
                case "slowdown" | "denied":
                    status, data = (503, _SLOW_DOWN) if fault == "slowdown" else (403, _DENIED)
                    self._answer(status, [("Content-Type", "application/xml")], data)
                    return
                case "reset":
                    self._reset()
                    return
                case "slow":
                    time.sleep(_LATE_SECONDS)
            status, answered, data = proxy.forward(self.command, self.path, headers, body)
            if fault in ("drop_after", "short"):
                if fault == "short":
                    self.wfile.write(b"HTTP/1.1 200 O")
                self._reset()
            elif fault == "partial" and len(data) > 1:
                self._answer(status, answered, data, send=len(data) // 2)
                self._reset()
            else:
                self._answer(status, answered, data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 (http.server's names)

        def _answer(
            self, status: int, headers: list[tuple[str, str]], data: bytes, send: int | None = None
        ) -> None:
            self.send_response_only(status)
            head = self.command == "HEAD"
            for name, value in headers:
                passed = name.lower() not in ("connection", "transfer-encoding")
                if passed and (head or name.lower() != "content-length"):
                    self.send_header(name, value)
            if not head:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if not head:
                self.wfile.write(data[:send])

        def _reset(self) -> None:
            self.close_connection = True
            linger = struct.pack("ii", 1, 0)  # close with RST, not FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RD)
            self.connection.close()

        def log_message(self, *_: Any) -> None:
            """Keep the test's output quiet."""

    return Handler
