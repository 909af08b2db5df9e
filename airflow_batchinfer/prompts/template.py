"""Templates: which columns a prompt reads, and how one row becomes text or chat messages.

Row text is data: it is handed to Jinja as values and never parsed. The sandbox lets a template see the
row's columns and nothing else; what it makes and how long it takes are bounded, so that one row
costs only itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, UndefinedError, nodes
from jinja2.meta import find_undeclared_variables

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.prompts.sandbox import HIDDEN_NAMES, OWN_NAMES, RenderError, Sandbox, rendered
from airflow_batchinfer.spec import PromptSpec

_ROW = "row"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row's prompt before any tokenizer: chat `messages` (`role`, `content`), or plain `text`."""

    messages: list[dict[str, str]] | None = None
    text: str | None = None


class _Compiled:
    """One compiled template with the name of the spec's field it comes from."""

    def __init__(self, sandbox: Sandbox, field: str, source: str) -> None:
        self.field = field
        self.columns = _columns(sandbox, field, source)
        self._template = sandbox.from_string(source)

    def render(self, row: Mapping[str, Any]) -> str:
        """Render one row.

        Raises:
            RenderError: for whatever goes wrong: a missing column, a sandbox violation, a bound.
        """
        try:
            # A column may be called `row`; then it is reached as `row["row"]`.
            return rendered(self._template, {**row, _ROW: row})
        except RenderError as error:
            raise RenderError(f"prompt.{self.field}: {error}") from error
        except UndefinedError as error:
            raise RenderError(
                f"prompt.{self.field}: {error.message} (the row has {', '.join(row) or 'no columns'})"
            ) from error
        except TemplateError as error:
            raise RenderError(f"prompt.{self.field}: {error.message}") from error
        except Exception as error:  # an expression on this row's values, e.g. a string minus a number
            raise RenderError(f"prompt.{self.field}: {type(error).__name__}: {error}") from error


def _columns(sandbox: Sandbox, field: str, source: str) -> list[str]:
    """Columns a template reads, in order of first use."""
    tree = sandbox.parse(source)
    free = find_undeclared_variables(tree) - OWN_NAMES - HIDDEN_NAMES
    found: dict[str, None] = {}

    def visit(node: nodes.Node) -> None:
        if isinstance(node, nodes.Name) and node.ctx == "load" and node.name in free:
            if node.name == _ROW:
                raise SpecError(
                    f'prompt.{field}: line {node.lineno}: use `row["column name"]` with a fixed name; '
                    "the columns a prompt reads must be known before it runs"
                )
            found.setdefault(node.name)
        if isinstance(node, (nodes.Getitem, nodes.Getattr)) and _is_row(node.node, free):
            if isinstance(node, nodes.Getattr):
                found.setdefault(node.attr)
                return
            if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
                found.setdefault(node.arg.value)
                return
        for child in node.iter_child_nodes():
            visit(child)

    visit(tree)
    return list(found)


def _is_row(node: nodes.Node, free: set[str]) -> bool:
    return isinstance(node, nodes.Name) and node.name == _ROW and _ROW in free


class PromptTemplate:
    """A prompt spec, compiled: renders rows, and knows the columns it reads."""

    def __init__(self, prompt: PromptSpec) -> None:
        """Compile the spec's templates.

        Raises:
            SpecError: a template is no Jinja, reads no column, or uses `row` in a way that hides which.
        """
        sandbox = Sandbox()
        try:
            self._templates = [_Compiled(sandbox, f, source) for f, source in prompt.templates().items()]
        except TemplateError as error:
            raise SpecError(f"prompt: {error.message}") from error
        except (RecursionError, SyntaxError, MemoryError) as error:  # Python's own limits, once compiled
            raise SpecError(f"prompt: a template is nested too deep: {error}") from error
        self.columns: list[str] = list(dict.fromkeys(c for t in self._templates for c in t.columns))
        """Input columns the prompt reads, in order of first use."""
        if not self.columns:
            raise SpecError(
                f"prompt.{self._templates[-1].field}: reads no column, so all rows would be the same; "
                "write one as `{{ column }}`"
            )
        self._prompt = prompt

    def render(self, row: Mapping[str, Any]) -> Rendered:
        """Render one row's prompt; needs the row's values of `columns` only.

        Raises:
            RenderError: the template failed on this row.
        """
        contents = self.contents(row)
        if not self._prompt.chat:
            return Rendered(text=contents[0])
        return Rendered(messages=self.messages(contents))

    def contents(self, row: Mapping[str, Any]) -> list[str]:
        """The rendered templates alone, in the spec's order; `messages` makes them a conversation.

        Raises:
            RenderError: the template failed on this row.
        """
        return [template.render(row) for template in self._templates]

    def messages(self, contents: list[str]) -> list[dict[str, str]]:
        """The conversation around rendered contents: system, examples before the last, user."""
        prompt = self._prompt
        if prompt.messages is not None:
            conversation = [
                {"role": m.role, "content": c} for m, c in zip(prompt.messages, contents, strict=True)
            ]
        else:
            conversation = [{"role": "user", "content": contents[0]}]
            if prompt.system is not None:
                conversation.insert(0, {"role": "system", "content": prompt.system})
        shown = [
            message
            for example in prompt.examples
            for message in (
                {"role": "user", "content": example.user},
                {"role": "assistant", "content": example.assistant},
            )
        ]
        return [*conversation[:-1], *shown, conversation[-1]]
