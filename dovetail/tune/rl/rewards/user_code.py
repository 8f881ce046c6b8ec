"""Code of the user (rewards, environments): import it by its location, and fingerprint what it computes."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import RecipeError
from dovetail.core.fingerprint import fingerprint


@dataclass(frozen=True)
class ImportedFunction:
    """A function or class named by its location: `rewards.py:my_reward` or `package.module:name`.

    It is pickled by its location and imported in the other process.

    Attributes:
        module: A module's name, or the absolute path of a file.
        name: The name in the module.
    """

    module: str
    name: str

    @classmethod
    def parse(cls, location: str) -> ImportedFunction:
        """Return the function at a location, without importing it."""
        module, colon, name = location.rpartition(":")
        if not (colon and module and name):
            raise RecipeError(
                f"function must be 'file.py:name' or 'package.module:name'; got {location!r}", param="function"
            )
        return cls(str(Path(module).resolve()) if module.endswith(".py") else module, name)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function or class, imported."""
        module = _import_file(Path(self.module)) if self.module.endswith(".py") else _import_module(self.module)
        value = getattr(module, self.name, None)
        if not callable(value):
            known = [name for name, each in vars(module).items() if callable(each) and not name.startswith("_")]
            problem = (
                f"{self.module} has no function {self.name!r}" if value is None else f"{self.name!r} is not callable"
            )
            raise RecipeError(f"function must exist: {problem}.{did_you_mean(self.name, known)}", param="function")
        return value

    def __call__(self, *arguments: Any, **columns: Any) -> Any:
        """Import and call the function."""
        return self.function(*arguments, **columns)

    def __reduce__(self) -> tuple:
        return ImportedFunction, (self.module, self.name)


def _import_module(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"function must be in a module that can be imported; {module} cannot ({error}): name another, or a file as "
            "'file.py:name'",
            param="function",
        ) from None


def _import_file(path: Path) -> ModuleType:
    """Import a file once per process, under a module name that depends on its path."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise RecipeError(f"function must be in a file that exists; there is no {path}", param="function")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it may import files of its folder
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


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
