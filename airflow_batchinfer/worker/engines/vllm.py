"""In-process vLLM as an engine: the worker's side. vLLM itself runs in `vllm_host`, a process apart.

Apart, because then loading vLLM takes nothing from the worker's preparation, killing it is killing one
process group, and nothing of it is left in the worker when it has to start again.
"""

from __future__ import annotations

from collections.abc import Sequence

from airflow_batchinfer.errors import EngineError, SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.worker.engines.base import Completion, EngineDied, EngineInfo, Request, RequestFailure
from airflow_batchinfer.worker.engines.process import EngineProcess, Message

_CLOSE_SECONDS = 2.0


class VllmEngine:
    """vLLM for text (`generate`, `choice`, `json`, `regex`) and vectors (`embed`)."""

    takes_tokens = True

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._process: EngineProcess | None = None
        self._tokens_made = 0
        self._told_to_start = False
        self._killed = False
        self._died: EngineDied | None = None

    def preload(self) -> None:
        """Start the host, which prepares vLLM at once and touches no accelerator before it is told to."""
        environment = {}
        if self._spec.model.compile_cache:
            environment["VLLM_CACHE_ROOT"] = self._spec.model.compile_cache
        self._process = EngineProcess("airflow_batchinfer.worker.engines.vllm_host", environment)
        self._process.send("job", self._spec.dump())

    def start(self) -> EngineInfo:
        if self._process is None:
            self.preload()
        process = self._running()
        process.send("start")
        self._told_to_start = True
        if self._killed:  # before there was a process to kill
            process.kill()
        try:
            message = process.receive(timeout=None)
        except EngineDied as error:
            self.close()
            raise EngineError(f"vLLM did not start: {error}") from error
        match message:
            case ("ready", dict() as info):
                return EngineInfo(**info)
            case ("bad_spec", str() as text):
                self.close()
                raise SpecError(text)
            case _:
                self.close()
                raise EngineError(f"vLLM did not start: {message[1] if message else 'no answer'}")

    def submit(self, requests: Sequence[Request]) -> None:
        if requests:
            self._running().send("add", [(r.key, r.seed, r.token_ids) for r in requests])

    def poll(self, timeout: float) -> list[Completion | RequestFailure]:
        process = self._running()
        finished: list[Completion | RequestFailure] = []
        try:
            while (message := process.receive(0.0 if finished else timeout)) is not None:
                finished.extend(self._read(message))
                if not finished:  # news of progress only: let the caller look at its clock
                    break
        except EngineDied as error:
            if not finished:
                raise
            self._died = error  # its turn is the next call: what is finished is paid for
        return finished

    def abort(self, keys: Sequence[str]) -> None:
        if keys:
            self._running().send("abort", list(keys))

    def tokens_made(self) -> int:
        return self._tokens_made

    def kill(self) -> None:
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send("close")
            process.close(_CLOSE_SECONDS if self._told_to_start else 0.0)

    def _running(self) -> EngineProcess:
        if self._died is not None:
            raise self._died
        if self._process is None:
            raise EngineDied("the engine is not running")
        return self._process

    def _read(self, message: Message) -> list[Completion | RequestFailure]:
        match message:
            case ("results", int() as tokens_made, list() as results):
                self._tokens_made = tokens_made
                return [_result(values) for values in results]
            case ("died", str() as reason):
                raise EngineDied(reason)
            case _:
                raise EngineDied(f"the engine process sent what is not understood: {message[0]!r}")


def _result(values: tuple[object, ...]) -> Completion | RequestFailure:
    match values:
        case (str() as key, "failure", str() as reason, str() as text, bool() as transient):
            return RequestFailure(key, Reason(reason), text, transient)
        case _:
            return Completion(*values)  # type: ignore[arg-type]
