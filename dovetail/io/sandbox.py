"""Run chat templates in a Jinja sandbox: they come with downloaded models and may use text and loops only.

Refused are private and mutating attributes, ranges over 100,000, more than MAX_PASSES loop passes and macro calls, and
operations whose result would be too large (see sandbox_bounds). Memory and time of a whole rendering are not limited: a
template that a client brings is rendered in a process with such limits (serve.talk).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context
from jinja2.visitor import NodeTransformer

from dovetail.core.errors import UserError
from dovetail.io import sandbox_bounds as bounds

MAX_PASSES = 2_000_000
MAX_DATE = 1000  # characters of a date's format
_JINJAS: dict[str, Callable[..., Any]] = dict(FILTERS)


class Refusal(TemplateError):
    """Report a template's own raise_exception."""


@dataclass
class Rendering:
    """Hold the state of one rendering. `marks` are two characters to put around generation blocks, or None."""

    marks: tuple[str, str] | None = None
    now: datetime = field(default_factory=datetime.now)
    passes: int = 0


# A context variable, not an attribute: one compiled template serves many threads at once.
_RUN: ContextVar[Rendering] = ContextVar("chat_template_run")


@functools.lru_cache(maxsize=256)
def compile_source(source: str) -> Template:
    """Compile a template, once for each source; raise UserError with the line of a syntax error."""
    try:
        return _ENVIRONMENT.from_string(source)
    except Exception as error:
        raise UserError(explain(error), param="chat_template") from error


def render(source: str, names: dict[str, Any], run: Rendering) -> str:
    """Return the template's text; an error inside it is raised as a UserError that names the template's line."""
    template = compile_source(source)
    token = _RUN.set(run)
    try:
        return template.render(names)
    except Exception as error:
        raise UserError(explain(error), param="chat_template") from error
    finally:
        _RUN.reset(token)


def explain(error: BaseException) -> str:
    """Describe an error of a template, with its line."""
    line = error.lineno if isinstance(error, TemplateSyntaxError) else _line(error)
    where = f"chat template, line {line}" if line else "chat template"
    if isinstance(error, Refusal):
        return f"the chat template refuses these messages: {error} ({where})"
    if isinstance(error, TemplateSyntaxError):
        return f"{where}: not valid Jinja: {error.message}"
    if isinstance(error, SecurityError | OverflowError):
        return f"{where}: not allowed in a chat template: {error}"
    return f"{where}: {type(error).__name__}: {error}"


def _line(error: BaseException) -> int | None:
    """Return the template's line of an error: Jinja rewrites tracebacks to carry it."""
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


class Generation(Extension):
    """Implement {% generation %}...{% endgeneration %}, which marks the model's own text, and count loop passes."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.CallBlock:
        """Parse a generation block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("wrap"), [], [], body, lineno=line)

    def wrap(self, caller: Callable[[], str]) -> str:
        """Return the text of a block, with marks around it if they are asked for."""
        marks = _RUN.get().marks
        return f"{marks[0]}{caller()}{marks[1]}" if marks else caller()

    def tick(self) -> None:
        """Count a pass."""
        run = _RUN.get()
        run.passes += 1
        if run.passes > MAX_PASSES:
            raise SecurityError(f"more than {MAX_PASSES:,} loop passes")

    def counted(self, values: Iterable) -> Iterator:
        """Yield the values of a loop and count its passes."""
        for value in values:
            self.tick()
            yield value

    def joined(self, *values: Any) -> str:
        """Return `a ~ b`, if it is not too long."""
        return "".join(map(str, bounds.bounded(values)))


class _Joins(NodeTransformer):
    """Replace `a ~ b` by a call: it is the one operator that a sandbox cannot intercept."""

    def __init__(self, extension: Extension):
        self._extension = extension

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._extension.call_method("joined", node.nodes, lineno=node.lineno)


