"""The sandbox that templates run in: what they may reach, how much they may make, how long they may take.

Jinja's own sandbox keeps templates from attributes and from changing values; it bounds neither size nor
time. Here every value has a *weight*: the characters it is made of and eight for each item, shared parts
counted each time. Whatever could make a heavy value is looked at before it does, and what comes out of a
filter or a call is weighed. A namespace can change after it was weighed, so it cannot be part of another
value. So no single step is long, and between steps, in each round of a loop, each item of a `select` and each
call of a macro, the clock is looked at.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import BuiltinMethodType, GeneratorType
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, Undefined, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer

MAX_RENDERED_CHARACTERS = 8 * 1024 * 1024
"""Greatest weight of a value, and longest text of one template; far beyond any model's context."""

MAX_RENDER_SECONDS = 10.0
"""Longest time one template may take for one row, but for the step in which it is over."""

MAX_NESTING = 64
"""Deepest list or mapping."""

MAX_INTEGER_BITS = 4096

_ITEM_WEIGHT = 8
"""Of an item beside its value, in characters: a list of a million empty texts is no small thing either."""

OWN_NAMES = frozenset({"range", "namespace"})
"""Functions that templates have."""

TICK = "__batchinfer_tick"
_JOIN = "__batchinfer_join"
_WEIGH = "__batchinfer_weigh"
_HOLD = "__batchinfer_hold"
HIDDEN_NAMES = frozenset({TICK, _JOIN, _WEIGH, _HOLD})
"""Names that the sandbox itself puts into templates."""

_NO_FILTERS = frozenset({"pprint", "urlize", "xmlattr"})
"""For HTML or debugging, and with outputs whose size depends on much."""

_PASS_OVER = frozenset({"select", "reject", "selectattr", "rejectattr"})
"""Filters that may look at many items and give none."""

