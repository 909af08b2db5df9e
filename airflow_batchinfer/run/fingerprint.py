"""The fingerprint: a hash of everything in a spec that decides an output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from airflow_batchinfer.spec import JobSpec

RESULT_NEUTRAL_ENGINE_OPTIONS = frozenset(
    {
        "block_size",
        "compilation_config",
        "disable_log_stats",
        "distributed_executor_backend",
        "download_dir",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_parallel_loading_workers",
        "pipeline_parallel_size",
        "scheduling_policy",
        "tensor_parallel_size",
    }
)
"""vLLM arguments that change how fast an answer comes, not which answer is asked for.

They may still move a floating-point result in its last bits: vLLM promises no bitwise repeat, and
neither do we. Every argument that is not listed here counts as deciding. What the worker fills in beside
the job's own arguments follows from fields of the spec alone, or is listed here.
"""

DECIDING_SECTIONS = ("prompt", "task", "sampling", "overlong", "model")
"""Sections of a spec that decide outputs; every field of theirs that is not named below does."""

_NEUTRAL_MODEL_FIELDS = frozenset({"api_key_env", "compile_cache", "engine", "max_concurrency"})
"""Fields of `model` that decide no output; `engine` is looked at argument by argument."""


DEFAULTS = 1
"""Which defaults the deciding fields have. A release that changes one of them counts this up."""


def fingerprint_fields(spec: JobSpec) -> dict[str, Any]:
    """The fields that decide an output, by path, as JSON values."""
    return fields_of_dump(spec.dump())


def given_fields(spec: JobSpec) -> dict[str, Any]:
    """Those of `fingerprint_fields` that are not at their default."""
    return fields_of_dump(spec.model_dump(mode="json", by_alias=True, exclude_defaults=True))


def fields_of_dump(data: Mapping[str, Any]) -> dict[str, Any]:
    """The deciding fields that stand in a spec's JSON, whichever release wrote it."""
    fields = {f"{section}.{k}": v for section in DECIDING_SECTIONS for k, v in data.get(section, {}).items()}
    for name in _NEUTRAL_MODEL_FIELDS:
        fields.pop(f"model.{name}", None)
    engine = data["model"].get("engine", {})
    return fields | {
        f"model.engine.{k}": v for k, v in engine.items() if k not in RESULT_NEUTRAL_ENGINE_OPTIONS
    }


def fingerprint(spec: JobSpec) -> str:
    """SHA-256 over the canonical JSON of `given_fields` and `DEFAULTS`, its first 16 hex digits.

    A field at its default is left out: a release that adds one leaves all fingerprints as they were, and
    nobody's rows run again for a field that nobody has set.
    """
    content = {"defaults": DEFAULTS, **given_fields(spec)}
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def changed_fields(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Paths whose values differ, sorted; a field that only one side has counts."""
    missing = object()
    return sorted(k for k in old.keys() | new.keys() if old.get(k, missing) != new.get(k, missing))
