"""YAML as people write it: spec files, and the boxes of the forms.

Only what JSON has comes out: no tags, no dates. What YAML parsers pass over in silence is refused, and so
is a text that is small on disk and huge in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.error import MarkedYAMLError

from airflow_batchinfer.errors import SpecError

MAX_CHARACTERS = 1024 * 1024
"""Longest text."""

MAX_VALUES = 100_000
"""Most fields, items and values, those that an alias repeats counted each time."""

MAX_NESTING = 64
"""Deepest field or item."""

_PLAIN = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")
)
_MERGE = "tag:yaml.org,2002:merge"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """Refuses depth before it costs time. What looks like a date stays text: JSON has none."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own way)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        # The scanner looks at all open brackets at each token: here, not when they are composed.
        self._check_depth(self.flow_level)
        super().fetch_flow_collection_start(token_class)

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        self._check_depth(self._depth)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_scalar(self, node: Any) -> Any:
        """JSON writes what is beyond 16 bits as two escapes; YAML does not know that they are one."""
        value = super().construct_scalar(node)
        try:
            value.encode()
        except UnicodeEncodeError:
            try:
                return value.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                problem = "half of a surrogate pair (such as \\ud800), which is no character"
                raise ConstructorError(None, None, problem, node.start_mark) from None
        return value

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_NESTING:
            raise MarkedYAMLError(None, None, f"nested deeper than {MAX_NESTING} levels", self.get_mark())


def parse_yaml(text: str) -> Any:
    """The text's one value, of JSON's types; none if it is empty.

    Raises:
        SpecError: no YAML, more than one document, a tag, a field that stands twice, a number that cannot
            be, or more than the limits above; names the line where there is one.
    """
    if len(text) > MAX_CHARACTERS:
        raise SpecError(f"is longer than {MAX_CHARACTERS} characters")
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        if _count(root, {}, set()) > MAX_VALUES:
            raise SpecError(f"has more than {MAX_VALUES} values, aliases written out")
        return loader.construct_document(root)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise SpecError(f"cannot be read as YAML: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()


def read_fields(file: Path) -> dict[str, Any]:
    """The fields of a YAML or JSON file. Raises `SpecError` if it holds none."""
    try:
        data = parse_yaml(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot be read as YAML: {error}") from error
    if not isinstance(data, dict):
        raise SpecError(f"a job spec is a mapping of fields, not {type(data).__name__}")
    return data


def _count(node: yaml.Node, known: dict[int, int], above: set[int]) -> int:
    """Values in a node with its aliases written out. Raises `SpecError` for what is not taken."""
    if id(node) in known:
        return known[id(node)]
    line = node.start_mark.line + 1
    if id(node) in above:
        raise SpecError(f"line {line}: an anchor that contains itself")
    if node.tag not in _PLAIN:
        raise SpecError(
            f"line {line}: the tag `{node.tag}` is not allowed: give text, numbers, lists or fields"
        )
    above.add(id(node))
    total = 1
    if isinstance(node, yaml.SequenceNode):
        total += sum(_count(item, known, above) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for name, value in node.value:
            total += _count(value, known, above)
            if name.tag == _MERGE:
                continue
            total += _count(name, known, above)
            line = name.start_mark.line + 1
            if not isinstance(name, yaml.ScalarNode):
                raise SpecError(f"line {line}: a field's name is plain text")
            if name.value in names:
                raise SpecError(f"line {line}: the field `{name.value}` stands twice")
            names.add(name.value)
    above.remove(id(node))
    known[id(node)] = total
    return total
