"""From a job's spec to vLLM's engine arguments: names checked, offline defaults filled in."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from pathlib import Path
from typing import Any, get_args

import vllm
import vllm.config
from huggingface_hub.errors import HFValidationError
from vllm.config import VllmConfig
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.utils import get_adapter_absolute_path
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.prompts.hub import from_hub
from airflow_batchinfer.spec import EmbedTask, JobSpec, JsonTask, ModelSpec

_ELSEWHERE = {
    "model": "model.name",
    "revision": "model.revision",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
}
"""vLLM arguments that a field of the spec sets."""

_OURS = frozenset({"shutdown_timeout", "disable_log_stats"})
"""vLLM arguments the worker decides: it owns signals, and counts for itself."""

_CACHE_SHARE_ON_CPU = 4
"""The KV cache takes one part in so many of the memory that is free, where nothing else is said."""
_SAYS_CACHE_SIZE = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization"})
_CACHE_SIZE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_PROCESSES_VARIABLE = "VLLM_ENABLE_V1_MULTIPROCESSING"
_BINDING_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"

_GRAMMAR = "structured_outputs_config"
_COMPACT_BACKENDS = ("xgrammar", "guidance")
"""Backends of vLLM's structured outputs that can leave whitespace out."""


def engine_config(spec: JobSpec) -> VllmConfig:
    """vLLM's whole configuration for a job, defaults worked out for this machine and model.

    Raises:
        SpecError: vLLM refuses an argument, the model, or how they go together.
        EngineError: the model's files cannot be had now, as the hub is away.
    """
    arguments = engine_arguments(spec)
    if current_platform.is_cpu():
        _stay_in_one_process()
    try:
        with from_hub("model.name", spec.model.name):
            return arguments.create_engine_config(UsageContext.LLM_CLASS)
    except OSError as error:
        raise SpecError(f"model.name: `{spec.model.name}` cannot be loaded: {error}") from error
    except (TypeError, ValueError) as error:
        raise SpecError(f"model: vLLM refuses it: {error}") from error


def engine_arguments(spec: JobSpec) -> EngineArgs:
    """vLLM's arguments for a job.

    Whatever is filled in here that decides an output follows from a field of the spec, so that the
    fingerprint covers it and a plan keeps it: a new default becomes such a field.

    Raises:
        SpecError: an option is unknown (with the nearest known one), belongs to another field, or has a
            value that vLLM refuses.
        EngineError: a file cannot be had now, as the hub is away.
    """
    model = spec.model
    _check_names(model)
    options: dict[str, Any] = {"disable_log_stats": True}
    options["runner"] = "pooling" if isinstance(spec.task, EmbedTask) else "generate"
    if model.adapter is not None:
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _room_for(model.adapter)}
    options |= model.engine
    if isinstance(spec.task, JsonTask):
        options[_GRAMMAR] = _json_grammar(spec.task, options.get(_GRAMMAR) or {})
    _fill_batch_limits(options)
    if current_platform.is_cpu():
        _fill_cpu_defaults(options)
    try:
        with from_hub("model.name", model.name):
            return EngineArgs(
                model=model.name,
                revision=model.revision,
                tokenizer=model.tokenizer,
                trust_remote_code=model.trust_remote_code,
                **{name: _as_config(name, value) for name, value in options.items()},
            )
    except HFValidationError as error:
        raise SpecError(f"model.name: `{model.name}` is no folder here and no Hugging Face name") from error
    except OSError as error:
        raise SpecError(f"model.name: `{model.name}` cannot be loaded: {error}") from error
    except (TypeError, ValueError) as error:
        raise SpecError(f"model.engine: {error}") from error


def _room_for(adapter: str) -> int:
    """The least rank vLLM can make room for that is enough for a LoRA adapter; a larger one kills its engine.

    Raises:
        SpecError: there is no such adapter, or its rank is above all that vLLM takes.
        EngineError: it cannot be had now, as the hub is away.
    """
    try:
        with from_hub("model.adapter", adapter):
            folder = Path(get_adapter_absolute_path(adapter))
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"model.adapter: `{adapter}` is no LoRA adapter that can be read: {error}") from error
    if room := [known for known in get_args(MaxLoRARanks) if known >= rank]:
        return int(min(room))
    raise SpecError(f"model.adapter: vLLM takes ranks up to {max(get_args(MaxLoRARanks))}, this is of {rank}")


