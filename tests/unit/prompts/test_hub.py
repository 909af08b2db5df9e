"""A hub that cannot be reached, or asks to wait, is not the job's fault; a wrong name is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, TypeAdapter, ValidationError

from airflow_batchinfer.errors import BatchInferError, EngineError, SpecError
from airflow_batchinfer.prompts.hub import from_hub
from airflow_batchinfer.prompts.tokens import context_length, load_tokenizer, trained_length
from airflow_batchinfer.spec import JobSpec
from tests.unit.prompts.jobs import job

pytestmark = pytest.mark.worker_env

LOADS = pytest.mark.parametrize("load", [load_tokenizer, context_length])
AWAY, NOT_THERE = "the hub cannot give `org/name` now", "can be loaded from `org/name`"


class Hub(BaseHTTPRequestHandler):
    """Answers everything with one status."""

    status = 0

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Keep the test's output quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    """The hub that the libraries ask from now on, with nothing in their cache."""
    from huggingface_hub import HfApi, constants
    from transformers.utils import hub as asked

    class Asked(Hub):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Asked) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        _ask_at(endpoint, monkeypatch)
        monkeypatch.setattr(asked, "_hf_api", HfApi(endpoint=endpoint))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between its attempts
        yield Asked
        server.shutdown()


def _ask_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)


@LOADS
@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (503, EngineError, AWAY),
        (429, EngineError, AWAY),
        (404, SpecError, NOT_THERE),
        (401, SpecError, NOT_THERE),
    ],
)
def test_a_status_says_whose_fault_it_is(
    hub: type[Hub], load: Callable[[JobSpec], Any], status: int, error: type[BatchInferError], message: str
) -> None:
    hub.status = status
    with pytest.raises(error, match=rf"^model\.name: .*{message}"):
        load(job(model={"name": "org/name"}))


@LOADS
def test_a_server_that_is_not_there_is_away(
    hub: type[Hub], load: Callable[[JobSpec], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _ask_at("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(EngineError, match=rf"^model\.name: {AWAY}"):
        load(job(model={"name": "org/name"}))


@LOADS
def test_offline_by_the_users_wish_is_no_hub_that_is_away(
    hub: type[Hub], load: Callable[[JobSpec], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SpecError, match=NOT_THERE):
        load(job(model={"name": "org/name"}))


def test_a_length_that_the_hub_does_not_tell_now_is_not_taken_for_none(hub: type[Hub]) -> None:
    spec = job(model={"name": "org/name"}, task={"type": "embed"})
    hub.status = 503
    with pytest.raises(EngineError, match=AWAY):
        trained_length(spec)
    hub.status = 404
    assert trained_length(spec) is None


def test_a_model_in_a_folder_says_its_length_itself(hub: type[Hub], tmp_path: Path) -> None:
    hub.status = 503
    spec = job(model={"name": str(tmp_path)}, task={"type": "embed"})
    assert trained_length(spec) is None
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert trained_length(spec) == 256


def test_a_hub_that_is_away_names_the_way_out(hub: type[Hub]) -> None:
    hub.status = 503
    with pytest.raises(EngineError, match=r"HF_HUB_OFFLINE=1 .*or `model\.engine\.max_model_len`"):
        trained_length(job(model={"name": "org/name"}, task={"type": "embed"}))


def test_a_validator_that_met_it_hides_nothing() -> None:
    def ask(_: int) -> int:
        try:
            raise ConnectionResetError("reset by peer")
        except OSError as error:
            raise ValueError("no such model") from error

    asks = TypeAdapter(Annotated[int, AfterValidator(ask)])
    with pytest.raises(EngineError, match="cannot give `org/name` now"), from_hub("model.name", "org/name"):
        asks.validate_python(1)
    with pytest.raises(ValidationError), from_hub("model.name", "org/name"):
        asks.validate_python("no number")
