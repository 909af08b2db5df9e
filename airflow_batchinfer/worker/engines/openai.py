"""A server that speaks OpenAI's HTTP API (`vllm serve` and others) as an engine.

Requests run in an event loop of their own thread. How many are open at once follows the server: up by
one for each round that goes well, down by half on 429 and 5xx, and nothing is sent before the time a
`Retry-After` names. A server that is busy or away costs no row an attempt; one that stays away ends
the engine. A row that brings down what is behind the server's proxy, while others go well, waits alone.
An answer that may be meant for the whole job, such as 403, is the row's only if a later request goes well.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from airflow_batchinfer.errors import AccessError, BatchInferError, EngineError, SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.spec import ChoiceTask, EmbedTask, JobSpec, JsonTask, RegexTask
from airflow_batchinfer.worker.engines.base import (
    FINISHED,
    Completion,
    EngineDied,
    EngineInfo,
    Request,
    RequestFailure,
)
from airflow_batchinfer.worker.engines.concurrency import AdaptiveLimit
from airflow_batchinfer.worker.engines.outage import Outage

Answer = Completion | RequestFailure
T = TypeVar("T")

_AWAY_SECONDS = 30.0
"""No connection for so long: the server is gone."""
_CONNECT_SECONDS = 10.0
_FIRST_CONCURRENCY = 16
_BUSY = frozenset({429, 502, 503, 529})
"""The server asks for less, or is away behind its proxy; says nothing about the row."""
_PERHAPS_THE_ROW = 502
"""For the second time, while others go well, it is the row: it kills what answers behind a proxy."""
_BUSY_ATTEMPTS = 8
_LONGEST_WAIT = 300.0
"""Seconds; a `Retry-After` beyond this is cut to it."""
_SAID = 500
"""Characters of a server's own words that a message quotes."""
_MOST_TOKENS = 100_000_000
"""More than any context holds; a part's columns hold the sum over a row's attempts."""
_CREDENTIALS = frozenset({401, 403})
_PASSING = frozenset({408, 409, 425, 429})
"""With 5xx: says that the same request may go well later."""
_THE_ROWS = frozenset({400, 413, 422})
"""Says what is wrong with one request. What is left, and no success, may be meant for all of the job's."""
_REMEDIES = {
    401: "see that the key in model.api_key_env is still good",
    402: "see the account's balance",
    403: "see what the key in model.api_key_env may do",
}
_OTHER_REMEDY = "see that model.base_url and model.name are right, and that the server is up"
_ABOUT_COUNTING = frozenset({"max_model_len", "tokenizer_revision"})
"""Arguments under `model.engine` that say how prompts are counted here: no field of a request."""
_LENGTH_FIELDS = ("max_tokens", "max_completion_tokens")
"""Names of the answer's length; a server may refuse one that the job did not choose."""