def _json_grammar(task: JsonTask, given: Any) -> dict[str, Any]:
    """vLLM's structured outputs for a JSON task: what the job says, and compact unless it says otherwise.

    Raises:
        SpecError: both cannot be had.
    """
    if not isinstance(given, dict):
        raise SpecError(f"model.engine.{_GRAMMAR}: give a mapping, not {given!r}")
    if "disable_any_whitespace" in given:
        raise SpecError(f"model.engine.{_GRAMMAR}.disable_any_whitespace: set `task.compact` instead")
    if not task.compact:
        return given
    # vLLM takes this only with a backend that is named; it is chosen as by its own `auto`.
    lacking = has_xgrammar_unsupported_json_features(task.json_schema)
    options = {"backend": "guidance" if lacking else "xgrammar", "disable_any_whitespace": True, **given}
    if options["backend"] not in _COMPACT_BACKENDS:
        raise SpecError(
            f"model.engine.{_GRAMMAR}.backend: `{options['backend']}` makes no compact JSON: use one of "
            f"{', '.join(_COMPACT_BACKENDS)}, or set `task.compact: false`"
        )
    return options


def _as_config(name: str, value: Any) -> Any:
    """vLLM's config object where an argument takes one and the spec holds a mapping."""
    wanted = name.replace("_", "").lower()
    known = {n.lower(): c for n, c in vars(vllm.config).items() if isinstance(c, type)}
    if isinstance(value, dict) and wanted in known:
        return known[wanted](**value)
    return value


def _check_names(model: ModelSpec) -> None:
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in model.engine:
        if name in _ELSEWHERE:
            raise SpecError(f"model.engine.{name}: set `{_ELSEWHERE[name]}` instead")
        if name in _OURS:
            raise SpecError(f"model.engine.{name}: the worker decides this; leave it out")
        if name not in known:
            close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            raise SpecError(f"model.engine.{name}: vLLM {vllm.__version__} has no such engine argument{hint}")


def _fill_batch_limits(options: dict[str, Any]) -> None:
    """Batch limits are always explicit: an engine that is built bare takes a fraction of them."""
    world = int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))
    batched_tokens, sequences = EngineArgs.get_batch_defaults(world)
    if options.get("max_num_seqs") is None:
        options["max_num_seqs"] = sequences[UsageContext.LLM_CLASS]
    if options.get("max_num_batched_tokens") is None:
        default = batched_tokens[UsageContext.LLM_CLASS]
        options["max_num_batched_tokens"] = max(default, options["max_num_seqs"])


def _stay_in_one_process() -> None:
    """Keep vLLM in this process, which is apart from the worker already; no argument of vLLM's says so.

    On a CPU it would spawn two more, each of which imports vLLM anew, keep one core free of the model for
    them, and bind every engine of a machine to the same cores. With several memory nodes, or where the
    user binds threads, its own way is right.
    """
    if len(get_visible_memory_node()) == 1 and _BINDING_VARIABLE not in os.environ:
        os.environ.setdefault(_PROCESSES_VARIABLE, "0")


def _fill_cpu_defaults(options: dict[str, Any]) -> None:
    """Start soon and leave room: on a CPU the engine's memory is the worker's and everybody else's.

    vLLM takes 92 % of the machine for its KV cache, which fails beside anything else of a gigabyte and takes
    half a minute to clear, and it compiles the model, which takes longer than a short shard (docs/engine.md).
    """
    if not (_SAYS_CACHE_SIZE & options.keys() or os.environ.get(_CACHE_SIZE_VARIABLE)):
        options["kv_cache_memory_bytes"] = get_memory_node_info().available_memory // _CACHE_SHARE_ON_CPU
    if "compilation_config" not in options:
        options.setdefault("enforce_eager", True)
