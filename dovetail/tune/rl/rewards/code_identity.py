"""What a reward or an environment computes, as values to fingerprint: a resumed run compares them (train.inputs).

Code counts without comments and layout. A file that a recipe names counts whole; of a program's function its own source
counts, with the functions and plain values of its module that it names. Other objects count by their class.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from dovetail.core.fingerprint import fingerprint
from dovetail.tune.rl.rewards.imported import Imported

MADE = "<string>"  # where the code of functions lies that a dataclass has written
PLAIN = (str, int, float, bool, bytes, type(None))


def identity(code: Any) -> Any:
    """Return values that are the same in another process as long as `code`, a function or a class, is."""
    return _Walk().of(code)


class _Walk:
    """Each function and container is described once: they may refer to each other."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # by id; held, so that no other object gets it

    def of(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, np.ndarray | np.generic):
            return fingerprint(np.asarray(value))
        if isinstance(value, Imported):
            return [value.name, _file_of(value)]
        if id(value) in self._seen:
            return "above"
        self._seen[id(value)] = value
        if isinstance(value, list | tuple):
            return [self.of(each) for each in value]
        if isinstance(value, Mapping):
            return {str(key): self.of(each) for key, each in value.items()}
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, MethodType):
            return [self._function(value.__func__), self._object(value.__self__)]
        if isinstance(value, FunctionType):
            return self._function(value)
        return self._class(value) if isinstance(value, type) else self._object(value)

    def _object(self, value: Any) -> Any:
        """Its class, and what it holds where it is one that is called."""
        kind = type(value)
        names = f"{kind.__module__}.{kind.__qualname__}", getattr(value, "__qualname__", "")
        if hasattr(value, "__wrapped__"):  # such as by jax.jit
            return [names, self.of(value.__wrapped__)]
        if not callable(value) or not hasattr(value, "__dict__"):
            return names
        if kind.__module__.partition(".")[0] == "dovetail":  # what a reward of ours computes is said by its settings
            return [names, self.of(getattr(value, "identity", None) or vars(value))]
        return [names, self.of(kind), self.of(vars(value))]

    def _class(self, kind: type) -> Any:
        """Its functions and plain values, and those of the classes it derives from, but for the libraries'."""
        if kind.__module__.partition(".")[0] in ("builtins", "dovetail"):
            return kind.__qualname__
        members = {name: _function_of(each) for name, each in vars(kind).items()}
        counted = {
            name: self.of(each)
            for name, each in sorted(members.items())
            if (isinstance(each, FunctionType) and each.__code__.co_filename != MADE)
            or (isinstance(each, PLAIN) and not name.startswith("__"))
        }
        return [kind.__qualname__, counted, [self.of(base) for base in kind.__bases__]]

    def _function(self, function: FunctionType) -> Any:
        code, module = function.__code__, function.__module__
        held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        found = {name: function.__globals__[name] for name in _names(code) if name in function.__globals__}
        near = {name: each for name, each in found.items() if _is_near(each, module)}
        defaults = self.of([function.__defaults__, function.__kwdefaults__])
        return [_source_of(function), defaults, self.of(held), {name: self.of(near[name]) for name in sorted(near)}]


def _is_near(value: Any, module: str) -> bool:
    """Whether it is a part of the function's own module: a plain value, or a function or class defined there."""
    if isinstance(value, FunctionType | type):
        return value.__module__ == module
    return isinstance(value, (*PLAIN, list, tuple, dict, np.ndarray))


def _function_of(member: Any) -> Any:
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _names(code: CodeType) -> set[str]:
    """The globals that a function may read, those of the functions within it too."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _source_of(function: FunctionType) -> Any:
    """As text; of a lambda, whose line holds more, or of what was typed at a prompt, the compiled code."""
    if function.__name__ == "<lambda>":
        return _compiled(function.__code__)
    try:
        return _without_layout(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):
        return _compiled(function.__code__)


def _compiled(code: CodeType) -> list[Any]:
    consts = [_compiled(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return [code.co_code.hex(), consts, list(code.co_names)]


def _file_of(where: Imported) -> str:
    if where.module.endswith(".py"):
        return _without_layout(Path(where.module).read_text(encoding="utf-8"))
    try:
        return _without_layout(inspect.getsource(inspect.getmodule(where.function) or where.function))
    except (OSError, TypeError):  # one that is written in C
        return where.module


def _without_layout(source: str) -> str:
    try:
        return ast.unparse(ast.parse(source))
    except SyntaxError:  # a method's or a lambda's lines may be no whole statement
        return source
