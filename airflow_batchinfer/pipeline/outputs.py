"""Outputs: the answer's text or vector as a typed column of the results."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from airflow_batchinfer.pipeline.duck import Converter, sql_text
from airflow_batchinfer.spec import EmbedTask, JobSpec, JsonTask

_SCALARS = {"string": "VARCHAR", "integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN"}
_MAX_DEPTH = 32
"""Deeper schemas, recursive ones among them, are kept as text from there on."""


class OutputColumns:
    """How a job's answers stand in the results table."""

    def __init__(self, spec: JobSpec) -> None:
        """The columns follow from the spec's task and `output.column`.

        A `json` answer becomes a struct made from the JSON Schema, and stands beside it as the text
        that the model wrote, in `<column>_json`. What a schema leaves open (no type, several types, any
        other property) is JSON text inside the struct; a schema that is no object is all text.
        """
        self._column = spec.output.column
        self._structure: str | None = None
        self._converter: Converter | None = None
        if isinstance(spec.task, EmbedTask):
            self.fields = [pa.field(self._column, pa.list_(pa.float32()))]
            self.source = "vector"
            return
        self.source = "output"
        self.fields = [pa.field(self._column, pa.string())]
        if isinstance(spec.task, JsonTask):
            structure = _structure(spec.task.json_schema, spec.task.json_schema, 0)
            if isinstance(structure, dict):
                self._structure = json.dumps(structure)
                self._converter = Converter()
                self.fields = [
                    pa.field(self._column, _arrow_type(structure)),
                    pa.field(f"{self._column}_json", pa.string()),
                ]

    def columns(self, answers: pa.Array) -> list[pa.Array]:
        """Arrays for `fields` from a part's `source` column."""
        if self._converter is None:
            return [answers.cast(self.fields[0].type)]
        # A value that a valid answer may have but the struct cannot (an integer beyond 64 bits)
        # leaves the struct empty; the text beside it has everything.
        expression = f"try(from_json_strict(value::JSON, {sql_text(self._structure or '')}))"
        structs = self._converter.convert(answers, expression)
        return [structs.cast(self.fields[0].type), answers.cast(pa.string())]


def _structure(root: dict[str, Any], schema: Any, depth: int) -> Any:
    """DuckDB's structure for a JSON Schema: a type's name, `[type]` or `{property: type}`."""
    schema = _resolved(root, schema)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return "JSON"
    kinds = schema.get("type")
    kinds = [k for k in ([kinds] if isinstance(kinds, str) else kinds or []) if k != "null"]
    if not kinds and isinstance(schema.get("enum"), list):
        kinds = ["string"] if all(isinstance(v, str) for v in schema["enum"]) else []
    if len(kinds) != 1:
        return "JSON"
    if kinds[0] == "object":
        properties = schema.get("properties")
        names = {n.lower() for n in properties} if isinstance(properties, dict) else set()
        if not properties or len(names) != len(properties) or schema.get("patternProperties"):
            return "JSON"
        return {name: _structure(root, s, depth + 1) for name, s in properties.items()}
    if kinds[0] == "array":
        items = schema.get("items")
        return [_structure(root, items, depth + 1)] if isinstance(items, dict) else "JSON"
    return _SCALARS.get(kinds[0], "JSON")


def _resolved(root: dict[str, Any], schema: Any) -> Any:
    """Follow local `$ref`s, and the one branch of `anyOf`/`oneOf` that is not null."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict):
            return schema
        reference = schema.get("$ref")
        branches = schema.get("anyOf") or schema.get("oneOf") or []
        branches = [b for b in branches if not (isinstance(b, dict) and b.get("type") == "null")]
        if isinstance(reference, str) and reference.startswith("#/"):
            schema = _pointed(root, reference)
        elif len(branches) == 1:
            schema = branches[0]
        else:
            return schema
    return None


def _pointed(root: Any, reference: str) -> Any:
    for step in reference.removeprefix("#/").split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        root = root.get(step) if isinstance(root, dict) else None
    return root


def _arrow_type(structure: Any) -> pa.DataType:
    if isinstance(structure, dict):
        return pa.struct([pa.field(name, _arrow_type(s)) for name, s in structure.items()])
    if isinstance(structure, list):
        return pa.list_(_arrow_type(structure[0]))
    return {"BIGINT": pa.int64(), "DOUBLE": pa.float64(), "BOOLEAN": pa.bool_()}.get(structure, pa.string())
