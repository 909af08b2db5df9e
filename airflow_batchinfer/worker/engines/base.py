"""The engine protocol: what the worker asks of anything that turns prompts into outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.spec import JobSpec

FINISHED = frozenset({"stop", "length"})
"""Finish reasons of a result. With any other (`abort`, `error`) a text is part of one, and none."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for the engine.

    `key` is the worker's own name of it, unique among what is in flight. A token engine gets
    `token_ids`; a text engine (an HTTP server) gets `messages` (`role`, `content`) or `text`.
    """

    key: str
    seed: int
    token_ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine gave for one request. `text` for generation, `vector` for embedding."""

    key: str
    text: str | None = None
    vector: list[float] | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The engine gave no output for one request; the engine itself goes on.

    `transient` failures may be tried again by the worker; others are final.
    """

    key: str
    reason: Reason
    message: str
    transient: bool = False
    retry_after: float | None = None
    """Seconds the engine asks to wait before another attempt."""


class EngineDied(Exception):
    """The engine's process is gone or cannot answer; what was in flight has no result."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine tells of itself."""

    name: str
    version: str
    max_in_flight: int
    """Requests to keep submitted (about twice the engine's batch), so that its queue never empties."""
    max_model_len: int | None
    """Tokens that prompt and answer may have together; none if the engine does not say."""
    options: dict[str, str] = field(default_factory=dict)
    greedy: bool = False
    """Whether seeds decide nothing: a prompt asked again gets practically the same answer."""
    keeps_row_timeout: bool = False
    """Whether the engine itself gives up (`TIMED_OUT`) what runs for longer than `retry.row_timeout_seconds`.

    Then it may show no life for as long. Else the worker gives it up, and takes the engine's queue to be
    first in, first out.
    """


class Engine(Protocol):
    """One engine for one job. Called from one thread, except `kill`, which any thread may call.

    Built with `Engine(spec: JobSpec)`; building must be cheap and start nothing.
    """

    takes_tokens: bool
    """Whether requests carry `token_ids` (else `messages` or `text`)."""

    def __init__(self, spec: JobSpec) -> None: ...

    def preload(self) -> None:
        """Begin what a start needs and no accelerator does, such as imports; never blocks, never raises.

        `start` follows as soon as a row needs the engine, or `close` if none does.
        """
        ...

    def start(self) -> EngineInfo:
        """Load the model and compile what can be compiled once.

        Raises:
            SpecError: the job cannot work (unknown option, schema that does not compile, no model).
            EngineError: the engine did not start.
        """
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Never blocks on inference.

        Raises:
            EngineDied: it was dead before; none of the requests has reached it.
        """
        ...

    def poll(self, timeout: float) -> list[Completion | RequestFailure]:
        """What finished since the last call; waits up to `timeout` seconds for something.

        Each submitted request comes back exactly once, unless it is aborted.

        Raises:
            EngineDied: it is dead; a request in flight may be to blame.
            SpecError, AccessError: it takes no request of the job's, and that is no request's fault.
        """
        ...

    def abort(self, keys: Sequence[str]) -> None:
        """Forget requests; nothing more comes back for them."""
        ...

    def tokens_made(self) -> int:
        """A counter that moves whenever the engine makes progress on any request."""
        ...

    def kill(self) -> None:
        """End the engine and its processes at once, from any thread; a blocked `poll` returns or raises."""
        ...

    def close(self) -> None:
        """End the engine in good order, started or only preloaded; nothing is in flight.

        Raises:
            EngineError: it does not end, not even by force, so no successor can take its place.
        """
        ...
