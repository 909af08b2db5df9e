"""Real vLLM through the engine protocol: answers, refusals, and an end that leaves nothing behind."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.worker.engines import load_engine
from airflow_batchinfer.worker.engines.base import Completion, EngineDied, Request, RequestFailure
from airflow_batchinfer.worker.engines.vllm import VllmEngine
from tests.integration.engine_jobs import (
    ENGINE,
    MODELS,
    PATIENCE_SECONDS,
    collect,
    completed,
    job,
    random_adapter,
    requests,
)

pytestmark = pytest.mark.worker_env

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"What is {i} plus 2?" for i in range(24)]
WITHOUT_END = ["Count from one to one thousand, one number a line."] * 8


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        yield


@contextmanager
def started(spec: JobSpec) -> Iterator[VllmEngine]:
    engine = load_engine(spec)
    assert isinstance(engine, VllmEngine)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def processes_of_group(group: int) -> list[int]:
    """Living processes of a process group; those that only wait to be buried do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(pgrp) == group and state != "Z":
                found.append(int(entry.name))
    return found


def wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := processes_of_group(group):
        assert time.monotonic() < deadline, f"processes left: {left}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def generating() -> Iterator[VllmEngine]:
    """One engine for free text, in processes as on a GPU; the last test that uses it kills its core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        with started(job(sampling={"max_tokens": 400})) as engine:
            yield engine


class TestGenerate:
    def test_answers_come_one_by_one_with_their_counts(self, generating: VllmEngine) -> None:
        made = generating.tokens_made()
        sent = requests(job(), TEXTS)
        generating.submit(sent)
        results = completed(collect(generating, len(TEXTS)))
        assert set(results) == {r.key for r in sent}
        assert "3" in (results["1"].text or "")
        for request in sent:
            result = results[request.key]
            assert result.prompt_tokens == len(request.token_ids or ())
            assert 0 < result.output_tokens <= 400
        assert generating.tokens_made() - made >= sum(r.output_tokens for r in results.values())

    def test_a_refused_row_costs_only_itself(self, generating: VllmEngine) -> None:
        good, too_long = requests(job(), ["What is 1 plus 2?", "word " * 600])
        nonsense = Request("nonsense", 0, token_ids=[10**9])
        empty = Request("empty", 0, token_ids=[])
        generating.submit([too_long, nonsense, good, empty])
        answers = collect(generating, 4)
        assert isinstance(answers[good.key], Completion)
        reasons = {k: a.reason for k, a in answers.items() if isinstance(a, RequestFailure)}
        assert reasons == {
            too_long.key: Reason.OVER_LONG,
            "nonsense": Reason.ENGINE_REFUSED,
            "empty": Reason.ENGINE_REFUSED,
        }

    def test_an_aborted_row_never_comes_back(self, generating: VllmEngine) -> None:
        endless, short = requests(job(), [WITHOUT_END[0], "What is 1 plus 2?"])
        generating.submit([endless, short])
        generating.abort([endless.key])
        assert set(collect(generating, 1)) == {short.key}
        assert generating.poll(1.0) == []

    def test_a_shared_prefix_is_computed_once(self, generating: VllmEngine) -> None:
        spec = job(prompt={"template": "{{ text }}", "system": "You answer with great care. " * 60})
        first, *rest = requests(spec, TEXTS[:4])
        generating.submit([first])
        completed(collect(generating, 1))
        generating.submit(rest)
        results = completed(collect(generating, 3))
        assert all(r.cached_tokens >= 256 for r in results.values())

    def test_an_adapter_changes_the_answers(self, generating: VllmEngine, tmp_path: Path) -> None:
        model = {
            "name": str(MODELS / "smollm2"),
            "engine": ENGINE,
            "adapter": random_adapter(tmp_path, rank=24),
        }
        adapted = job(model)
        generating.submit(requests(job(), TEXTS[:4]))
        plain = completed(collect(generating, 4))
        with started(adapted) as engine:
            engine.submit(requests(adapted, TEXTS[:4]))
            changed = completed(collect(engine, 4))
        texts = {key: answer.text or "" for key, answer in changed.items()}
        assert not any((plain[key].text or "").startswith(text) for key, text in texts.items())

    def test_sigkill_of_the_core_is_told_within_seconds(self, generating: VllmEngine) -> None:
        group = _group(generating)
        generating.submit(requests(job(), WITHOUT_END))
        generating.poll(1.0)
        (core,) = (p for p in processes_of_group(group) if "EngineCore" in _command(p))
        os.kill(core, signal.SIGKILL)
        with pytest.raises(EngineDied, match="SIGKILL"):
            collect(generating, len(WITHOUT_END))
        generating.close()
        wait_until_gone(group)
        with pytest.raises(EngineDied):
            generating.submit(requests(job(), TEXTS[:1]))


def test_json_fits_its_schema_and_wastes_no_whitespace() -> None:
    schema = {
        "type": "object",
        "properties": {
            "sum": {"type": "integer", "minimum": 0, "maximum": 99},
            "even": {"type": "boolean"},
        },
        "required": ["sum", "even"],
        "additionalProperties": False,
    }
    spec = job(task={"type": "json", "schema": schema})
    with started(spec) as engine:
        # Signals for the worker do not reach the engine: the group of this process is not its group.
        assert os.getpgid(engine_pid := _group(engine)) == engine_pid != os.getpgrp()
        assert os.getsid(engine_pid) != os.getsid(0)
        engine.submit(requests(spec, TEXTS))
        for result in completed(collect(engine, len(TEXTS))).values():
            answer = json.loads(result.text or "")
            assert set(answer) == {"sum", "even"}
            assert 0 <= answer["sum"] <= 99
            assert not re.search(r"\s", result.text or "")


def test_regex_is_obeyed_and_kill_wakes_a_waiting_poll() -> None:
    spec = job(task={"type": "regex", "pattern": "[0-9]{2}(cats|dogs)"})
    with started(spec) as engine:
        engine.submit(requests(spec, TEXTS))
        for result in completed(collect(engine, len(TEXTS))).values():
            assert re.fullmatch("[0-9]{2}(cats|dogs)", result.text or "")
        group = _group(engine)
        threading.Timer(0.5, engine.kill).start()
        with pytest.raises(EngineDied):
            engine.poll(PATIENCE_SECONDS)  # nothing is in flight, so it has nothing to come back with
        wait_until_gone(group)


def test_kill_wakes_a_waiting_start() -> None:
    engine = load_engine(job())
    assert isinstance(engine, VllmEngine)
    threading.Timer(1.0, engine.kill).start()
    with pytest.raises(Exception, match="did not start"):
        engine.start()
    engine.close()


def test_choice_and_an_engine_that_dies_with_its_worker() -> None:
    """A worker process gets labels, is killed with -9, and nothing of its engine stays."""
    code = (
        "import json, time\n"
        "from tests.integration.test_engines_vllm import *\n"
        'spec = job(task={"type": "choice", "labels": ["positive", "very negative"]})\n'
        "engine = load_engine(spec)\n"
        "engine.start()\n"
        "engine.submit(requests(spec, TEXTS))\n"
        "texts = [r.text for r in completed(collect(engine, len(TEXTS))).values()]\n"
        "print(json.dumps([engine._process.pid, texts]), flush=True)\n"
        "time.sleep(600)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        group, texts = json.loads(worker.stdout.readline())
        assert set(texts) <= {"positive", "very negative"}
        assert len(texts) == len(TEXTS)
        assert processes_of_group(group)
    finally:
        worker.kill()
        worker.wait()
    wait_until_gone(group)


def test_embeddings_are_vectors_of_length_one() -> None:
    model = {"name": str(MODELS / "minilm"), "engine": {"enforce_eager": True}}
    spec = job(model, task={"type": "embed"})
    texts = ["A cat sits on the mat.", "A kitten is on the rug.", "The stock market fell."]
    with started(spec) as engine:
        engine.submit(requests(spec, texts))
        results = completed(collect(engine, len(texts)))
    vectors = [results[str(i)].vector or [] for i in range(len(texts))]
    assert [len(v) for v in vectors] == [384] * 3
    assert [math.isclose(math.hypot(*v), 1.0, rel_tol=1e-3) for v in vectors] == [True] * 3
    near, far = (sum(a * b for a, b in zip(vectors[0], v, strict=True)) for v in vectors[1:])
    assert near > far


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model": {"name": str(MODELS / "smollm2"), "engine": {**ENGINE, "max_num_sequences": 3}}},
            r"model\.engine\.max_num_sequences: .*did you mean `max_num_seqs`",
        ),
        (
            {"task": {"type": "json", "schema": {"type": "object", "properties": {"a": {"type": "odd"}}}}},
            r"task\.schema: vLLM refuses it",
        ),
    ],
    ids=["unknown option", "schema that does not compile"],
)
def test_a_job_that_cannot_work_is_a_spec_error(fields: dict[str, object], message: str) -> None:
    engine = load_engine(job(**fields))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=message):
        engine.start()
    engine.close()


def _group(engine: VllmEngine) -> int:
    assert engine._process is not None
    return engine._process.pid


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text() + Path(f"/proc/{pid}/cmdline").read_text()
