"""What the worker fills in for vLLM is in the fingerprint, or decides no output. No engine is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.run.fingerprint import RESULT_NEUTRAL_ENGINE_OPTIONS, fingerprint_fields
from airflow_batchinfer.spec import JobSpec
from tests.integration.engine_jobs import MODELS, job, random_adapter
from tests.plans import UNUSUAL_SAMPLING

pytestmark = pytest.mark.worker_env

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TASKS: dict[str, dict[str, Any]] = {
    "generate": {"type": "generate"},
    "choice": {"type": "choice", "labels": ["a", "b"]},
    "json": {"type": "json", "schema": SCHEMA},
    "json with spaces": {"type": "json", "schema": SCHEMA, "compact": False},
    "regex": {"type": "regex", "pattern": "a+"},
    "embed": {"type": "embed"},
}

FOLLOWS_FROM = {
    "model": "model.name",
    "revision": "model.revision",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "runner": "task.type",
    "enable_lora": "model.adapter",
    "max_loras": "model.adapter",
    "max_lora_rank": "model.adapter",
    "structured_outputs_config": "task.compact",
    # of a request
    "structured_outputs": "task.type",
    "task": "task.type",
    "use_activation": "task.normalize",
    **{
        name: f"sampling.{name}"
        for name in (
            *("max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
            *("frequency_penalty", "repetition_penalty", "stop", "seed"),
        )
    },
}
"""The spec's field behind each argument that may differ from vLLM's own default."""

NEUTRAL_OF_A_REQUEST = {"output_kind", "output_text_buffer_length"}
"""The latter follows from `stop`."""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LoRA adapter of a rank that vLLM makes no room for by itself."""
    return random_adapter(tmp_path_factory.mktemp("adapter"), rank=24)


def spec_of(task: str, adapter: str) -> JobSpec:
    sampling = UNUSUAL_SAMPLING | {"seed": 5}
    return job({"name": str(MODELS / "smollm2"), "adapter": adapter}, task=TASKS[task], sampling=sampling)


def differing(given: Any, default: Any) -> set[str]:
    """Names of public fields in which two objects of one class differ."""
    names = (
        [field.name for field in dataclasses.fields(given)]
        if dataclasses.is_dataclass(given)
        else given.__struct_fields__
    )
    return {n for n in names if not n.startswith("_") and getattr(given, n) != getattr(default, n)}


def assert_covered(names: set[str], spec: JobSpec) -> None:
    fields = fingerprint_fields(spec)
    uncovered = {name for name in names if FOLLOWS_FROM.get(name) not in fields}
    assert not uncovered, (
        f"the worker sets {sorted(uncovered)}, which no field of the spec says: make each a field of the "
        "spec, or name it as neutral"
    )


@pytest.mark.parametrize("task", TASKS)
def test_engine_arguments(task: str, adapter: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from airflow_batchinfer.worker.engines.vllm_options import engine_arguments

    spec = spec_of(task, adapter)
    given, default = engine_arguments(spec), EngineArgs(model=spec.model.name)
    assert_covered(differing(given, default) - RESULT_NEUTRAL_ENGINE_OPTIONS, spec)


@pytest.mark.parametrize("task", TASKS)
def test_parameters_of_a_request(task: str, adapter: str) -> None:
    from airflow_batchinfer.worker.engines.vllm_parameters import Parameters

    spec = spec_of(task, adapter)
    given = Parameters(spec).of_seed(spec.sampling.seed)
    assert_covered(differing(given, type(given)()) - NEUTRAL_OF_A_REQUEST, spec)


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [({}, True), ({"task": {"type": "embed"}}, True), ({"sampling": {"temperature": 0.5}}, False)],
)
def test_a_job_is_greedy_if_no_seed_decides_anything(fields: dict[str, Any], greedy: bool) -> None:
    from airflow_batchinfer.worker.engines.vllm_parameters import Parameters

    parameters = Parameters(job(**fields))
    same = parameters.of_seed(1) is parameters.of_seed(2)
    assert (parameters.greedy, same) == (greedy, greedy)


def test_an_adapter_gets_room_for_its_rank_or_is_a_spec_error(adapter: str, tmp_path: Path) -> None:
    from airflow_batchinfer.worker.engines.vllm_options import engine_arguments

    def arguments(adapter: str, **engine: Any) -> Any:
        model = {"name": str(MODELS / "smollm2"), "adapter": adapter, "engine": engine}
        return engine_arguments(job(model))

    assert arguments(adapter).max_lora_rank == 32
    assert arguments(adapter, max_lora_rank=64).max_lora_rank == 64
    with pytest.raises(SpecError, match=r"model\.adapter: .* is no LoRA adapter that can be read"):
        arguments(str(tmp_path / "nothing"))
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "rank_pattern": {"q_proj": 600}}')
    with pytest.raises(SpecError, match=r"model\.adapter: vLLM takes ranks up to 512, this is of 600"):
        arguments(str(tmp_path))


def test_what_is_called_neutral_exists() -> None:
    from vllm.engine.arg_utils import EngineArgs

    assert {f.name for f in dataclasses.fields(EngineArgs)} >= RESULT_NEUTRAL_ENGINE_OPTIONS


def test_compact_json_goes_with_what_the_job_says_of_grammars() -> None:
    from airflow_batchinfer.worker.engines.vllm_options import engine_arguments

    def grammar(compact: bool, given: dict[str, Any]) -> Any:
        model = {"name": str(MODELS / "smollm2"), "engine": {"structured_outputs_config": given}}
        task = TASKS["json"] | {"compact": compact}
        return engine_arguments(job(model, task=task)).structured_outputs_config

    assert grammar(True, {}).disable_any_whitespace
    assert grammar(True, {"backend": "guidance"}).backend == "guidance"
    assert not grammar(False, {}).disable_any_whitespace
    with pytest.raises(SpecError, match=r"set `task\.compact` instead"):
        grammar(True, {"disable_any_whitespace": False})
    with pytest.raises(SpecError, match=r"or set `task\.compact: false`"):
        grammar(True, {"backend": "outlines"})


def test_on_a_cpu_the_engine_leaves_room_and_starts_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.cpu_resource_utils import get_memory_node_info

    from airflow_batchinfer.worker.engines.vllm_options import engine_arguments

    def arguments(**engine: Any) -> Any:
        return engine_arguments(job({"name": str(MODELS / "smollm2"), "engine": engine}))

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert 0 < arguments().kv_cache_memory_bytes < get_memory_node_info().total_memory / 3
    assert arguments().enforce_eager
    assert arguments(gpu_memory_utilization=0.5).kv_cache_memory_bytes is None
    assert arguments(kv_cache_memory_bytes=7).kv_cache_memory_bytes == 7
    assert not arguments(enforce_eager=False).enforce_eager
    assert not arguments(compilation_config={"mode": 3}).enforce_eager
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert arguments().kv_cache_memory_bytes is None  # vLLM reads the variable itself
