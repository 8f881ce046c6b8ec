"""The Jinja environment of chat templates: they come with downloaded models, so they get text, loops and nothing else.

What is refused: private and mutating attributes, ranges over 100,000, more than MAX_PASSES loop passes and macro calls,
huge repeats, powers and field widths. It is not a limit on memory: a template that doubles a string often enough still
grows, as in any other in-process renderer.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_PASSES = 2_000_000
MAX_WIDTH = 100_000
MAX_TEXT = 1 << 26


class Refusal(TemplateError):
    """A template's own raise_exception."""


@dataclass
class Run:
    """One rendering. `marks` are two characters to put around generation blocks, or None."""

    marks: tuple[str, str] | None = None
    now: datetime = field(default_factory=datetime.now)
    passes: int = 0


# A context variable, not an attribute: one compiled template serves many threads at once.
_RUN: ContextVar[Run] = ContextVar("chat_template_run")


@functools.lru_cache(maxsize=256)
def compile_source(source: str) -> Template:
    """Compiles once for each source; a syntax error is a ValueError that names its line."""
    try:
        return _ENVIRONMENT.from_string(source)
    except Exception as error:
        raise ValueError(explain(error)) from error


def render(source: str, names: dict[str, Any], run: Run) -> str:
    """The template's text. Whatever goes wrong inside it is a ValueError that names the template's line."""
    template = compile_source(source)
    token = _RUN.set(run)
    try:
        return template.render(names)
    except Exception as error:
        raise ValueError(explain(error)) from error
    finally:
        _RUN.reset(token)


def explain(error: BaseException) -> str:
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
    """Jinja rewrites the traceback so that a template's frames carry its own line numbers."""
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


class Generation(Extension):
    """{% generation %}...{% endgeneration %}: what the model itself wrote. Also counts loop passes."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("wrap"), [], [], body, lineno=line)

    def wrap(self, caller: Callable[[], str]) -> str:
        marks = _RUN.get().marks
        return f"{marks[0]}{caller()}{marks[1]}" if marks else caller()

    def tick(self) -> None:
        run = _RUN.get()
        run.passes += 1
        if run.passes > MAX_PASSES:
            raise SecurityError(f"more than {MAX_PASSES:,} loop passes")

    def counted(self, values: Iterable) -> Iterator:
        for value in values:
            self.tick()
            yield value


class TemplateNamespace(Namespace):
    """Jinja's namespace(), without private names: those would let a template stand in for Python's own protocols."""

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
    intercepted_binops = frozenset({"*", "**", "%"})

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # Jinja's own answer is an undefined value, which prints as nothing and hides the attempt.
        raise SecurityError(f"reaching for {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and _size(left) * _size(right) > MAX_TEXT:
            raise SecurityError("a repeat of more than 64 MiB")
        if operator == "**" and (_size(left) > MAX_TEXT or abs(right) > 64):
            raise SecurityError("a power of numbers this large")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(obj, "__self__", None), str):  # 'a'.ljust(10**9)
            _check_widths(args, kwargs)
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
        tree.set_environment(self)
        return tree


def _size(value: Any) -> int | float:
    if isinstance(value, int | float):
        return 1 if isinstance(value, bool) else abs(value)
    return len(value) if hasattr(value, "__len__") else 1


def _check_widths(args: tuple, kwargs: dict) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise SecurityError(f"a width of {value:,} (at most {MAX_WIDTH:,})")


def _check_format(text: str) -> None:
    if re.search(r"%[^%a-zA-Z]*(\d{6}|\*)", text):
        raise SecurityError("a format with a field this wide")


def _bounded(filter_: Callable) -> Callable:
    @functools.wraps(filter_)  # keeps Jinja's pass_environment mark
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_widths(args, kwargs)
        return filter_(*args, **kwargs)

    return checked


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    _check_format(text)
    return text % (kwargs or args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would put \u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _strftime_now(format: str) -> str:
    return _RUN.get().now.strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict:
    # A function and not the type: dict.update(messages[0], ...) would get around the ban on mutation.
    return dict(*args, **kwargs)


def _environment() -> Sandbox:
    env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters |= {"tojson": _tojson, "format": _format}
    for name in ("tojson", "indent", "center", "batch", "slice", "wordwrap"):
        env.filters[name] = _bounded(env.filters[name])
    del env.globals["lipsum"]
    env.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": TemplateNamespace,
        "dict": _dict,
    }
    return env


_ENVIRONMENT = _environment()