_FAR_TOO_WIDE = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*?(\*|\d{5})|\{[^{}]*:[^{}]*?(\d{5}|\{)")
"""A width of five digits or one that comes from a value, in either of Python's two ways to format."""

_MOST_STRIPPED = 10**10
"""Characters times `<`: `striptags` copies the text once for each."""


class RenderError(Exception):
    """The template failed on this row; says which template, which column and why."""


class Clock:
    """Ends a rendering that takes too long. One a rendering; called in each round of a loop."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_RENDER_SECONDS

    def __call__(self) -> None:
        """Raise `RenderError` once the time is over."""
        if time.monotonic() > self._deadline:
            raise RenderError(f"took more than {MAX_RENDER_SECONDS:g} s")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox without helper functions and other templates, and with bounds.

    A template's context must hold a `Clock` under `TICK`.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        """Make an environment; `options` are Jinja's, in place of ours."""
        ours = {"undefined": StrictUndefined, "finalize": _none_is_empty}
        # Not optimized: constant expressions would run when the template is compiled, without bounds.
        super().__init__(autoescape=False, optimized=False, **{**ours, **options})
        self.globals = {
            "range": self.globals["range"],
            "namespace": Namespace,
            TICK: None,
            _JOIN: _joined,
            _WEIGH: _weighed,
            _HOLD: _held,
        }
        self.filters = {name: bounded(name, f) for name, f in self.filters.items() if name not in _NO_FILTERS}

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join what a block or a macro wrote."""
        return _joined(*pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for other in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise TemplateSyntaxError("a template cannot read other templates", other.lineno)
        _Rewriter().visit(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See the base class; what would be too heavy is not done."""
        whole = isinstance(left, int) and isinstance(right, int)
        match operator:
            case "*" if whole:
                _check_bits(operator, left.bit_length() + right.bit_length())
            case "**" if whole:
                _check_bits(operator, left.bit_length() * abs(right))
            case "*":
                for value, times in ((left, right), (right, left)):
                    if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
                        _check_weight(weight(value) * times)
            case "+" if not whole:
                _check_weight(weight(left) + weight(right))
            case "%" if isinstance(left, (str, bytes)):
                _check_format(left, right)
        return _weighed(super().call_binop(context, operator, left, right), context)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See the base class; what would be too heavy is not called."""
        own = getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "")
        if name in ("format", "format_map", "strftime"):
            text = own if isinstance(own, str) else " ".join(a for a in args if isinstance(a, str))
            _check_format(text, [*args, *kwargs.values()])
        elif isinstance(obj, BuiltinMethodType) and isinstance(own, (str, bytes, int)):
            args = _checked_call(name, own, args)
        elif obj is Namespace:
            for value in (*args, *kwargs.values()):
                _held(value)
        return _weighed(super().call(context, obj, *args, **kwargs), context)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """See the base class; the wrapper still says whose method it is."""
        wrapper: Any = super().wrap_str_format(value)
        if wrapper is not None:
            wrapper.__self__ = value.__self__
        return wrapper  # type: ignore[no-any-return]


def rendered(template: Template, values: Mapping[str, Any]) -> str:
    """A template's text; it comes from a `Sandbox`.

    Raises:
        RenderError: past a bound.
        TemplateError, or any other: what the template itself has met.
    """
    pieces: list[str] = []
    size = 0
    for piece in template.generate({**values, TICK: Clock()}):
        size += len(piece)
        if size > MAX_RENDERED_CHARACTERS:
            raise RenderError(f"made more than {MAX_RENDERED_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


def weight(value: Any) -> int:
    """How many characters a value is made of, items counted as eight.

    Raises:
        RenderError: it is too heavy, nested too deep, or has a namespace in it.
    """
    total, level, depth = 0, [value], 0
    while level:
        inner: list[Any] = []
        for v in level:
            if isinstance(v, (str, bytes)):
                total += len(v)
            elif isinstance(v, int):
                total += 1 + v.bit_length() // 3
            elif isinstance(v, Namespace):
                raise RenderError("a namespace cannot stand in a list, a mapping or another namespace")
            elif isinstance(v, Collection):
                total += _ITEM_WEIGHT * len(v)
                inner.extend(v)
                if isinstance(v, Mapping):
                    inner.extend(v.values())
            else:
                total += 1
            if total > MAX_RENDERED_CHARACTERS:
                raise _too_much()
        level, depth = inner, depth + 1
        if depth > MAX_NESTING + 1:
            raise RenderError(f"made a value nested deeper than {MAX_NESTING} levels")
    return total


class _Rewriter(NodeTransformer):
    """Puts a look at the clock into loops and macros, and a scale at whatever makes values."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (Jinja's name, as below)
        if node.test is not None:
            # No round begins for an item that fails it. The clock gives nothing, which is not true.
            ticked = nodes.Not(_call(TICK, [], node.lineno), lineno=node.lineno)
            node.test = nodes.And(ticked, node.test, lineno=node.lineno)
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.target, nodes.NSRef) or node.target.find(nodes.NSRef):
            value: Any = node.node
            node.node = _call(_HOLD, [value], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call(_JOIN, node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._weighing(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._weighing(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._weighing(node) if node.ctx == "load" else node

    def _ticking(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(TICK, [], node.lineno), lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    def _weighing(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _call(_WEIGH, [node], node.lineno)


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), arguments, [], None, None, lineno=line)


@pass_context
def _none_is_empty(_: Context, value: Any) -> Any:
    # It takes the context, so that Jinja cannot call it while it compiles.
    if isinstance(value, str):
        return value
    if isinstance(value, Collection):
        weight(value)
    return "" if value is None else value


def _joined(*pieces: Any) -> str:
    texts = [piece if isinstance(piece, str) else _text(piece) for piece in pieces]
    _check_weight(sum(map(len, texts)))
    return "".join(texts)


def _text(value: Any) -> str:
    weight(value)
    return str(value)


def _weighed(value: Any, context: Context | None = None) -> Any:
    """The value, if it is not too heavy; what is made only when it is asked for is weighed then."""
    if isinstance(value, (str, bytes)):
        _check_weight(len(value))
    elif isinstance(value, int):
        _check_bits("it", value.bit_length())
    elif isinstance(value, GeneratorType) and context is not None:
        return _weighed_one_by_one(value, context.get(TICK))
    elif isinstance(value, Collection) and not isinstance(value, Undefined):
        weight(value)
    return value


def _held(value: Any) -> Any:
    """What a namespace is about to hold; it may be nothing, for a later `default`."""
    if not isinstance(value, Undefined):
        weight([value])
    return value


def _weighed_one_by_one(values: Iterator[Any], clock: Any) -> Iterator[Any]:
    total = 0
    for value in values:
        clock()
        total += 1 + weight(value)
        _check_weight(total)
        yield value


def _with_clock(values: Iterable[Any], clock: Any) -> Iterator[Any]:
    for value in values:
        clock()
        yield value


def bounded(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses what would make too much."""
    passes = _PassArg.from_obj(inner)

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = _checked_filter(name, value, [*args, *kwargs.values()])
        if name in _PASS_OVER and value:
            value = _with_clock(value, context.get(TICK))
        first = {
            None: (),
            _PassArg.context: (context,),
            _PassArg.eval_context: (context.eval_ctx,),
            _PassArg.environment: (context.environment,),
        }[passes]
        return _weighed(inner(*first, value, *args, **kwargs), context)

    return run


def _checked_filter(name: str, value: Any, given: list[Any]) -> Any:
    """The filter's input, read to its end where that is needed. Raises `RenderError`."""
    numbers = [abs(g) for g in given if isinstance(g, int)]
    texts = [len(g) for g in given if isinstance(g, str)]
    match name:
        case "center":
            _check_weight(max(numbers, default=0))
        case "batch" | "slice":
            _check_weight(_ITEM_WEIGHT * max(numbers, default=0))
        case "round" if max(numbers, default=0) > 100:
            raise RenderError("`round` takes up to 100 digits")
        case "indent":
            text = _text(value)
            _check_weight(len(text) + (1 + text.count("\n")) * max([*numbers, *texts], default=4))
        case "wordwrap":
            _check_weight(len(_text(value)) * (1 + max(texts, default=0)) // 10)
        case "tojson":
            _check_weight(weight(value) * (1 + 8 * max(numbers, default=0)))
        case "replace":
            _check_replace(_text(value), given)
        case "format":
            _check_format(_text(value), given)
        case "join":
            value = list(value)
            _check_weight(weight(value) + len(value) * max(texts, default=0))
        case "sum" if not all(isinstance(g, (int, float, str)) for g in given):
            raise RenderError("`sum` adds up numbers only")
        case "striptags":
            text = _text(value)
            if text.count("<") * len(text) > _MOST_STRIPPED:
                raise RenderError("`striptags`: the text has too many tags for its length")
        case "string" | "escape" | "e" | "forceescape":
            if not isinstance(value, GeneratorType):
                weight(value)
    return value


def _checked_call(name: str, own: str | bytes | int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a method of a text or a number, read to their end where that is needed."""
    numbers = [abs(a) for a in args if isinstance(a, int)]
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            _check_weight(max(numbers, default=0))
        case "expandtabs" if isinstance(own, (str, bytes)):
            tabs = own.count("\t") if isinstance(own, str) else own.count(b"\t")
            _check_weight(len(own) + tabs * max(numbers, default=8))
        case "replace":
            _check_replace(own, list(args))
        case "join" if args:
            items = list(args[0])
            _check_weight(weight(items) + len(items) * weight(own))
            return (items, *args[1:])
        case "translate" | "to_bytes":
            raise RenderError(f"`{name}` is not available")
    return args


def _check_replace(text: Any, given: list[Any]) -> None:
    if len(given) >= 2 and all(isinstance(g, type(text)) for g in given[:2]):
        old, new = given[:2]
        _check_weight(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _check_format(text: str | bytes, values: Any) -> None:
    form = text if isinstance(text, str) else text.decode("latin-1")
    if _FAR_TOO_WIDE.search(form):
        raise RenderError("a width in a format has up to four digits, and stands in the format itself")
    places = max(form.count("%"), form.count("{"))
    _check_weight(len(form) + places * (10_000 + weight(values)) // 10)


def _check_bits(operator: str, bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise RenderError(f"whole numbers are bounded: `{operator}` makes more than {MAX_INTEGER_BITS} bits")


def _check_weight(total: int) -> None:
    if total > MAX_RENDERED_CHARACTERS:
        raise _too_much()


def _too_much() -> RenderError:
    return RenderError(f"made more than {MAX_RENDERED_CHARACTERS} characters or items")
