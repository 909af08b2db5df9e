"""Engines without a model, for tests and benchmarks: `backend: tests.engines:InstantEngine`.

Their settings are keys of `model.engine`:

- `paid_log`: file that gets one line a completion before the worker sees it, tab-separated: key, prompt
  tokens, output tokens, when the request came in, and when this engine was made (Unix seconds by the
  kernel's clock). The key starts with the row's id and a slash, so tests count what was paid by row.
- `delay_seconds`: time from submitting a request to its answer (0).
- `one_at_a_time`: requests wait in the engine's queue, and `delay_seconds` begins when each one's turn comes.
- `greedy`, `keeps_row_timeout`: what the engine says of itself (false).
- `max_in_flight`: the window the engine asks for (256).
- `max_model_len`: what the engine says of itself (none).
- `start_seconds`: how long a start takes (0).
- `starts_log`: file that gets a line at each preload and each start.
- `failing_starts`: numbers of the starts that fail, counted in `starts_log`.
- `starts_fail_with`: name of the error they raise (`EngineError`).
- `lives_for`: see `PartingEngine`.
- `answer`: literal answer instead of one made for the task.
"""

from __future__ import annotations

import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from airflow_batchinfer import errors
from airflow_batchinfer.errors import EngineError, SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.spec import ChoiceTask, EmbedTask, JobSpec, JsonTask, RegexTask
from airflow_batchinfer.worker.engines.base import (
    Completion,
    EngineDied,
    EngineInfo,
    Request,
    RequestFailure,
)

Result = Completion | RequestFailure


