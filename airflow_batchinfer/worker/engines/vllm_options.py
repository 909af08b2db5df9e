"""From a job's spec to vLLM's engine arguments: names checked, offline defaults filled in."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.spec import EmbedTask, JobSpec, ModelSpec

_ELSEWHERE = {
    "model": "model.name",
    "revision": "model.revision",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
}
"""vLLM arguments that a field of the spec sets."""

_OURS = frozenset({"shutdown_timeout", "disable_log_stats"})
"""vLLM arguments the worker decides: it owns signals, and counts for itself."""


def engine_arguments(spec: JobSpec) -> EngineArgs:
    """vLLM's arguments for a job.

    Raises:
        SpecError: an option is unknown (with the nearest known one), belongs to another field, or has a
            value that vLLM refuses.
    """
    model = spec.model
    _check_names(model)
    options: dict[str, Any] = {
        "enable_prefix_caching": True if not isinstance(spec.task, EmbedTask) else None,
        "runner": "pooling" if isinstance(spec.task, EmbedTask) else "generate",
        "disable_log_stats": True,
        **model.engine,
    }
    if model.adapter is not None:
        options = {"enable_lora": True, "max_loras": 1, **options}
    _fill_batch_limits(options)
    try:
        return EngineArgs(
            model=model.name,
            revision=model.revision,
            tokenizer=model.tokenizer,
            trust_remote_code=model.trust_remote_code,
            **options,
        )
    except (TypeError, ValueError) as error:
        raise SpecError(f"model.engine: {error}") from error


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
            raise SpecError(f"model.engine.{name}: vLLM {_version()} has no such engine argument{hint}")


def _fill_batch_limits(options: dict[str, Any]) -> None:
    """Batch limits are always explicit: an engine that is built bare takes a fraction of them."""
    world = int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))
    batched_tokens, sequences = EngineArgs.get_batch_defaults(world)
    if options.get("max_num_seqs") is None:
        options["max_num_seqs"] = sequences[UsageContext.LLM_CLASS]
    if options.get("max_num_batched_tokens") is None:
        default = batched_tokens[UsageContext.LLM_CLASS]
        options["max_num_batched_tokens"] = max(default, options["max_num_seqs"])


def _version() -> str:
    import vllm

    return str(vllm.__version__)
