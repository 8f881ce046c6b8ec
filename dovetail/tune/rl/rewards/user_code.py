"""Code of the user (rewards, environments): import it by its location, and fingerprint what it computes."""

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
from dovetail.core.imported import ImportedFunction

# --- identity ---------------------------------------------------------------------------------------------------------

GENERATED = "<string>"  # the file name of methods that dataclasses generate
PLAIN = (str, int, float, bool, bytes, type(None))


def identity(code: Any) -> Any:
    """Return values to fingerprint: the same in another process as long as `code`, a function or a class, is the same.

    Comments and layout do not count. A file that a recipe names counts whole; of a program's function its own source
    counts, with the functions and plain values of its module that it names. Other objects count by their class. A
    resumed run compares the fingerprints (train.inputs).
    """
    return _Identities().of(code)


class _Identities:
    """Describe each function and container once: they may refer to each other."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # by id; the object is held, so that no other object gets its id

    def of(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, np.ndarray | np.generic):
            return fingerprint(np.asarray(value))
        if isinstance(value, ImportedFunction):
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
        """Return its class, and its attributes if it is callable."""
        kind = type(value)
        names = f"{kind.__module__}.{kind.__qualname__}", getattr(value, "__qualname__", "")
        if hasattr(value, "__wrapped__"):  # such as by jax.jit
            return [names, self.of(value.__wrapped__)]
        if not callable(value) or not hasattr(value, "__dict__"):
            return names
        if kind.__module__.partition(".")[0] == "dovetail":  # a built-in reward is defined by its settings
            return [names, self.of(getattr(value, "identity", None) or vars(value))]
        return [names, self.of(kind), self.of(vars(value))]

    def _class(self, kind: type) -> Any:
        """Return its functions and plain values, and those of its base classes except for the libraries'."""
        if kind.__module__.partition(".")[0] in ("builtins", "dovetail"):
            return kind.__qualname__
        members = {name: _function_of(each) for name, each in vars(kind).items()}
        counted = {
            name: self.of(each)
            for name, each in sorted(members.items())
            if (isinstance(each, FunctionType) and each.__code__.co_filename != GENERATED)
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
    """Return whether a value belongs to the module: a plain value, or a function or class defined there."""
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
    """Return the globals that a function and the functions within it may read."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _source_of(function: FunctionType) -> Any:
    """Return the source; for a lambda, or a function without a file, the compiled code."""
    if function.__name__ == "<lambda>":
        return _compiled(function.__code__)
    try:
        return _without_layout(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):
        return _compiled(function.__code__)


def _compiled(code: CodeType) -> list[Any]:
    consts = [_compiled(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return [code.co_code.hex(), consts, list(code.co_names)]


def _file_of(imported: ImportedFunction) -> str:
    if imported.module.endswith(".py"):
        return _without_layout(Path(imported.module).read_text(encoding="utf-8"))
    try:
        return _without_layout(inspect.getsource(inspect.getmodule(imported.function) or imported.function))
    except (OSError, TypeError):  # a module written in C
        return imported.module


def _without_layout(source: str) -> str:
    try:
        return ast.unparse(ast.parse(source))
    except SyntaxError:  # the lines of a method or a lambda may not be a whole statement
        return source
