"""Fields of a job spec laid over others: a form's box over the form, a replay's overrides over the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged field by field, everything else is replaced."""
    both = dict(fields)
    for name, value in overrides.items():
        old = both.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not _replaces(old, value):
            both[name] = merged(old, value)
        else:
            both[name] = value
    return both


def _replaces(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether it is another kind of task or prompt, whose fields do not mix with the old one's."""
    return (
        new.get("type", old.get("type")) != old.get("type")
        or (new.get("messages") is not None and old.get("template") is not None)
        or (new.get("template") is not None and old.get("messages") is not None)
    )
