"""Where an operator's job spec comes from: Python, a mapping, a YAML file, or a form's values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from airflow.sdk import conf

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.spec_files import build_spec, load_spec

SpecSource = JobSpec | str | Path | Mapping[str, Any] | Callable[..., JobSpec]
"""A spec; the path of a spec file; its fields; or a function that gives one.

The function's first argument is the run's params (`dict[str, Any]`). Further ones are taken by name from
Airflow's context of the task: `logical_date`, `data_interval_start`, `run_id` and so on.
"""

CONFIG_SECTION = "batchinfer"


def configured_store() -> str | None:
    """`[batchinfer] store`: the store of specs that name none, and the base of relative ones."""
    return conf.get(CONFIG_SECTION, "store", fallback="") or None


def needed_store() -> str:
    """The configured store, where nothing else names one. Raises `SpecError` if there is none."""
    store = configured_store()
    if not store:
        raise SpecError("store: name it, or set `[batchinfer] store` in Airflow's configuration")
    return store


def load_job(source: SpecSource, context: Mapping[str, Any]) -> JobSpec:
    """The job spec, its relative paths resolved.

    Paths in a spec file are relative to the file; in a mapping, to the working directory, as the path of a
    spec file is. A `JobSpec` is taken as it is.

    Args:
        source: see `SpecSource`.
        context: Airflow's context of the task, for a function.

    Raises:
        SpecError: it is not a valid spec.
    """
    if isinstance(source, JobSpec):
        return source
    if isinstance(source, (str, Path)):
        if not Path(source).is_absolute() and not Path(source).exists():
            raise SpecError(
                f"{source}: there is no such file in {Path.cwd()}, where Airflow's process runs; in a DAG's "
                f"file write Path(__file__).parent / {str(source)!r}"
            )
        return load_spec(source, configured_store())
    if isinstance(source, Mapping):
        return build_spec(source, Path.cwd(), configured_store())
    return source(dict(context["params"]), **_asked_of_context(source, context))


def _asked_of_context(function: Callable[..., JobSpec], context: Mapping[str, Any]) -> dict[str, Any]:
    """What a function wants to know besides the params. Raises `SpecError` if it is not there."""
    arguments = list(inspect.signature(function).parameters.values())[1:]
    asked = {a.name: a.default for a in arguments if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)}
    found = {name: context.get(name, default) for name, default in asked.items()}
    missing = [name for name, value in found.items() if value is inspect.Parameter.empty]
    if missing:
        raise SpecError(
            f"the function that gives the spec asks for {', '.join(missing)}, which is not in Airflow's "
            "context of this run (one triggered without a logical date has no dates): trigger it with one, "
            "or give the argument a default"
        )
    return found
