"""Where an operator's job spec comes from: Python, a mapping, a YAML file, or a form's values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from airflow.sdk import conf

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.spec_files import build_spec, load_spec

SpecSource = JobSpec | str | Path | Mapping[str, Any] | Callable[[dict[str, Any]], JobSpec]
"""A spec; the path of a spec file; its fields; or a function of the run's params that gives one."""

CONFIG_SECTION = "batchinfer"


def configured_store() -> str | None:
    """`[batchinfer] store`: the store of specs that name none, and the base of relative ones."""
    return conf.get(CONFIG_SECTION, "store", fallback="") or None


def load_job(source: SpecSource, params: Mapping[str, Any]) -> JobSpec:
    """The job spec, its relative paths resolved.

    Paths in a spec file are relative to the file; in a mapping, to the working directory, as the path of a
    spec file is. A `JobSpec` is taken as it is.

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
    return source(dict(params))
