"""Fields of a job spec laid over others: a form's box over the form, a replay's overrides over the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged field by field, everything else is replaced; a JSON Schema is one value."""
    both = dict(fields)
    for name, value in overrides.items():
        old = both.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not _replaces(name, old, value):
            value = merged(old, value)
        both[name] = value
    return both


def _replaces(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether it is another schema, or kind of task or prompt, whose fields do not mix with the old one's."""
    return (
        name == "schema"
        or new.get("type", old.get("type")) != old.get("type")
        or (new.get("messages") is not None and (old.get("template") or old.get("system")) is not None)
        or (new.get("template") is not None and old.get("messages") is not None)
    )
