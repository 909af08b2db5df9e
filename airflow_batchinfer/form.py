"""A job spec as a form in Airflow's UI: a param for each field people change, a box for the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from airflow.sdk import Param
from pydantic import BaseModel

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.operators.job import configured_store
from airflow_batchinfer.spec import ChoiceTask, JobSpec, JsonTask, RegexTask
from airflow_batchinfer.spec_files import build_spec
from airflow_batchinfer.spec_overrides import merged
from airflow_batchinfer.yaml_text import parse_yaml, read_fields

ADVANCED = "advanced"
"""Name of the param that takes any other field of the spec, as YAML."""

_TASKS = ("generate", "choice", "json", "regex", "embed")


@dataclass(frozen=True)
class _Entry:
    """One param: where its value goes in the spec, and how the form shows it."""

    name: str
    path: str
    section: str
    title: str
    owner: type[BaseModel] | None = None
    """Model of the field, where `path` does not lead to it because the spec has several there."""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """JSON Schema keywords over those of the spec's own field."""


_ENTRIES = (
    _Entry("name", "name", "Job", "Name of the job"),
    _Entry(
        "store",
        "store",
        "Job",
        "Store",
        schema={
            "type": ["string", "null"],
            "description": "Folder of runs and tables: a local path or `s3://bucket/prefix`. "
            "Empty: `[batchinfer] store` of Airflow's configuration.",
        },
    ),
    _Entry(
        "input",
        "input.path",
        "Data",
        "Input",
        schema={
            "type": "string",
            "description": "File, folder or glob; local, `s3://` or a Delta table's folder. "
            "A relative path starts at the DAG's folder.",
        },
    ),
    _Entry("format", "input.format", "Data", "Format"),
    _Entry("id_column", "input.id_column", "Data", "Id column"),
    _Entry("carry", "input.carry", "Data", "Columns to carry along", schema={"type": ["array", "null"]}),
    _Entry("truth", "input.truth", "Data", "Column with the true label"),
    _Entry("template", "prompt.template", "Prompt", "Template", schema={"format": "multiline"}),
    _Entry("system", "prompt.system", "Prompt", "System message", schema={"format": "multiline"}),
    _Entry(
        "task",
        "task.type",
        "Answer",
        "Kind of answer",
        schema={
            "type": "string",
            "enum": list(_TASKS),
            "values_display": {
                "generate": "generate: free text",
                "choice": "choice: one of the labels",
                "json": "json: an object that fits the schema",
                "regex": "regex: text that matches the pattern",
                "embed": "embed: a vector",
            },
            "description": "What the model has to produce; all but free text is enforced while decoding.",
        },
    ),
    _Entry(
        "labels",
        "task.labels",
        "Answer",
        "Labels",
        ChoiceTask,
        {"type": ["array", "null"], "minItems": 0, "description": "For `choice`: one a line."},
    ),
    _Entry(
        "json_schema",
        "task.schema",
        "Answer",
        "JSON Schema",
        JsonTask,
        {"type": ["object", "null"], "description": "For `json`: JSON Schema of the answer."},
    ),
    _Entry(
        "pattern",
        "task.pattern",
        "Answer",
        "Pattern",
        RegexTask,
        {"type": ["string", "null"], "minLength": 0, "description": "For `regex`: the expression."},
    ),
    _Entry("output_column", "output.column", "Answer", "Column of the answer"),
    _Entry("model", "model.name", "Model", "Model"),
    _Entry("revision", "model.revision", "Model", "Revision"),
    _Entry("engine", "model.engine", "Model", "Engine options"),
    _Entry("max_tokens", "sampling.max_tokens", "Sampling", "Longest answer"),
    _Entry("temperature", "sampling.temperature", "Sampling", "Temperature"),
    _Entry("max_rows", "sharding.max_rows", "Limits", "Rows in a shard"),
    _Entry("overlong", "overlong.policy", "Limits", "Prompts that do not fit"),
    _Entry("overlong_column", "overlong.column", "Limits", "Column to cut"),
    _Entry("max_dead_fraction", "failure.max_dead_fraction", "Limits", "Tolerated dead letters"),
    _Entry("on_changed_spec", "on_changed_spec", "Limits", "If the job changed since it was planned"),
)

