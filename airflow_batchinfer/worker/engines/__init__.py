"""Engines: what turns prompts into outputs. One file an engine, one small protocol (`base`)."""

from __future__ import annotations

import importlib

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.worker.engines.base import Engine

_BUILT_IN = {
    "vllm": "airflow_batchinfer.worker.engines.vllm:VllmEngine",
    "openai": "airflow_batchinfer.worker.engines.openai:OpenAIEngine",
}


def load_engine(spec: JobSpec) -> Engine:
    """Build the engine that `model.backend` names; nothing is started yet.

    Raises:
        SpecError: there is no such engine, it cannot be imported, or it is not an engine.
    """
    path = _BUILT_IN.get(spec.model.backend, spec.model.backend)
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SpecError(
            f"model.backend: `{spec.model.backend}`: cannot import `{module_name}` here: {error}; "
            "install it in the worker's environment, or put its folder on PYTHONPATH"
        ) from error
    engine_class = getattr(module, class_name, None)
    if engine_class is None:
        raise SpecError(f"model.backend: module `{module_name}` has no `{class_name}`")
    missing = [name for name in _PROTOCOL if not hasattr(engine_class, name)]
    if not isinstance(engine_class, type) or missing:
        raise SpecError(
            f"model.backend: `{path}` is no engine: "
            + (f"it lacks {', '.join(missing)}" if missing else "name a class")
            + "; see airflow_batchinfer.worker.engines.base.Engine"
        )
    engine: Engine = engine_class(spec)
    return engine


_PROTOCOL = ("takes_tokens", "preload", "start", "submit", "poll", "abort", "tokens_made", "kill", "close")
