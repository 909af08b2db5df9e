"""Chat templates in our sandbox: in the environment that `transformers` gives them, but with bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, Undefined, pass_context
from jinja2.ext import loopcontrols
from jinja2.runtime import Context

from airflow_batchinfer.prompts.sandbox import Sandbox, bounded, rendered, weight

Conversation = list[dict[str, str]]


def limited_chat_template(tokenizer: Any, chosen: str | None) -> Callable[[Conversation], str] | None:
    """What `tokenizer.apply_chat_template` does with a conversation, within the sandbox's bounds.

    Args:
        tokenizer: the model's.
        chosen: a chat template, or the name of one of the model's; none: the model's own.

    Returns:
        A function that renders a conversation and raises `RenderError` past a bound; none if the template
        needs what only `transformers` gives it. Whoever uses it compares it with the tokenizer first.
    """
    try:
        template = _ChatSandbox().from_string(tokenizer.get_chat_template(chosen))
    except (TemplateError, AttributeError, ValueError):
        return None
    constant = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        **tokenizer.special_tokens_map,
    }
    return lambda messages: rendered(template, {"messages": messages, **constant})


class _ChatSandbox(Sandbox):
    def __init__(self) -> None:
        super().__init__(
            undefined=Undefined,
            finalize=_weigh,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols],
        )
        self.filters["tojson"] = bounded("tojson", _to_json)
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now_as}


@pass_context
def _weigh(_: Context, value: Any) -> Any:
    if isinstance(value, Collection):
        weight(value)
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now_as(form: str) -> str:
    return datetime.now().strftime(form)