class OpenAIEngine:
    """OpenAI's chat completions, completions and embeddings over HTTP."""

    takes_tokens = False

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._body = _request_body(spec)
        self._answers: queue.SimpleQueue[Answer | EngineDied | BatchInferError] = queue.SimpleQueue()
        self._died: EngineDied | BatchInferError | None = None
        self._tokens_made = 0
        """And one for each answer, whatever it says."""
        self._waits = 0
        """Polls while nothing was sent because the server had asked for it, which is no stall."""
        self._running: _Loop | None = None
        self._key: str | None = None

    def preload(self) -> None:
        """The server is up already."""

    def start(self) -> EngineInfo:
        self._key = _key_from_environment(self._spec.model.api_key_env)
        self._died = None
        self._answers = queue.SimpleQueue()
        self._running = _Loop()
        try:
            with _server_errors(self._base_url):
                return self._running.run(self._connect())
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[Request]) -> None:
        loop = self._alive()
        for request in requests:
            loop.spawn(request.key, self._answer(request))

    def poll(self, timeout: float) -> list[Answer]:
        self._alive()
        self._waits += self._limit.paused
        answers: list[Answer] = []
        with contextlib.suppress(queue.Empty):
            answer = self._answers.get(timeout=timeout)
            while True:
                if isinstance(answer, EngineDied | BatchInferError):
                    self._died = answer
                    break
                answers.append(answer)
                answer = self._answers.get_nowait()
        if not answers:  # else its turn is the next call
            self._alive()
        return answers

    def abort(self, keys: Sequence[str]) -> None:
        self._alive().cancel(keys)

    def tokens_made(self) -> int:
        return self._tokens_made + self._waits

    def kill(self) -> None:
        self._answers.put(EngineDied("the engine was ended"))

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    @property
    def _base_url(self) -> str:
        return _base_url(self._spec)

    def _alive(self) -> _Loop:
        if self._died is not None:
            raise self._died
        if self._running is None:
            raise EngineDied("the engine is not running")
        return self._running

    async def _connect(self) -> EngineInfo:
        """Open the client inside its loop, and ask the server what it serves.

        Raises:
            SpecError: the server refuses the key, the model or the schema.
            AccessError: it takes no request of the job's.
            EngineError: it answers with an error.
        """
        most = self._spec.model.max_concurrency
        self._limit = AdaptiveLimit(first=min(_FIRST_CONCURRENCY, most), most=most)
        self._outage = Outage()
        self._accepted = 0.0
        """When the newest of the requests that went well was sent (monotonic)."""
        self._checking = asyncio.Lock()
        self._client = httpx.AsyncClient(
            base_url=self._base_url + "/",
            headers=_headers(self._key),
            timeout=httpx.Timeout(self._spec.retry.row_timeout_seconds, connect=_CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
        )
        assert self._running is not None
        self._running.on_close(self._client.aclose)
        length = _served_length(self._spec, await self._client.get("models"), self._key)
        await self._check_schema()
        return EngineInfo(
            name="openai",
            version=self._base_url,
            max_in_flight=2 * most,
            max_model_len=length,
            options={"max_concurrency": str(most)},
            keeps_row_timeout=True,
        )

    async def _check_schema(self) -> None:
        """One request for one token, so that a schema the server cannot compile ends the job at once."""
        if not isinstance(self._spec.task, (ChoiceTask, JsonTask, RegexTask)):
            return
        response = await self._probe(chat=self._spec.prompt.chat)
        if response.status_code in (400, 422):
            field = {"choice": "labels", "json": "schema", "regex": "pattern"}[self._spec.task.type]
            raise SpecError(f"task.{field}: the server refuses it: {self._words(response)}")

    async def _probe(self, *, chat: bool) -> httpx.Response:
        """One request for one token, that is no row's: what the server says to it is meant for the job.

        Raises:
            SpecError: the server refuses the key, which has never worked here.
            AccessError: it takes no request of the job's, for now at least.
        """
        messages = [{"role": "user", "content": "?"}]
        path, body = self._endpoint(Request("", 0, messages=messages) if chat else Request("", 0, text="?"))
        one_token = {name: 1 for name in _LENGTH_FIELDS if name in self._body}
        started = time.monotonic()
        response = await self._client.post(path, json=body | one_token)
        self._tokens_made += 1
        status, url = response.status_code, f"{self._base_url}/{path}"
        if status == 200:
            self._accepted = started
        if not _may_mean_the_job(status):
            return response
        if status in _CREDENTIALS and not self._accepted:
            raise SpecError(f"model.api_key_env: {url} refuses the key: {status}: {self._words(response)}")
        remedy = _REMEDIES.get(status, _OTHER_REMEDY)
        raise AccessError(f"{url} takes no request of this job: {status}: {self._words(response)}; {remedy}")

    async def _check_access(self, started: float, *, chat: bool) -> None:
        """After an answer that may be meant for the job: see if one that was sent after `started` goes well.

        Raises:
            SpecError, AccessError: none does; see `_probe`.
        """
        async with self._checking:  # one probe speaks for all that wait
            if self._accepted <= started:
                await self._probe(chat=chat)

    async def _answer(self, request: Request) -> None:
        """Get one request's answer into the queue, whatever comes."""
        try:
            answer: Answer | EngineDied | BatchInferError = await self._ask(request)
        except BatchInferError as error:
            answer = error
        except Exception as error:  # a bug here, or a server that breaks its protocol, costs one row
            text = f"{type(error).__name__}: {error}"
            answer = RequestFailure(request.key, Reason.ENGINE_ERROR, text, transient=True)
        self._answers.put(answer)

    async def _ask(self, request: Request) -> Answer | EngineDied:
        """Ask until there is an answer. Raises `SpecError`, `AccessError`: no request will get one."""
        path, body = self._endpoint(request)
        limit = self._spec.retry.row_timeout_seconds
        busy = 0
        while True:
            alone = 0.0
            async with self._limit:
                started = time.monotonic()
                try:
                    async with asyncio.timeout(limit):
                        response = await self._client.post(path, json=body)
                except TimeoutError:
                    self._limit.went_badly(started)
                    text = f"no answer within retry.row_timeout_seconds={limit:g}"
                    return RequestFailure(request.key, Reason.TIMED_OUT, text, True, retry_after=0.0)
                except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                    self._limit.went_badly(started)
                    away = self._outage.goes_on(started)
                    if away > _AWAY_SECONDS:
                        why = f"{type(error).__name__} {error}"
                        return EngineDied(f"{self._base_url} cannot be reached for {away:.0f} s: {why}")
                    self._limit.pause(1.0)
                    continue
                except httpx.TransportError as error:
                    self._limit.went_badly(started)
                    text = f"{self._base_url}: {type(error).__name__} {error}"
                    return RequestFailure(request.key, Reason.ENGINE_ERROR, text, transient=True)
                self._outage.is_over()
                self._tokens_made += 1
                if response.status_code == 200:
                    self._limit.went_well()
                    self._accepted = max(self._accepted, started)
                    return self._completion(request.key, response.json())
                status, wait = response.status_code, _retry_after(response)
                again = status == _PERHAPS_THE_ROW and wait is None and busy > 0
                row = again and self._limit.went_well_since(started)
                if not row and (status == 429 or status >= 500):
                    self._limit.went_badly(started)
                if _may_mean_the_job(status):
                    await self._check_access(started, chat=request.messages is not None)
                if status not in _BUSY or busy >= _BUSY_ATTEMPTS:
                    return self._refusal(request.key, response, wait)
                pause = wait if wait is not None else min(2.0**busy, 30.0)
                busy += 1
                if row:
                    alone = pause
                else:
                    self._limit.pause(pause)
            await asyncio.sleep(alone)  # others take its turn

    def _endpoint(self, request: Request) -> tuple[str, dict[str, Any]]:
        if isinstance(self._spec.task, EmbedTask):
            text = request.text
            if text is None:
                return "embeddings", {**self._body, "messages": request.messages}  # vLLM's extension
            return "embeddings", {**self._body, "input": text}
        seed = {"seed": request.seed} if self._spec.sampling.temperature > 0 else {}
        if request.messages is not None:
            return "chat/completions", {**seed, **self._body, "messages": request.messages}
        return "completions", {**seed, **self._body, "prompt": request.text}

    def _completion(self, key: str, answer: dict[str, Any]) -> Answer:
        usage = answer.get("usage") or {}
        prompt_tokens, output_tokens = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        self._tokens_made += prompt_tokens + output_tokens
        if isinstance(self._spec.task, EmbedTask):
            vector = _vector(answer["data"][0]["embedding"])
            if self._spec.task.normalize:
                vector = _normalized(vector)
            return Completion(key, vector=vector, finish_reason="stop", prompt_tokens=prompt_tokens)
        choice = answer["choices"][0]
        reason = choice.get("finish_reason")
        if reason not in FINISHED:
            refused = reason == "content_filter"
            return RequestFailure(
                key,
                Reason.ENGINE_REFUSED if refused else Reason.ENGINE_ERROR,
                f"the server ended the request with finish_reason `{reason}`",
                transient=not refused,
            )
        text = choice["message"].get("content") if "message" in choice else choice.get("text")
        if not isinstance(text, str | None):
            raise TypeError(f"the answer's content is a {type(text).__name__}, not text")
        return Completion(
            key,
            text=text or "",
            finish_reason=reason,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=_count(usage.get("prompt_tokens_details") or {}, "cached_tokens"),
        )

    def _refusal(self, key: str, response: httpx.Response, wait: float | None) -> RequestFailure:
        status, text = response.status_code, self._words(response)
        message = f"the server answered {status}: {text}"
        if _may_mean_the_job(status):
            return RequestFailure(key, Reason.ENGINE_REFUSED, message, transient=True)
        if status in _PASSING or status >= 500:
            return RequestFailure(key, Reason.ENGINE_ERROR, message, transient=True, retry_after=wait)
        long = any(words in text for words in ("maximum context length", "maximum model length", "too long"))
        return RequestFailure(key, Reason.OVER_LONG if long else Reason.ENGINE_REFUSED, message)

    def _words(self, response: httpx.Response) -> str:
        return _words(response, self._key)


class _Loop:
    """An event loop in a thread, with tasks by key."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-engine", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to the end and return the result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def spawn(self, key: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a task under a key."""

        def start() -> None:
            task = self._loop.create_task(coroutine)
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key, None))

        self._loop.call_soon_threadsafe(start)

    def cancel(self, keys: Sequence[str]) -> None:
        """Cancel tasks and wait until they are gone, so that nothing of them comes back."""

        async def cancel() -> None:
            tasks = [task for key in keys if (task := self._tasks.get(key)) is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(cancel())

    def on_close(self, closer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await `closer()` when the loop is closed."""
        self._closers.append(closer)

    def close(self) -> None:
        """Cancel what runs, close what was opened, end the thread."""
        self.cancel(list(self._tasks))
        for closer in self._closers:
            self.run(closer())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def context_length(spec: JobSpec) -> int:
    """Tokens that prompt and answer may have together: what the job says, or else its server.

    Raises:
        SpecError: neither does, or the server refuses the key or the model.
        EngineError: the server does not answer.
    """
    said = spec.model.engine.get("max_model_len")
    if isinstance(said, int) and said > 0:
        return said
    key, base_url = _key_from_environment(spec.model.api_key_env), _base_url(spec)
    with _server_errors(base_url):
        response = httpx.get(f"{base_url}/models", headers=_headers(key), timeout=_CONNECT_SECONDS)
        length = _served_length(spec, response, key)
    if length is None:
        raise SpecError(
            f"model.engine.max_model_len: set it; {base_url} does not say how long the context of "
            f"`{spec.model.name}` is"
        )
    return length


def _served_length(spec: JobSpec, response: httpx.Response, key: str | None) -> int | None:
    """The model's context length from a server's answer to `/models`; none if it does not say (vLLM does).

    Raises:
        SpecError: the server refuses the key, or serves no such model.
        EngineError: it answers with an error.
    """
    base_url, name = _base_url(spec), spec.model.name
    if response.status_code in _CREDENTIALS:
        raise SpecError(f"model.api_key_env: {base_url} refuses the key: {_words(response, key)}")
    if response.status_code in (404, 405):  # a server without a list of models
        return None
    if response.status_code != 200:
        raise EngineError(f"{base_url}/models: {response.status_code}: {_words(response, key)}")
    models = {m["id"]: m for m in response.json().get("data", []) if "id" in m}
    if models and name not in models:
        close = difflib.get_close_matches(name, models, n=1)
        hint = f"did you mean `{close[0]}`" if close else f"it serves {', '.join(sorted(models)[:10])}"
        raise SpecError(f"model.name: {base_url} serves no `{name}`; {hint}")
    length = models.get(name, {}).get("max_model_len")
    return length if isinstance(length, int) else None


@contextlib.contextmanager
def _server_errors(base_url: str) -> Iterator[None]:
    """Turn what a server's absence or a wrong address raises into an `EngineError`."""
    try:
        yield
    except httpx.TransportError as error:
        raise EngineError(f"model.base_url: {base_url} does not answer: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(
            f"model.base_url: {base_url} does not speak OpenAI's API: {type(error).__name__}: {error}"
        ) from error


def _may_mean_the_job(status: int) -> bool:
    """Whether an answer may be one to the job's key, address or account, whatever the request."""
    return status != 200 and status < 500 and status not in _PASSING | _THE_ROWS


def _base_url(spec: JobSpec) -> str:
    assert spec.model.base_url is not None
    return spec.model.base_url.rstrip("/")


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _words(response: httpx.Response, key: str | None) -> str:
    """What the server says on an error; some say the key again, and this goes into logs and tables."""
    words = _message(response)
    return (words.replace(key, "***") if key else words)[:_SAID]


def _request_body(spec: JobSpec) -> dict[str, Any]:
    """What all requests have in common. `model.engine` adds fields; a null there removes one of ours."""
    body: dict[str, Any] = {"model": spec.model.name}
    if isinstance(spec.task, EmbedTask):
        body["encoding_format"] = "float"
        if not spec.task.normalize:
            body["use_activation"] = False  # vLLM's name for it; it would scale the vectors otherwise
    else:
        sampling = spec.sampling
        body |= {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
        defaults = type(sampling)()
        for name in (
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "stop",
        ):
            value = getattr(sampling, name)
            if value != getattr(defaults, name):  # not every server knows every one
                body[name] = value
    match spec.task:
        case JsonTask(json_schema=schema):
            named = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        case ChoiceTask(labels=labels):
            body["structured_outputs"] = {"choice": list(labels)}
        case RegexTask(pattern=pattern):
            body["structured_outputs"] = {"regex": pattern}
    body |= {name: value for name, value in spec.model.engine.items() if name not in _ABOUT_COUNTING}
    return {name: value for name, value in body.items() if value is not None}


def _key_from_environment(variable: str | None) -> str | None:
    """The key to send; none if the job names no variable. Raises `SpecError`, which never shows it."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()  # files that hold secrets like to end with a line break
    if not key:
        raise SpecError(f"model.api_key_env: the worker's environment has no `{variable}`")
    if not key.isascii() or not key.isprintable():
        raise SpecError(f"model.api_key_env: `{variable}` holds characters that no HTTP header may have")
    return key


def _message(response: httpx.Response) -> str:
    """The server's own words on an error, however it wraps them."""
    try:
        data = response.json()
    except ValueError:
        return response.text or response.reason_phrase
    error = data.get("error", data) if isinstance(data, dict) else data
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds to wait by the response's `Retry-After`: a number or a date."""
    value = response.headers.get("Retry-After")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), _LONGEST_WAIT)


def _count(usage: dict[str, Any], name: str) -> int:
    """A number of tokens by its name in `usage`; 0 where the server gives none, or one that cannot be."""
    count = usage.get(name)
    return count if type(count) is int and 0 <= count <= _MOST_TOKENS else 0


def _vector(embedding: Any) -> list[float]:
    """An embedding as it came. Raises `TypeError`, `OverflowError`: it is no list of numbers."""
    if not isinstance(embedding, list) or not all(isinstance(x, int | float) for x in embedding):
        raise TypeError("the embedding is no list of numbers")
    return [float(x) for x in embedding]


def _normalized(vector: list[float]) -> list[float]:
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [x / length for x in vector] if length > 0 else vector