class TemplateNamespace(Namespace):
    """Provide Jinja's namespace() without private names, which would let a template implement Python's protocols."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self` by name, so that namespace(self=1) works
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace name that begins with an underscore: {name!r}")


class Sandbox(ImmutableSandboxedEnvironment):
    """Check attributes, operators and calls of a template."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join what a template, a macro or a block has written."""
        return "".join(bounds.bounded(pieces))

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an unsafe attribute."""
        # Jinja's own answer is an undefined value, which prints as nothing and hides the attempt.
        raise SecurityError(f"reaching for {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check the size of the result, then apply the operator."""
        if operator == "+":
            bounds.check_sum(left, right)
        elif operator == "*":
            bounds.check_repeat(left, right)
        elif operator == "**":
            bounds.check_power(left, right)
        elif isinstance(left, str | bytes):
            bounds.check_percent(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format` with a check of the size of its result."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            bounds.check_format(value.__self__, (*args, kwargs))
            return wrapped(*args, **kwargs)

        return checked

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Check the size of the result, then call the object."""
        text = getattr(obj, "__self__", None)
        if isinstance(text, str | bytes):  # 'a'.ljust(10**9)
            bounds.check_widths((*args, *kwargs.values()))
            if obj.__name__ == "join" and args:
                args = (bounds.bounded(args[0], text), *args[1:])
            elif (check := bounds.METHODS.get(obj.__name__)) is not None:
                check(text, *args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        counter = self.extensions[Generation.identifier]
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            if isinstance(node, nodes.For) and not node.recursive:
                # A sandboxed call costs microseconds: once per loop, not once per pass.
                node.iter = counter.call_method("counted", [cast(nodes.Expr, node.iter)], lineno=node.lineno)
            else:
                tick = counter.call_method("tick", lineno=node.lineno)
                node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        tree = _Joins(counter).visit(tree)
        tree.set_environment(self)
        return tree


def _bounded(filter_: Callable) -> Callable:
    """Wrap a filter so that widths and the length of its arguments are checked."""

    @functools.wraps(filter_)  # keeps Jinja's pass_environment mark
    def checked(*args: Any, **kwargs: Any) -> Any:
        bounds.check_widths((*args, *kwargs.values()))
        bounds.check_text(*args, *kwargs.values())
        return filter_(*args, **kwargs)

    return checked


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    bounds.check_percent(text, (kwargs or args))
    return text % (kwargs or args)


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (each if isinstance(each, str) else _text(each) for each in (text, old, new))
    bounds.check_replace(text, old, new, count)
    return text.replace(old, new, -1 if count is None else count)


@pass_eval_context
def _join(context: EvalContext, values: Iterable, between: Any = "", attribute: str | int | None = None) -> str:
    items = values if attribute is None else map(make_attrgetter(context.environment, attribute), values)
    between = _text(between)
    return between.join(map(_text, bounds.bounded(items, between)))


def _text(value: Any) -> str:
    bounds.check_text(value)
    return str(value)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(text)
    bounds.check_widths((width,))
    size = len(width) if isinstance(width, str) else width
    bounds.check_size(len(text) + (text.count("\n") + 1) * size)
    return _JINJAS["indent"](text, width, first, blank)


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > 300:
        raise SecurityError(f"a precision of {precision:,} digits")
    return _JINJAS["round"](value, precision, method)


@functools.wraps(FILTERS["sum"])
def _sum(environment: Any, values: Iterable, attribute: str | int | None = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise SecurityError(f"a sum of {type(start).__name__}s")
    return _JINJAS["sum"](environment, values, attribute, start)


def _finalize(value: Any) -> Any:
    """Return what {{ }} writes."""
    if not isinstance(value, str):
        bounds.check_text(value)
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would put \u003c into prompts.
    size, step = bounds.check_text(value), max(map(len, separators or ("",)))
    step += len(indent) if isinstance(indent, str) else abs(indent or 0)
    bounds.check_size(size * (1 + step))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _strftime_now(format: str) -> str:
    if len(format) > MAX_DATE:
        raise SecurityError(f"a date's format of {len(format):,} characters")
    return _RUN.get().now.strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict:
    # A function and not the type: dict.update(messages[0], ...) would get around the ban on mutation.
    return dict(*args, **kwargs)


def _environment() -> Sandbox:
    env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=_finalize)
    env.filters |= {"tojson": _tojson, "format": _format, "replace": _replace, "join": _join, "string": _text}
    env.filters |= {"indent": _indent, "round": _round, "sum": _sum}
    for name in ("center", "batch", "slice", "truncate", "pprint", "title", "urlencode", "e", "escape", "forceescape"):
        env.filters[name] = _bounded(env.filters[name])
    for name in ("urlize", "wordwrap", "xmlattr"):  # of web pages and terminals; they are slow on long text
        del env.filters[name]
    del env.globals["lipsum"]
    env.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": TemplateNamespace,
        "dict": _dict,
    }
    return env


_ENVIRONMENT = _environment()