_TASK_FIELDS = {"choice": "labels", "json": "schema", "regex": "pattern"}
"""The one field of each kind of answer that the form asks for."""


def form_params(defaults: str | Path) -> dict[str, Param]:
    """Params for a DAG that runs any job, filled in from a spec file.

    Descriptions, bounds and allowed values come from `JobSpec`. What the file sets beyond the form's
    fields stands in the box for advanced fields.

    Raises:
        SpecError: the file is not a valid spec.
    """
    file = Path(defaults).resolve()
    given = read_fields(file)
    complete = JobSpec.parse({"store": "default", **given}).dump() | {"store": None}
    rest = deepcopy(given)
    params = {}
    for entry in _ENTRIES:
        schema = _schema(entry)
        schema.pop("default", None)
        default = _take(rest, entry.path, _take(complete, entry.path, None))
        params[entry.name] = Param(default, title=entry.title, section=entry.section, **schema)
    params[ADVANCED] = Param(
        yaml.safe_dump(rest, sort_keys=False, allow_unicode=True) if rest else "",
        type=["string", "null"],
        format="multiline",
        title="As YAML",
        section="Other fields",
        description_md="YAML of any other field of the job spec, merged over the form. See docs/spec.md.",
    )
    return params


def job_of_form(folder: str | Path) -> Callable[[dict[str, Any]], JobSpec]:
    """The function that turns a run's params into a `JobSpec`, for `batch_inference`.

    Args:
        folder: where relative paths start.
    """

    def build(params: dict[str, Any]) -> JobSpec:
        """Raises `SpecError`."""
        return build_spec(_fields(params), Path(folder).resolve(), configured_store())

    return build


def _fields(params: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for entry in _ENTRIES:
        value = params.get(entry.name)
        if value not in (None, ""):
            _put(fields, entry.path, value)
    fields["task"] = _asked_task(fields.get("task", {}))
    return merged(fields, _advanced(params.get(ADVANCED)))


def _asked_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """Without the fields of the other kinds of answer, which the form shows as well."""
    kept = ("type", _TASK_FIELDS.get(task.get("type", "")))
    return {name: value for name, value in task.items() if name in kept}


def _advanced(text: str | None) -> dict[str, Any]:
    try:
        data = parse_yaml(text or "")
    except SpecError as error:
        raise SpecError(f"{ADVANCED}: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SpecError(f"{ADVANCED}: give fields of the spec, not {type(data).__name__}")
    return data


def _schema(entry: _Entry) -> dict[str, Any]:
    """JSON Schema keywords of the spec's field, in the shape the form understands."""
    owner: Any = entry.owner or JobSpec
    *parents, name = entry.path.split(".")
    for parent in [] if entry.owner else parents:
        owner = owner.model_fields[parent].annotation
    own = {} if entry.path == "task.type" else dict(owner.model_json_schema()["properties"][name])
    branches = own.pop("anyOf", [])
    types = [branch.get("type") for branch in branches]
    if "null" in types:
        own["type"] = types
    own.pop("title", None)
    schema = {**own, **entry.schema}
    schema["description_md"] = schema.pop("description")
    return schema


def _take(fields: dict[str, Any], path: str, otherwise: Any) -> Any:
    """Remove and return the value at a path; `otherwise` if there is none. Leaves no empty mappings."""
    head, _, tail = path.partition(".")
    if not tail:
        return fields.pop(head, otherwise)
    inner = fields.get(head)
    if not isinstance(inner, dict):
        return otherwise
    value = _take(inner, tail, otherwise)
    if not inner:
        del fields[head]
    return value


def _put(fields: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        fields = fields.setdefault(parent, {})
    fields[name] = value
