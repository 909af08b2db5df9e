"""Write `docs/spec.md`, the reference of the job spec, from its JSON Schema (`make docs`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from airflow_batchinfer.spec import JobSpec

DOCUMENT = Path(__file__).parents[1] / "docs" / "spec.md"

_HEAD = """# The job spec

Generated from `airflow_batchinfer/spec.py` by `make docs`; `airflow_batchinfer schema` prints the same as
JSON Schema. Unknown fields are refused. Fields without a default must be given.

"""


def spec_document() -> str:
    """The whole document: one table for the job, then one for each of its parts."""
    schema = JobSpec.model_json_schema(by_alias=True)
    models: dict[str, dict[str, Any]] = {"JobSpec": schema} | schema["$defs"]
    sections = [_section(name, model) for name, model in models.items() if "properties" in model]
    return _HEAD + "\n".join(sections)


def _section(name: str, model: dict[str, Any]) -> str:
    required = set(model.get("required", []))
    rows = [
        f"| `{field}` | {_type(spec)} | {_default(field, spec, required)} | {_says(spec)} |"
        for field, spec in model["properties"].items()
    ]
    head = "| field | type | default | what it says |\n|---|---|---|---|\n"
    return f"## {name}\n\n{_cell(model.get('description', ''))}\n\n{head}" + "\n".join(rows) + "\n"


def _type(spec: dict[str, Any]) -> str:
    if "$ref" in spec:
        name = spec["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in spec:
            return " or ".join(dict.fromkeys(_type(s) for s in spec[key]))
    if "const" in spec:
        return f"`{spec['const']}`"
    if "enum" in spec:
        return ", ".join(f"`{value}`" for value in spec["enum"])
    if spec.get("type") == "array":
        return f"list of {_type(spec.get('items', {}))}"
    return f"{spec.get('type', 'any value')}{_bounds(spec)}"


def _bounds(spec: dict[str, Any]) -> str:
    signs = {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
        "minLength": "length ≥",
        "maxLength": "length ≤",
    }
    bounds = [f"{sign} {spec[key]}" for key, sign in signs.items() if key in spec]
    return f" ({', '.join(bounds)})" if bounds else ""


def _default(field: str, spec: dict[str, Any], required: set[str]) -> str:
    if field in required:
        return "required"
    if "default" not in spec:
        return "see its table" if "$ref" in spec or "oneOf" in spec else "empty"
    return _cell(f"`{json.dumps(spec['default'])}`")


def _says(spec: dict[str, Any]) -> str:
    return _cell(spec.get("description", ""))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    DOCUMENT.write_text(spec_document(), encoding="utf-8")
    print(f"wrote {DOCUMENT}")