class InstantEngine:
    """Answers at once (or after `delay_seconds`): the same prompt always gets the same fitting answer."""

    takes_tokens = False

    def __init__(self, spec: JobSpec) -> None:
        options = spec.model.engine
        self._options = options
        self._delay = float(options.get("delay_seconds", 0.0))
        self._paid_log = options.get("paid_log")
        self._paid: int | None = None
        self._embeds = isinstance(spec.task, EmbedTask)
        self._answer = _answerer(spec)
        self._queue: deque[tuple[float, Request]] = deque()
        self._aborted: set[str] = set()
        self._made = 0
        self._killed = threading.Event()
        self._begun = _now()
        self._came: dict[str, float] = {}

    def preload(self) -> None:
        self._log("preload")

    def start(self) -> EngineInfo:
        self._log("start")
        if self._starts() in self._options.get("failing_starts", ()):
            error = getattr(errors, self._options.get("starts_fail_with", "EngineError"))
            raise error("no memory left on the device")
        if self._killed.wait(float(self._options.get("start_seconds", 0.0))):
            raise EngineError("the engine was killed while it started")
        if self._paid_log:
            self._paid = os.open(self._paid_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return EngineInfo(
            name=type(self).__name__,
            version="1",
            max_in_flight=int(self._options.get("max_in_flight", 256)),
            max_model_len=self._options.get("max_model_len"),
            greedy=bool(self._options.get("greedy")),
            keeps_row_timeout=bool(self._options.get("keeps_row_timeout")),
        )

    def _log(self, what: str) -> None:
        if path := self._options.get("starts_log"):
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{what}\n")

    def _starts(self) -> int:
        """Starts of this engine so far, in all processes that share its log."""
        path = self._options.get("starts_log")
        return Path(path).read_text(encoding="utf-8").split().count("start") if path else 0

    def submit(self, requests: Sequence[Request]) -> None:
        self._check_alive()
        self._note(requests)
        due = time.monotonic() + self._delay
        for request in requests:
            if self._queue and self._options.get("one_at_a_time"):
                due = self._queue[-1][0] + self._delay
            self._queue.append((due, request))

    def poll(self, timeout: float) -> list[Result]:
        self._check_alive()
        queue = self._queue
        if self._delay:
            wait = min(timeout, queue[0][0] - time.monotonic()) if queue else timeout
            if wait > 0:
                self._killed.wait(wait)
                self._check_alive()
            now = time.monotonic()
            ready = []
            while queue and queue[0][0] <= now:
                ready.append(queue.popleft()[1])
        else:
            ready = [r for _, r in queue]
            queue.clear()
        results: list[Result] = []
        for request in ready:
            if request.key in self._aborted:
                self._aborted.discard(request.key)
            else:
                results.extend(self._results(request))
        self._pay(results)
        return results

    def abort(self, keys: Sequence[str]) -> None:
        self._aborted.update(keys)

    def tokens_made(self) -> int:
        return self._made

    def kill(self) -> None:
        self._killed.set()

    def close(self) -> None:
        if self._paid is not None:
            os.close(self._paid)
            self._paid = None

    def _check_alive(self) -> None:
        if self._killed.is_set():
            raise EngineDied("the engine was killed")

    def _results(self, request: Request) -> list[Result]:
        return [self._complete(request)]

    def _complete(self, request: Request) -> Completion:
        prompt = prompt_of(request)
        prompt_tokens = len(request.token_ids) if request.token_ids else max(1, len(prompt) // 4)
        if self._embeds:
            return Completion(
                request.key, vector=_vector(prompt), finish_reason="stop", prompt_tokens=prompt_tokens
            )
        answer = self._answer(prompt)
        return Completion(
            request.key,
            text=answer,
            finish_reason="stop",
            prompt_tokens=prompt_tokens,
            output_tokens=len(answer) // 4 + 1,
        )

    def _note(self, requests: Sequence[Request]) -> None:
        """When requests came in, for the log of what was paid."""
        if self._paid is not None:
            self._came.update(dict.fromkeys((r.key for r in requests), _now()))

    def _pay(self, results: Sequence[Result]) -> None:
        completions = [r for r in results if isinstance(r, Completion)]
        self._made += sum(c.output_tokens or 1 for c in completions)
        if self._paid is not None and completions:
            lines = "".join(
                f"{c.key}\t{c.prompt_tokens}\t{c.output_tokens}\t{self._came[c.key]:.6f}\t{self._begun:.6f}\n"
                for c in completions
            )
            os.write(self._paid, lines.encode())
            for key in {c.key for c in completions}:
                del self._came[key]


class FaultyEngine(InstantEngine):
    """As `InstantEngine`, but a prompt may say what goes wrong with it.

    `<<hang N>>` never answers, or not in the first N starts (see `starts_log`) · `<<slow N>>` answers N
    seconds late, in the first start if there is such a log · `<<stall>>` stops the whole engine until it is
    killed · `<<twice>>` two answers · `<<blank>>` spaces for an answer · `<<empty>>` an empty one ·
    `<<none>>` one without a text · `<<invalid N>>` breaks its first N answers · `<<transient N>>` N
    transient errors first · `<<throttle N>>` the same with a wait asked for · `<<refuse>>` a final error ·
    `<<overlong>>` it does not fit · `<<grammar>>` a grammar error · `<<abort>>` finish reason `abort` ·
    `<<length>>` cut off by `max_tokens` · `<<utf8>>` a lone surrogate · `<<killworker>>` SIGKILL to the
    worker itself · `<<locked>>` the job is refused, but in the first start if there is such a log.
    """

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._tries: dict[str, int] = {}
        self._stalled = False
        self._slow: list[tuple[float, Request]] = []

    def submit(self, requests: Sequence[Request]) -> None:
        in_time = []
        for request in requests:
            fault, count = fault_of(request)
            if fault == "slow" and self._starts() <= 1:
                self._note([request])
                self._slow.append((time.monotonic() + count, request))
            else:
                in_time.append(request)
            if fault == "killworker":
                os.kill(os.getpid(), signal.SIGKILL)
            self._stalled |= fault == "stall"
        super().submit(in_time)

    def poll(self, timeout: float) -> list[Result]:
        if self._stalled:
            self._killed.wait(timeout)
            self._check_alive()
            return []
        if not any(fault_of(r)[0] != "hang" for _, r in self._queue):
            self._killed.wait(timeout)
        now = time.monotonic()
        self._queue.extendleft(late for late in self._slow if late[0] <= now)
        self._slow = [late for late in self._slow if late[0] > now]
        return super().poll(timeout)

    def _results(self, request: Request) -> list[Result]:
        fault, count = fault_of(request)
        if fault is None:
            return super()._results(request)
        key, row = request.key, prompt_of(request)
        self._tries[row] = tries = self._tries.get(row, 0) + 1
        good = self._complete(request)
        match fault:
            case "hang" if not count or self._starts() <= count:
                return []
            case "twice":
                return [good, good]
            case "blank":
                return [_changed(good, text="  ")]
            case "empty":
                return [_changed(good, text="")]
            case "none":
                return [_changed(good, text=None)]
            case "invalid" if tries <= count:
                return [_changed(good, text="{not an answer")]
            case "transient" | "throttle" if tries <= count:
                wait = 0.01 if fault == "throttle" else None
                return [
                    RequestFailure(key, Reason.ENGINE_ERROR, "try again", transient=True, retry_after=wait)
                ]
            case "refuse":
                return [RequestFailure(key, Reason.ENGINE_REFUSED, "no")]
            case "overlong":
                return [RequestFailure(key, Reason.OVER_LONG, "longer than the context")]
            case "locked" if self._starts() != 1:
                raise SpecError("the key is refused")
            case "grammar":
                return [RequestFailure(key, Reason.GRAMMAR_REJECTED, "no such grammar")]
            case "abort":
                return [_changed(good, finish_reason="abort")]
            case "length":
                return [_changed(good, text=(good.text or "")[:-1], finish_reason="length")]
            case "utf8":
                return [_changed(good, text="half a pair \ud800")]
            case _:
                return [good]


class PartingEngine(InstantEngine):
    """Its first life ends between two calls, once it has given `lives_for` completions."""

    _given = 0

    def poll(self, timeout: float) -> list[Result]:
        results = super().poll(timeout)
        self._given += len(results)
        if self._starts() == 1 and self._given >= self._options["lives_for"]:
            self._killed.set()
        return results


class UnkillableEngine(FaultyEngine):
    """Nothing ends it, as if its process hung in the kernel: `close` says so, or hangs with `hang_close`."""

    def kill(self) -> None:
        pass

    def close(self) -> None:
        if self._options.get("hang_close"):
            threading.Event().wait()
        raise EngineError("the engine does not end, not even by force")


class DyingEngine(InstantEngine):
    """A real child process answers; a prompt with `<<die>>` makes it exit with all it has in flight."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._child: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._unread = b""
        self._requests: dict[str, Request] = {}

    def start(self) -> EngineInfo:
        info = super().start()
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(self._delay)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._child.stdout is not None
        self._selector.register(self._child.stdout, selectors.EVENT_READ)
        return info

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def submit(self, requests: Sequence[Request]) -> None:
        self._check_alive()
        self._note(requests)
        assert self._child is not None
        assert self._child.stdin is not None
        lines = []
        for request in requests:
            self._requests[request.key] = request
            lines.append(json.dumps([request.key, fault_of(request)[0] == "die"]) + "\n")
        try:
            self._child.stdin.write("".join(lines).encode())
            self._child.stdin.flush()
        except OSError as error:
            raise EngineDied("the engine's process is gone") from error

    def poll(self, timeout: float) -> list[Result]:
        assert self._child is not None
        assert self._child.stdout is not None
        if not self._selector.select(timeout):
            self._check_alive()
            return []
        data = os.read(self._child.stdout.fileno(), 1 << 20)
        if not data:
            raise EngineDied(f"the engine's process ended with code {self._child.wait()}")
        *lines, self._unread = (self._unread + data).split(b"\n")
        results: list[Result] = []
        for line in lines:
            request = self._requests.pop(line.decode(), None)
            if request is not None:
                results.extend(self._results(request))
        self._pay(results)
        return results

    def abort(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._requests.pop(key, None)

    def kill(self) -> None:
        super().kill()
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def close(self) -> None:
        super().close()
        if self._child is not None:
            self._selector.close()
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._child.kill()
            self._child.wait()
            self._child.stdout.close()


_CHILD = """
import json, os, select, sys, time
delay = float(sys.argv[1])
queue, unread = [], b""
while True:
    wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
    if select.select([0], [], [], wait)[0]:
        data = os.read(0, 1 << 20)
        if not data:
            sys.exit(0)
        *lines, unread = (unread + data).split(b"\\n")
        for line in lines:
            key, dies = json.loads(line)
            if dies:
                os._exit(9)
            queue.append((time.monotonic() + delay, key))
    out = []
    while queue and queue[0][0] <= time.monotonic():
        out.append(queue.pop(0)[1] + "\\n")
    if out:
        os.write(1, "".join(out).encode())
"""


class FailingStartEngine(InstantEngine):
    """Its start fails with an `EngineError`, or hangs until killed if `hang_start` is set."""

    def start(self) -> EngineInfo:
        if self._options.get("hang_start"):
            self._killed.wait()
        raise EngineError("no memory left on the device")


_FAULT = re.compile(r"<<(\w+)(?: (\d+))?>>")


def fault_of(request: Request) -> tuple[str | None, int]:
    """The fault a prompt asks for, and its number; none if it asks for nothing."""
    match = _FAULT.search(prompt_of(request))
    return (match[1], int(match[2] or 0)) if match else (None, 0)


def prompt_of(request: Request) -> str:
    """A request's prompt as one text."""
    if request.messages is not None:
        return "\n".join(m["content"] for m in request.messages)
    return request.text if request.text is not None else " ".join(map(str, request.token_ids or []))


def answer_to(spec: JobSpec, prompt: str) -> str:
    """What `InstantEngine` says to a prompt."""
    return _answerer(spec)(prompt)


def _answerer(spec: JobSpec) -> Callable[[str], str]:
    task, fixed = spec.task, spec.model.engine.get("answer")
    if fixed is not None:
        return lambda _: str(fixed)
    if isinstance(task, ChoiceTask):
        labels = task.labels
        return lambda prompt: labels[zlib.crc32(prompt.encode("utf-8", "replace")) % len(labels)]
    if isinstance(task, JsonTask):
        schema = task.json_schema
        return lambda prompt: json.dumps(_instance(schema, zlib.crc32(prompt.encode("utf-8", "replace"))))
    if isinstance(task, RegexTask):
        raise ValueError("for a regex task, give `model.engine.answer`")
    return lambda prompt: f"answer {zlib.crc32(prompt.encode('utf-8', 'replace')):08x} to {prompt[-40:]}"


def _instance(schema: dict[str, Any], number: int) -> Any:
    """A value that fits a plain JSON Schema (type, enum, const, properties, items)."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][number % len(schema["enum"])]
    kind = schema.get("type", "object")
    match kind[0] if isinstance(kind, list) else kind:
        case "string":
            return f"text {number % 1000}"
        case "integer":
            low = int(schema.get("minimum", 0))
            return low + number % (int(schema.get("maximum", low + 100)) - low + 1)
        case "number":
            return float(schema.get("minimum", 0.0))
        case "boolean":
            return bool(number % 2)
        case "array":
            return [_instance(schema.get("items", {"type": "string"}), number)]
        case "null":
            return None
    return {
        name: _instance(sub, number + i) for i, (name, sub) in enumerate(schema.get("properties", {}).items())
    }


def _now() -> float:
    """The kernel's time, whatever a test has made of Python's."""
    return time.clock_gettime(time.CLOCK_REALTIME)


def _vector(prompt: str) -> list[float]:
    angle = (zlib.crc32(prompt.encode("utf-8", "replace")) % 6283) / 1000
    return [math.cos(angle), math.sin(angle), 0.0, 0.0]


def _changed(completion: Completion, **changes: Any) -> Completion:
    fields = {name: getattr(completion, name) for name in Completion.__slots__}
    return Completion(**(fields | changes))
